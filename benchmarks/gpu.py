"""Speed and memory of qlora training of a 7B llama on one GPU, without a checkpoint: `python benchmarks/gpu.py`.

The weights are random, made on the GPU tensor by tensor and loaded by the package's own loader; the batch is
random tokens, the same in every step, so that the loss must fall. Measured for each attention kernel that is
installed, with the base on the GPU and offloaded to the host.

FLOPs of a step, for MFU (dequantization and elementwise work are not counted):
  6 per frozen linear weight and token: 2 forward, 2 recomputed, 2 for the gradient of the input;
  8 per LoRA weight and token: these, and 2 for its own gradient;
  (as if a block were recomputed to its end: PyTorch stops after the last tensor that the backward pass needs)
  4 per weight of the head and target: its forward is not recomputed;
  causal attention: 2 * length^2 * heads * head_dim per layer and row forward (QK^T and AV, half of each masked),
  once more recomputed, twice for the gradients: 8 in all.
`mfu` counts what is recomputed as well; `mfu_without_recompute` (PaLM's definition) leaves it out.

Exits with 1 if a case fails or its loss does not fall. Without a GPU it says so and exits with 0; --tiny runs the
same code on a tiny shape, on the CPU where there is no GPU.
"""

import argparse
import gc
import itertools
import math
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.utils import is_flash_attn_2_available

from benchmarks.common import RandomWeights, Run, build_run, describe_machine, random_rows, write_results
from fsdp_qlora import distributed
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.optimizers.sharded import OPTIMIZER_STATES
from fsdp_qlora.precision import PRECISIONS, choose_precision
from fsdp_qlora.sharding.byte_account import Tensors

Attention = Literal["sdpa", "flash_attention_2"]
GIB = 2**30

# Dense bf16 TFLOP/s with fp32 accumulation, without sparsity, from the makers' data sheets; of forms with and
# without a suffix the longest that fits the GPU's name counts. Power limits and laptop parts are below it.
PEAK_TFLOPS = {
    "RTX 3090": 71.0,
    "RTX 3090 Ti": 80.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
    "RTX A5000": 111.1,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "A10": 125.0,
    "A10G": 70.0,
    "A40": 149.7,
    "A100": 312.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "B200": 2250.0,
}

