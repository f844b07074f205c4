"""Describes a planned run in a few lines, from the model on the meta device."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig

from fsdp_qlora.adapters.insert import magnitudes
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.output.text import GIB, format_bytes
from fsdp_qlora.planning.build_model import MetaModel
from fsdp_qlora.planning.memory import Memory
from fsdp_qlora.ranks.distributed import SHARDING_STRATEGIES
from fsdp_qlora.sharding.model_parts import count_bytes, count_parameters

SERVED_RANK = 16  # vLLM's default of max_lora_rank


def describe_model(meta: MetaModel) -> str:
    """One line: architecture, parameters, quantized shares of all and of the blocks, trainable ones, attention."""
    counts = count_parameters(meta.parts)
    share = 100 * counts["quantized"] / max(counts["in_blocks"], 1)  # there are none where all trains
    kind = "DoRA" if magnitudes(meta.model) else "LoRA"
    experts = f" and {len(meta.target_parameters)} expert parameters" if meta.target_parameters else ""
    return (
        f"Model: {type(meta.model).__name__}, {format_count(counts['total'])} parameters, "
        f"{100 * counts['quantized'] / counts['total']:.1f}% quantized, "
        f"{format_count(counts['trainable'])} trainable"
        + (f" ({kind} on {len(meta.targets)} layers{experts})" if meta.targets else "")
        + f", attention {meta.model.config._attn_implementation}"
        + (f", {share:.1f}% of the decoder blocks quantized" if counts["quantized"] else "")
    )


def describe_memory(memory: Memory, *, num_shards: int, on_gpu: bool, gpu_bytes: int | None = None) -> list[str]:
    """Bytes per rank, on the GPU and the host, then by what they are. Nothing is allocated for it.

    Args:
        on_gpu: whether the ranks are to compute on GPUs. gpu_bytes: memory of the GPU that is visible, if one is.
    """
    total, host = memory.reserved, sum(memory.host.values())
    places = f"GPU about {format_bytes(total)}, host {format_bytes(host)}"
    if not on_gpu:
        places = f"about {format_bytes(total + host)}"
    how = f"{num_shards}-way sharded" if num_shards > 1 else "a whole copy"
    lines = [
        f"Memory per rank, {how}, with recompute: {places}",
        f"  {_named(memory.weights)}",
        f"  most at the {memory.peak}: {_named(memory.phases[memory.peak])}; each block without recompute keeps "
        f"{format_bytes(memory.block)} more",
    ]
    if on_gpu and gpu_bytes is not None and total > gpu_bytes:
        lines.append(f"This does not fit in the {gpu_bytes / GIB:.0f} GiB of a GPU here.")
    return lines


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in sizes.items() if count)


def describe_link(meta: MetaModel, *, sharding_strategy: str, num_nodes: int) -> str:
    """One line: about how much each of several nodes sends to the others in a step."""
    sharded_over, frees_blocks = SHARDING_STRATEGIES[sharding_strategy]
    sizes = {name: count.total for name, count in count_bytes(meta.model, 1).items()}
    all_reduced = 2 * sizes.pop("trainable") * (num_nodes - 1) // num_nodes
    line = f"Between {num_nodes} nodes: each sends about {format_bytes(all_reduced)} per step, gradients of what trains"
    if sharded_over == "all":
        gathered = sum(sizes.values()) * (2 if frees_blocks else 1) * (num_nodes - 1) // num_nodes
        line += f", and {format_bytes(gathered)} per micro-batch, gathered weights"
    return line


def describe_batches(schedule: Schedule, rows: np.ndarray, lengths: np.ndarray) -> str:
    """One line: how rows share a micro-batch, and the shares of the first steps' tokens that are the rows' own."""
    of_computed, of_lock_step = schedule.first_useful_shares(rows, lengths)
    how = "rows padded to the longest" if schedule.padding else "padding-free"
    packed = f", at most {schedule.batch_size * schedule.context_length} tokens" if schedule.packing else ""
    return (
        f"Micro-batches: {how}{packed}; rows are {of_computed:.1%} of the tokens computed and {of_lock_step:.1%} of "
        "those that the ranks could compute in that time"
    )


def describe_device(device: torch.device, world_size: int) -> str:
    """One line: number of ranks and their device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        what = "GPUs that are not in this machine: memory and precision are planned for them (--device cpu for the CPU)"
    elif device.type == "cuda":
        what = f"{torch.cuda.get_device_name(device)} (NCCL)"
    else:
        what = "the CPU (gloo)"
    return f"Devices: {world_size} rank{'s' * (world_size > 1)} on {what}"


def format_count(count: float) -> str:
    """1234567 -> "1.2M"."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.2f}B"


def describe_result(summary: dict[str, float], output_dir: Path, seconds: float, *, saved: bool) -> str:
    """The end of a run: losses, speed and where the files are."""
    lines = [f"Finished in {seconds:.0f} s: last training loss {summary['loss']:.4f}"]
    if "eval_loss" in summary:
        ends = f"{summary['first_eval_loss']:.4f} -> {summary['eval_loss']:.4f}"
        if summary.get("best_eval_loss", math.inf) < summary["eval_loss"]:
            ends += f", lowest trained {summary['best_eval_loss']:.4f} at step {summary['best_eval_step']:.0f}"
        lines.append(f"  held-out loss {ends}")
    rate = summary["num_tokens"] / max(summary["train_seconds"], 1e-9)
    lines.append(f"  {format_count(summary['num_tokens'])} tokens, {rate:.0f} tokens/s")
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    files = sorted(path.name for path in entries if path.is_file() and not path.name.startswith("."))
    lines.append(f"  {'Saved' if saved else 'Nothing saved, metrics only'}: {output_dir}/ ({', '.join(files)})")
    return "\n".join(lines)


def describe_servers(adapter: LoraConfig | None) -> str | None:
    """One line if the adapter is one that servers such as vLLM do not load as it is; None if it is not."""
    if adapter is None:
        return None
    rank = max(adapter.r, *(adapter.rank_pattern or {}).values(), 0)
    reasons = [
        *["no DoRA"] * adapter.use_dora,
        *["no modules_to_save"] * bool(adapter.modules_to_save),
        *[f"rank {SERVED_RANK} at most unless told otherwise (this one is saved in {rank})"] * (rank > SERVED_RANK),
    ]
    if not reasons:
        return None
    return f"For later: servers of adapters such as vLLM take {', '.join(reasons)}. A merged model has no such limit."
