"""Steps of a llama without a checkpoint on one GPU: shapes, FLOPs, memory by phase, and one
measured run.

The weights are random, made on the GPU tensor by tensor and loaded by the package's own loader; the
batches are random tokens, the same in every step, so that the loss must fall.

FLOPs of a step, for MFU (dequantization and elementwise work are not counted): 6 per frozen linear
  weight and token: 2 forward, 2 recomputed, 2 for the gradient of the input; 8 per LoRA weight and
  token: these, and 2 for its own gradient; (as if a block were recomputed to its end: PyTorch stops
  after the last tensor that the backward pass needs) 4 per weight of the head and target: its
  forward is not recomputed; causal attention: 2 * length^2 * heads * head_dim per layer and row
  forward (QK^T and AV, half of each masked), once more recomputed, twice for the gradients: 8 in
  all.
`mfu` counts what is recomputed as well; `mfu_without_recompute` (PaLM's definition) leaves it out.
"""

import dataclasses
import math
import re
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from benchmarks.common import RandomWeights, Run, build_run
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.model_parts import CategoryBytes
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.run.facts import Measured
from fsdp_qlora.sharding.optimizer import OPTIMIZERS, ShardedOptimizer
from fsdp_qlora.sharding.recompute import recomputed_blocks

GIB = 2**30
Attention = Literal["sdpa", "flash_attention_2"]

# Dense bf16 TFLOP/s with fp32 accumulation, without sparsity, from the makers' data sheets; of
# forms with and without a suffix the longest that fits the GPU's name counts. Power limits and
# laptop parts are below it.
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