SHAPES = {
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


class Case(NamedTuple):
    attention: Attention
    offload: bool

    def __str__(self) -> str:
        return f"{self.attention}, base {'offloaded' if self.offload else 'on the device'}"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, also on the CPU: tests this program")
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks, if not the shape's own number")
    parser.add_argument("--batch_size", type=int, default=2, help="rows per step")
    parser.add_argument("--length", type=int, default=0, help="tokens per row (default 2048, tiny 64)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each case, at most")
    parser.add_argument("--warmup_steps", type=int, default=2, help="steps before them, at least 1")
    parser.add_argument("--max_seconds", type=float, default=30.0, help="of measured steps per case, then it ends")
    parser.add_argument("--lora_rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--precision", default="auto", choices=["auto", *PRECISIONS])
    parser.add_argument("--output", default="", help="JSON file to write")
    args = parser.parse_args(argv)
    args.length = args.length or (64 if args.tiny else 2048)
    args.warmup_steps, args.steps = max(args.warmup_steps, 1), max(args.steps, 1)
    return args


def make_config(args: argparse.Namespace) -> LlamaConfig:
    shape = dict(SHAPES["tiny" if args.tiny else "7b"])
    if args.layers:
        shape["num_hidden_layers"] = args.layers
    return LlamaConfig(**shape, max_position_embeddings=args.length, tie_word_embeddings=False)


def list_cases(device: torch.device, precision: str) -> list[Case]:
    """Every attention kernel that can be used here, with the base on the device and offloaded."""
    on_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    half = PRECISIONS[precision].compute_dtype != torch.float32
    flash = on_ampere and half and is_flash_attn_2_available()
    attentions: tuple[Attention, ...] = ("sdpa", "flash_attention_2") if flash else ("sdpa",)
    return [Case(attention, offload) for attention, offload in itertools.product(attentions, (False, True))]


def peak_tflops(gpu: str) -> float | None:
    """The GPU's peak, or None if it is not in the table."""
    fitting = [name for name in PEAK_TFLOPS if re.search(rf"\b{re.escape(name)}\b", gpu)]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def flops_per_step(
    config: LlamaConfig, *, linear_weights: int, lora_weights: int, num_rows: int, length: int, num_targets: int
) -> tuple[float, float]:
    """(all FLOPs of a step, those that are recomputed): the formula at the top of this file."""
    tokens = num_rows * length
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = 2 * length**2 * config.num_attention_heads * head_dim * config.num_hidden_layers * num_rows
    recomputed = 2 * (linear_weights + lora_weights) * tokens + attention
    head = 4 * config.vocab_size * config.hidden_size * num_targets
    total = (6 * linear_weights + 8 * lora_weights) * tokens + head + 4 * attention
    return float(total), float(recomputed)


class MemoryMeter:
    """Memory now and at its peak since the last phase: of the GPU's allocator, or resident on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phases: dict[str, dict[str, float]] = {}
        self._reset()

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def record(self, phase: str) -> None:
        synchronize(self.device)
        if self.device.type == "cuda":
            self.phases[phase] = {
                "allocated": torch.cuda.memory_allocated(self.device),
                "peak_allocated": torch.cuda.max_memory_allocated(self.device),
                "peak_reserved": torch.cuda.max_memory_reserved(self.device),
            }
        else:  # kilobytes on Linux; a peak of the whole process, which cannot be reset
            self.phases[phase] = {"peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        self._reset()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def expected_bytes(account: dict[str, Tensors], *, offload: bool) -> dict[str, float]:
    """What must lie on the device between steps, by category. Offload leaves only the adapters there."""
    here = {name: tensors.largest_shard for name, tensors in account.items() if name == "trainable" or not offload}
    return {**here, "optimizer state": account["trainable"].largest_shard * OPTIMIZER_STATES["adamw"]}


def run_steps(run: Run, device: torch.device, args: argparse.Namespace, meter: MemoryMeter) -> dict[str, Any]:
    """Train on one batch: every step's loss, and the seconds of the measured ones."""
    rows = np.arange(args.batch_size)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(args.warmup_steps + args.steps):
        synchronize(device)
        started = time.perf_counter()
        losses.append(run.trainer.train_step(step, rows)["loss"])
        synchronize(device)
        if step >= args.warmup_steps:
            seconds.append(time.perf_counter() - started)
        elif step == args.warmup_steps - 1:
            meter.record("first steps")
        if sum(seconds) > args.max_seconds and len(seconds) > 1:
            break
    meter.record("steps")
    return {"losses": losses, "step_seconds": seconds}


def measure(case: Case, config: LlamaConfig, args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Build, load and train one case; nothing of it is left on the device afterwards."""
    device = ranks.device
    precision = PRECISIONS[args.precision]
    meter = MemoryMeter(device)
    meter.record("before")
    started = time.perf_counter()
    options = TrainConfig(
        precision=args.precision,
        attn_implementation=case.attention,
        use_cpu_offload=case.offload,
        batch_size=args.batch_size,
        lora_rank=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        lr=args.lr,
        lr_scheduler="constant",
        wd=0.0,
        quant_cache="off",
        seed=0,
    )
    run = build_run(
        options,
        config,
        RandomWeights(config, precision.frozen_dtype, device),
        random_rows(args.batch_size, args.length, config.vocab_size, masked=0, seed=0),
        ranks,
        on_phase=meter.record,
    )
    build_seconds = time.perf_counter() - started
    result = run_steps(run, device, args, meter)
    return {
        "attention": run.attention,
        "offload": case.offload,
        "build_seconds": build_seconds,
        **result,
        **speed(run, config, args, result["step_seconds"], device),
        "loss_falls": all(map(math.isfinite, result["losses"])) and result["losses"][-1] < result["losses"][0],
        "parameters": run.counts,
        "account_bytes": expected_bytes(run.account, offload=case.offload),
        "optimizer_state_bytes": run.trainer.optimizer.state_bytes(),
        "memory_bytes": meter.phases,
    }


def speed(
    run: Run, config: LlamaConfig, args: argparse.Namespace, seconds: list[float], device: torch.device
) -> dict[str, Any]:
    """Tokens and FLOPs per second of the median step, and the share of the GPU's peak."""
    total, recomputed = flops_per_step(
        config,
        linear_weights=run.counts["quantized"],
        lora_weights=run.counts["trainable"],
        num_rows=args.batch_size,
        length=args.length,
        num_targets=args.batch_size * (args.length - 1),
    )
    median = statistics.median(seconds)
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "median_step_seconds": median,
        "tokens_per_second": args.batch_size * args.length / median,
        "tflops_per_step": total / 1e12,
        "tflops_per_second": total / median / 1e12,
        "peak_tflops_per_second": peak,
        "mfu": total / median / 1e12 / peak if peak else None,
        "mfu_without_recompute": (total - recomputed) / median / 1e12 / peak if peak else None,
    }


def free_memory(device: torch.device) -> None:
    """Modules and FSDP2's hooks refer to each other, so only the collector frees a model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_all(args: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """One record per case; one that fails has an `error` and does not stop the others."""
    results = []
    config = make_config(args)
    for case in list_cases(ranks.device, args.precision):
        print(f"Measuring {case} ...", flush=True)
        try:
            results.append(measure(case, config, args, ranks))
        except (RuntimeError, ValueError, ImportError) as error:  # out of memory is a RuntimeError
            results.append({**case._asdict(), "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        free_memory(ranks.device)  # outside the handler: there the traceback would keep the model
    return results


def print_speed(results: list[dict[str, Any]]) -> None:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    columns = {"tokens/s": 10, "s/step": 8, "TFLOP/s": 9, "MFU": 8, "w/o recompute": 15, "first loss": 12}
    columns |= {"last loss": 11}
    print(f"\n{'attention, base':40}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
    for row in results:
        name = f"{Case(row['attention'], row['offload'])}"
        if "error" in row:
            print(f"{name:40}  FAILED: {row['error']}")
            continue
        print(
            f"{name:40}{row['tokens_per_second']:10.0f}{row['median_step_seconds']:8.3f}"
            f"{row['tflops_per_second']:9.3g}{share(row['mfu']):>8}{share(row['mfu_without_recompute']):>15}"
            f"{row['losses'][0]:12.4f}{row['losses'][-1]:11.4f}"
        )


def print_memory(row: dict[str, Any]) -> None:
    """GiB by phase, beside what the byte account says must be on the device."""
    print(f"\nMemory, {Case(row['attention'], row['offload'])} (GiB)")
    for phase, values in row["memory_bytes"].items():
        shown = "".join(f"  {name.replace('_', ' ')} {count / GIB:8.3f}" for name, count in values.items())
        print(f"  {phase:12}{shown}")
    account = row["account_bytes"]
    print("  account     " + "".join(f"  {name} {count / GIB:.3f}" for name, count in account.items()))
    steps = row["memory_bytes"]["steps"]
    if "allocated" in steps:
        resident = sum(account.values())
        held = steps["allocated"] - row["memory_bytes"]["before"]["allocated"]
        print(
            f"  between steps {held / GIB:.3f} allocated, {resident / GIB:.3f} by the account "
            f"({100 * held / resident:.1f}%); at the peak {(steps['peak_allocated'] - resident) / GIB:.3f} above it: "
            "activations, gathered blocks, gradients, workspace"
        )


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    ranks = distributed.read_ranks()
    if ranks.device.type != "cuda" and not args.tiny:
        print("No GPU is visible, so nothing was measured (--tiny runs the same code on the CPU).")
        return 0
    started = time.perf_counter()
    args.precision = choose_precision(args.precision, ranks.device)
    distributed.start_process_group(ranks)
    try:
        results = measure_all(args, ranks)
    finally:
        distributed.stop_process_group()
    print_speed(results)
    for row in results:
        if "error" not in row:
            print_memory(row)
    machine = describe_machine(ranks.device)
    if args.output:
        record = {"machine": machine, "options": vars(args), "cases": results}
        write_results(args.output, " ".join(["python benchmarks/gpu.py", *argv]), record)
    print(f"\n{machine.get('gpu', machine['cpu'])}: {time.perf_counter() - started:.0f} s in all")
    bad = [Case(row["attention"], row["offload"]) for row in results if not row.get("loss_falls")]
    for case in bad:
        print(f"FAILED: {case}: see its error above, or its loss did not fall.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
