"""Describes a planned run in a few lines, from the model on the meta device."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
from fsdp_qlora.model.adapters.insert import magnitudes
from fsdp_qlora.model.architecture.chunking import count_pieces
from fsdp_qlora.model.architecture.fused import Mlp
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.build_model import MetaModel
from fsdp_qlora.model.model_parts import ModelParts, count_bytes, count_parameters
from fsdp_qlora.planning.memory import Memory
from fsdp_qlora.utils.text import GIB, fit, format_bytes

log = logging.getLogger("fsdp_qlora")


def log_plan(config: TrainConfig, first: str, *details: str | None) -> None:
    """Log what is planned: in a dry run all of it, else the first line, cut to the screen, with verbose all."""
    log.info("%s", first if config.dry_run or config.verbose else fit(first))
    for line in filter(None, details):
        log.log(logging.INFO if config.dry_run else logging.DEBUG, "%s", line)


def describe_model(meta: MetaModel, precision: Precision) -> list[str]:
    """Architecture, parameters, quantized and trainable ones, precision; and attention and the quantized blocks."""
    counts = count_parameters(meta.parts)
    share = 100 * counts["quantized"] / max(counts["in_blocks"], 1)  # there are none where all trains
    kind = "DoRA" if magnitudes(meta.model) else "LoRA"
    experts = f" and {len(meta.target_parameters)} expert parameters" if meta.target_parameters else ""
    adapted = f" ({kind} on {len(meta.targets)} layers{experts})" if meta.targets else ""
    quantized = 100 * counts["quantized"] / counts["total"]
    return [
        f"Model: {type(meta.model).__name__}, {format_count(counts['total'])} parameters, {quantized:.1f}% quantized; "
        f"{format_count(counts['trainable'])} train{adapted}, {precision.name}",
        f"  attention {meta.model.config._attn_implementation}; {share:.1f}% of the decoder blocks quantized",
    ]


def describe_memory(memory: Memory, *, where: str, on_gpu: bool, gpu_bytes: int | None = None) -> list[str]:
    """Bytes per rank, on the GPU and the host, then by what they are. Nothing is allocated for it.

    Args:
        where: ranks and placement. on_gpu: whether the ranks are to compute on GPUs. gpu_bytes: memory of the GPU that
            is visible, if one is.
    """
    total, host = memory.reserved, sum(memory.host.values())
    needs = f"about {format_bytes(total if on_gpu else memory.allocated)}"
    if on_gpu and gpu_bytes is not None:
        needs = f"{total / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB"
    if on_gpu and host:
        needs += f" of the GPU, {format_bytes(host)} of the host"
    return [
        f"Memory: each rank needs {needs}; {where}",
        f"  {_named(memory.weights)}",
        f"  most at the {memory.peak}: {_named(memory.phases[memory.peak])}; each block without recompute keeps "
        f"{format_bytes(memory.block)} more",
    ]


def describe_pieces(parts: ModelParts, memory: Memory, num_tokens: int) -> str | None:
    """One line if MLPs of blocks that recompute are computed in pieces."""
    hidden = parts.model.config.get_text_config().hidden_size
    mlps = [module for module in parts.blocks.modules() if isinstance(module, Mlp)]
    number = max((count_pieces(num_tokens, hidden=hidden, inner=mlp.inner) for mlp in mlps), default=1)
    return f"long rows: MLPs in {number} pieces of tokens" if memory.recomputing and number > 1 else None


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in sizes.items() if count)


def describe_link(meta: MetaModel, *, sharding_strategy: str, num_nodes: int) -> str:
    """One line: about how much each of several nodes sends to the others in a step."""
    sharded_over, frees_blocks = SHARDING_STRATEGIES[sharding_strategy]
    sizes = {name: count.total for name, count in count_bytes(meta.parts.kinds(meta.model), 1).items()}
    all_reduced = 2 * sizes.pop("trainable") * (num_nodes - 1) // num_nodes
    line = f"Between {num_nodes} nodes: each sends about {format_bytes(all_reduced)} per step, gradients of what trains"
    if sharded_over == "all":
        gathered = sum(sizes.values()) * (2 if frees_blocks else 1) * (num_nodes - 1) // num_nodes
        line += f", and {format_bytes(gathered)} per micro-batch, gathered weights"
    return line


def describe_device(device: torch.device, world_size: int) -> str:
    """The number of ranks and their device."""
    what = "the CPU"
    if device.type == "cuda":
        is_here, elsewhere = torch.cuda.is_available(), "GPUs that are not here (--device cpu plans for the CPU)"
        what = torch.cuda.get_device_name(device) if is_here else elsewhere
    return f"{world_size} rank{'s' * (world_size > 1)} on {what}"


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
