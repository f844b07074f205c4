"""What a run is going to do, in a few lines for people, from the model on the meta device."""

from pathlib import Path

import torch

from fsdp_qlora.adapters.insert import magnitudes
from fsdp_qlora.optimizers.sharded import OPTIMIZER_STATES
from fsdp_qlora.sharding.build_model import MetaModel
from fsdp_qlora.sharding.byte_account import count_bytes, count_parameters
from fsdp_qlora.units import format_bytes


def describe_model(meta: MetaModel) -> str:
    """One line: architecture, parameters, what is quantized (of all, of the blocks), what trains, attention kernels."""
    counts = count_parameters(meta.model)
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


def describe_memory(meta: MetaModel, *, num_shards: int, optimizer: str) -> list[str]:
    """Bytes per rank by category, before activations and gathered blocks. Nothing is allocated for it."""
    counts = count_bytes(meta.model, num_shards)
    trainable = counts["trainable"].largest_shard
    parts = {
        "quantized weights": counts["codes"].largest_shard if "codes" in counts else 0,
        "their statistics": counts["statistics"].largest_shard if "statistics" in counts else 0,
        "other frozen weights": counts["frozen"].largest_shard if "frozen" in counts else 0,
        "trainable weights (fp32)": trainable,
        "their gradients": trainable,
        "optimizer state": trainable * OPTIMIZER_STATES[optimizer],
    }
    shown = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    total = format_bytes(sum(parts.values()))
    return [
        f"Memory per rank, {num_shards}-way sharded: {total}, plus activations and one gathered block",
        f"  {shown}",
    ]


def describe_device(device: torch.device, world_size: int) -> str:
    """One line: how many ranks on what."""
    if device.type == "cuda":
        what = f"{torch.cuda.get_device_name(device)} (NCCL)"
    else:
        what = "CPU (no GPU is visible, so gloo)"
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
        lines.append(f"  held-out loss {summary['first_eval_loss']:.4f} -> {summary['eval_loss']:.4f}")
    rate = summary["num_tokens"] / max(summary["train_seconds"], 1e-9)
    lines.append(f"  {format_count(summary['num_tokens'])} tokens, {rate:.0f} tokens/s")
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    files = sorted(path.name for path in entries if path.is_file() and not path.name.startswith("."))
    lines.append(f"  {'Saved' if saved else 'Nothing saved, metrics only'}: {output_dir}/ ({', '.join(files)})")
    return "\n".join(lines)