def _llama(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# Llama 2 7B, Llama 3 8B and Llama 2 70B.
SHAPES: dict[str, dict[str, int]] = {
    "7b": _llama(32000, 4096, 11008, 32, 32, 32),
    "8b": _llama(128256, 4096, 14336, 32, 32, 8),
    "70b": _llama(32000, 8192, 28672, 80, 64, 8),
    "tiny": _llama(512, 256, 512, 2, 4, 2),
}


class Batch(NamedTuple):
    """Rows of one length."""

    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


@dataclass(frozen=True)
class Steps:
    """The steps to run.

    layers: decoder blocks, 0 for the shape's own. seconds: of measured steps.

    batches: memory is planned for the first one. attention: of the peers. Ours is the program's own
    choice, unless it is asked for flash_attention_2.
    """

    shape: str
    batches: tuple[Batch, ...]
    layers: int = 0
    steps: int = 5
    warmup_steps: int = 2
    seconds: float = 8.0
    precision: str = "bf16"
    attention: Attention = "sdpa"
    lora_rank: int = 16

    @property
    def planned_lengths(self) -> list[int]:
        return [self.batches[0].length] * self.batches[0].rows


def make_config(work: Steps) -> LlamaConfig:
    shape = SHAPES[work.shape] | ({"num_hidden_layers": work.layers} if work.layers else {})
    longest = max(batch.length for batch in work.batches)
    return LlamaConfig(**shape, max_position_embeddings=longest, tie_word_embeddings=False)


def make_options(work: Steps) -> TrainConfig:
    return TrainConfig(
        precision=work.precision,  # type: ignore[arg-type]
        attn_implementation="auto" if work.attention == "sdpa" else work.attention,
        batch_size=max(batch.rows for batch in work.batches),
        lora_rank=work.lora_rank,
        lora_alpha=2 * work.lora_rank,
        lr=5e-4,
        lr_scheduler="constant",
        wd=0.0,
        quant_cache="off",
        seed=0,
        use_cpu_offload=False,  # and not what fits this card
        recompute="all",
    )


def make_rows(
    batches: tuple[Batch, ...], vocab_size: int
) -> tuple[TokenizedRows, list[np.ndarray]]:
    """Random tokens, all of them targets; and which rows are of which batch."""
    lengths = [batch.length for batch in batches for _ in range(batch.rows)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(0).integers(vocab_size, size=int(offsets[-1]), dtype=np.int32)
    rows = TokenizedRows(
        ids, np.ones(len(ids), dtype=bool), offsets, np.arange(1, len(lengths) + 1)
    )
    ends = np.cumsum([batch.rows for batch in batches])
    return rows, [
        np.arange(end - batch.rows, end) for batch, end in zip(batches, ends, strict=True)
    ]


def peak_tflops(gpu: str) -> float | None:
    """The GPU's peak, or None if it is not in the table."""
    fitting = [name for name in PEAK_TFLOPS if re.search(rf"\b{re.escape(name)}\b", gpu)]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def flops_per_step(
    config: LlamaConfig,
    *,
    linear_weights: int,
    lora_weights: int,
    num_rows: int,
    length: int,
    num_targets: int,
) -> tuple[float, float]:
    """(all FLOPs of a step, those that are recomputed): the formula at the top of this file."""
    tokens = num_rows * length
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = (
        2 * length**2 * config.num_attention_heads * head_dim * config.num_hidden_layers * num_rows
    )
    recomputed = 2 * (linear_weights + lora_weights) * tokens + attention
    head = 4 * config.vocab_size * config.hidden_size * num_targets
    total = (6 * linear_weights + 8 * lora_weights) * tokens + head + 4 * attention
    return float(total), float(recomputed)


class MemoryMeter:
    """Memory now and at its peak since the last phase: of the GPU's allocator, or resident on a
    CPU.
    """

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
            self.phases[phase] = {
                "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            }
        self._reset()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def expected_bytes(account: dict[str, CategoryBytes]) -> dict[str, float]:
    """The bytes that must be on the device between steps, by category."""
    shards: dict[str, float] = {name: tensors.largest_shard for name, tensors in account.items()}
    return shards | {"optimizer state": shards["trainable"] * sum(OPTIMIZERS["adamw"].state)}


def measure(work: Steps, ranks: Ranks) -> tuple[dict[str, Any], "Timed"]:
    """Build, load and train one model on each batch in turn; returns the results, and the model to
    go on with.
    """
    meter = MemoryMeter(ranks.device)
    meter.record("before")
    started = time.perf_counter()
    config = make_config(work)
    data, rows = make_rows(work.batches, config.vocab_size)
    files = RandomWeights(config, PRECISIONS[work.precision].frozen_dtype, ranks.device)
    run = build_run(
        make_options(work),
        config,
        files,
        data,
        ranks,
        lengths=work.planned_lengths,
        on_phase=meter.record,
    )
    build_seconds = time.perf_counter() - started
    train = Timed(run, ranks.device, work)
    results = {
        str(batch): _measure_batch(train, config, batch, numbers, meter)
        for batch, numbers in zip(work.batches, rows, strict=True)
    }
    found = {
        **{name: getattr(work, name) for name in ("shape", "precision", "lora_rank")},
        "layers": config.num_hidden_layers,
        "attention": run.attention,
        "build_seconds": build_seconds,
        "batches": results,
        "loss_falls": all(
            result.get("loss_falls", "out_of_memory" in result) for result in results.values()
        ),
        "parameters": run.counts,
        "account_bytes": expected_bytes(run.account),
        "optimizer_state_bytes": _state_bytes(run.trainer.optimizer),
        "memory_bytes": meter.phases,
        "trace": trace_step(train, rows[0]),
    }
    return found, train


def _state_bytes(optimizer: ShardedOptimizer) -> int:
    """The bytes of this rank's optimizer state."""
    states = optimizer.optimizer.state.values() if optimizer.optimizer else ()
    return sum(
        value.nbytes
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _measure_batch(
    train: "Timed", config: LlamaConfig, batch: Batch, rows: np.ndarray, meter: MemoryMeter
) -> dict[str, Any]:
    """Losses and speed on one batch; that a card is too small for it is a result too."""
    try:
        measured = train.steps(rows)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    meter.record(str(batch))
    return {**measured, **speed(train.run, config, batch, measured["step_seconds"], train.device)}


@dataclass
class Timed:
    """A trainer's steps, one after another, each with its seconds.

    planned: of the last step of the first batch what was planned and measured, by the blocks that
    recomputed; on a GPU.
    """

    run: Run
    device: torch.device
    work: Steps
    step: int = field(default=0)
    planned: dict[str, dict[str, Any]] = field(default_factory=dict)

    def one(self, rows: np.ndarray, *, is_measured: bool = True) -> tuple[dict[str, Any], float]:
        """A step's record, and its seconds. is_measured: whether to compare it with the plan."""
        synchronize(self.device)
        started = time.perf_counter()
        record = self.run.trainer.train_step(StepRows(self.step, self.run.plan.data.train, rows))
        synchronize(self.device)
        seconds = time.perf_counter() - started
        self.step += 1
        lengths = self.run.plan.data.train.lengths[rows]
        if (
            is_measured
            and self.device.type == "cuda"
            and sorted(lengths.tolist()) == sorted(self.work.planned_lengths)
        ):
            self._compare({**record, "step_seconds": seconds}, rows)
        return record, seconds

    def _compare(self, record: dict[str, Any], rows: np.ndarray) -> None:
        """Note what the plan says of a step, as a run does in its facts.json."""
        plan = self.run.plan
        blocks = recomputed_blocks(self.run.trainer.model)
        moving = sum(block.moves for block in blocks)
        recomputing = sum(block.is_on for block in blocks)
        data = dataclasses.replace(plan.data, train_rows=rows)
        schedule = dataclasses.replace(plan.schedule, num_rows=len(rows))
        gpu = gpu_of(torch.cuda.get_device_properties(self.device))
        measured = Measured(
            self.run.config, dataclasses.replace(plan, data=data, schedule=schedule), gpu
        )
        name = f"{recomputing} blocks recompute"
        if moving:
            name += f", {moving} on the host"
        self.planned[name] = measured.stepped({**record, "recompute": recomputing + moving})[
            "measured"
        ]

    def steps(self, rows: np.ndarray) -> dict[str, Any]:
        """The losses of all steps on these rows, the first gradient norm, the seconds of the
        measured ones.
        """
        losses: list[float] = []
        norms: list[float] = []
        seconds: list[float] = []
        for step in range(self.work.warmup_steps + self.work.steps):
            record, took = self.one(rows)
            losses.append(record["loss"])
            norms.append(record["grad_norm"])
            if step >= self.work.warmup_steps:
                seconds.append(took)
            if sum(seconds) > self.work.seconds and len(seconds) > 1:
                break
        falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
        return {"losses": losses, "grad_norms": norms, "step_seconds": seconds, "loss_falls": falls}


def trace_step(train: Timed, rows: np.ndarray, *, longest: int = 40) -> dict[str, Any]:
    """One step under the profiler: the operations that took most time,
    on the GPU and on the host.
    """
    on_gpu = train.device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        train.one(rows, is_measured=False)
    averages = profiler.key_averages()
    found = dict[str, Any]()
    for place, name in (("gpu", "self_device_time_total"), ("host", "self_cpu_time_total")):
        if place == "host" or on_gpu:
            events = sorted(averages, key=lambda event: getattr(event, name), reverse=True)
            # Of the GPU's time its kernels have theirs, and the operators that launched them have
            # it once more.
            found[place] = {
                "milliseconds": sum(getattr(event, name) for event in events) / 1e3,
                "longest": [
                    {
                        "name": event.key[:100],
                        "calls": event.count,
                        "milliseconds": getattr(event, name) / 1e3,
                    }
                    for event in events[:longest]
                ],
            }
    return found


def speed(
    run: Run, config: LlamaConfig, batch: Batch, seconds: list[float], device: torch.device
) -> dict[str, Any]:
    """Tokens and FLOPs per second of the median step, and the share of the GPU's peak."""
    total, recomputed = flops_per_step(
        config,
        linear_weights=run.counts["quantized"],
        lora_weights=run.counts["trainable"],
        num_rows=batch.rows,
        length=batch.length,
        num_targets=batch.rows * (batch.length - 1),
    )
    median = statistics.median(seconds)
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "median_step_seconds": median,
        "tokens_per_second": batch.rows * batch.length / median,
        "tflops_per_step": total / 1e12,
        "tflops_per_second": total / median / 1e12,
        "peak_tflops_per_second": peak,
        "mfu": total / median / 1e12 / peak if peak else None,
        "mfu_without_recompute": (total - recomputed) / median / 1e12 / peak if peak else None,
    }
