"""The measured parts of gpu.py: each makes models without a checkpoint, runs them on one GPU and
returns its figures.

A part is a function of the command's options and the rank, and returns what goes into the JSON:
`rows` for the report's table (`row`), `planned` (of gpu_steps.Timed), and whatever else was seen.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bitsandbytes
import bitsandbytes.functional as bnb
import numpy as np
import torch
from transformers import PretrainedConfig

from benchmarks.common import RandomWeights, build_run, describe_machine
from benchmarks.gpu_steps import (
    GIB,
    Batch,
    Steps,
    Timed,
    make_config,
    make_options,
    make_rows,
    synchronize,
)
from benchmarks.one_rank import limit_memory
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.build_trainer import build_trainer
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.sharding.host_memory import split_arena
from fsdp_qlora.sharding.recompute import set_recompute

BLOCKS = 8
# Quantiles 0/32, 1/32, ... of 999 Alpaca rows' lengths in tokens, with SmolLM2's tokenizer, context
# 512; 74% learned.
ALPACA_LENGTHS = (
    *(46, 55, 62, 66, 71, 75, 78, 82, 87, 92, 98, 107, 119, 127, 143, 153, 163),
    *(175, 188, 207, 225, 240, 261, 286, 301, 324, 349, 363, 389, 411, 435, 502, 512),
)
_LEARNED = 0.74
_CONTEXTS = (80_000, 98_304, 65_536, 49_152, 32_768)


def row(
    item: str,
    unit: str,
    figures: dict[str, float],
    *,
    aim: str = "",
    holds: bool | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One line of the report.

    Args:
        figures: not a number where the card is too small, or nothing was measured. aim: in words,
        empty if there is none. holds: whether it is reached, None if that was not measured. more:
        `ratio` of two of the figures, and whatever else belongs to them.
    """
    measured = {name: value if np.isfinite(value) else None for name, value in figures.items()}
    ratio = more.pop("ratio", None)
    ratio = ratio if ratio is not None and np.isfinite(ratio) else None
    return {
        "item": item,
        "unit": unit,
        "figures": measured,
        "ratio": ratio,
        "aim": aim,
        "holds": holds,
        **more,
    }


def at_least(ratio: float, limit: float) -> bool | None:
    return ratio >= limit if np.isfinite(ratio) else None


def ratio_of(figures: dict[str, float], name: str, other: str) -> float:
    """One figure over another; not a number where one of them is missing."""
    one = figures.get(name, float("nan"))
    of = figures.get(other, float("nan"))
    return one / of if of else float("nan")


def work_of(
    args: argparse.Namespace, ranks: Ranks, shape: str, batches: tuple[Batch, ...], **more: Any
) -> Steps:
    """The steps to run: few, since only their median counts; a 64th of the tokens with --tiny."""
    if args.tiny:
        batches = tuple(Batch(batch.rows, max(batch.length // 64, 16)) for batch in batches)
        more |= {"layers": 2, "steps": 1}
    given: dict[str, Any] = {"shape": "tiny" if args.tiny else shape, "batches": batches}
    given |= {"steps": 3, "warmup_steps": 1, "seconds": 4.0}
    return Steps(**(given | {"precision": choose_precision(args.precision, ranks.device)} | more))


def build(
    work: Steps,
    ranks: Ranks,
    *,
    data: TokenizedRows | None = None,
    config: PretrainedConfig | None = None,
    **options: Any,
) -> tuple[Timed, list[np.ndarray]]:
    """A model that is ready to train, and the rows of each batch. config: not of `work`. options:
    of train.py.
    """
    config = config or make_config(work)
    rows: list[np.ndarray] = []
    if data is None:
        data, rows = make_rows(work.batches, config.vocab_size)
    given = dataclasses.replace(make_options(work), **options)
    files = RandomWeights(config, PRECISIONS[work.precision].frozen_dtype, ranks.device)
    run = build_run(
        given, config, files, data, ranks, lengths=work.planned_lengths if rows else None
    )
    return Timed(run, ranks.device, work), rows


def release(device: torch.device) -> None:
    """Give back what a deleted model held."""
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    start_process_group(ranks)
    try:
        yield
    finally:
        stop_process_group()


def median_seconds(train: Timed, rows: np.ndarray) -> float:
    """The median seconds of a step; not a number if the card is too small for it."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return statistics.median(train.steps(rows)["step_seconds"])
    give_up(train)
    return float("nan")


def give_up(train: Timed) -> None:
    """Give back what a step held for which the memory did not suffice."""
    train.run.trainer.optimizer.zero_grad()
    reshard_all(train.run.trainer.model)
    release(train.device)


def measure_padding(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """32 rows of a step with Alpaca's lengths, 8 in a micro-batch: padded, padding-free, packed."""
    work = work_of(args, ranks, "8b", (Batch(8, 512),), layers=args.layers or BLOCKS)
    data = alpaca_rows(make_config(work).vocab_size, shorter=8 if args.tiny else 1)
    step_rows = np.arange(len(data))
    layouts = {"padding": "padded", "padding-free": "padding_free", "packing": "packed"}
    figures = {}
    shares = {}
    with process_group(ranks):
        longest = int(data.lengths.max())
        train, _ = build(
            work, ranks, data=data, gradient_accumulation_steps=4, context_length=longest
        )
        config = train.run.config
        plan = train.run.plan
        for name, batching in layouts.items():
            schedule = dataclasses.replace(plan.schedule, batching=batching)
            run_plan = Plan(plan.placed, plan.data, schedule, warmup_steps=0)
            own = dataclasses.replace(train.run, trainer=build_trainer(config, run_plan, ranks))
            figures[name] = int(data.lengths.sum()) / median_seconds(
                Timed(own, ranks.device, work), step_rows
            )
            shares[name] = schedule.useful_shares(
                schedule.rounds(step_rows, data.lengths), data.lengths
            )[0]
    return {
        "rows": [
            row("padding-free, packing", "useful tokens/s", figures, useful_of_computed=shares),
        ]
    }


def alpaca_rows(vocab_size: int, *, shorter: int = 1, count: int = 32) -> TokenizedRows:
    """Rows of random tokens with Alpaca's lengths, in an order without one."""
    generator = np.random.default_rng(0)
    lengths = (
        np.array(ALPACA_LENGTHS, dtype=np.int64)[generator.permutation(len(ALPACA_LENGTHS))[:count]]
        // shorter
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    learned = position >= np.repeat((1 - _LEARNED) * lengths, lengths)
    ids = generator.integers(vocab_size, size=int(offsets[-1]), dtype=np.int32)
    return TokenizedRows(ids, learned, offsets, np.arange(1, count + 1))


def measure_offload(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Blocks of the 70B shape on one card: resident, all but the adapters in host memory, and half
    of the blocks.
    """
    layers = 2 if args.tiny else args.layers or BLOCKS
    work = work_of(args, ranks, "70b", (Batch(2, 2048),), layers=layers)
    some = max(layers // 2, 2)
    figures: dict[str, float] = {}
    planned: dict[str, Any] = {}
    with process_group(ranks):
        choices: dict[str, bool | int] = {
            "resident": False,
            "offloaded": True,
            f"{some} of {layers} blocks": some,
        }
        for name, offload in choices.items():
            train, [step_rows] = build(work, ranks, use_cpu_offload=offload)
            figures[name] = 1e3 * median_seconds(train, step_rows)
            if train.planned:
                [planned[name]] = train.planned.values()
            del train
            release(ranks.device)
    more = ratio_of(figures, "offloaded", "resident")
    aim = "offloaded at most 1.05 times resident"
    holds = at_least(1.05, more) if np.isfinite(more) else None
    rows = [row("offload, 70B blocks", "ms per step", figures, aim=aim, holds=holds, ratio=more)]
    return {"rows": rows, "planned": planned}


def reserved(device: torch.device) -> int:
    """Most bytes reserved since; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Most bytes allocated since; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure_context(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The longest row of which a step runs on the whole 8B shape under the memory of a smaller
    card.
    """
    limit_memory(args.memory_gib)
    lengths = _CONTEXTS
    work = work_of(
        args, ranks, "8b", tuple(Batch(1, length) for length in lengths), layers=args.layers
    )
    aim = f"at least 80,000 tokens within {args.memory_gib:g} GiB"
    found: dict[int, float | None] = {}
    with process_group(ranks):
        train, of_batch = build(work, ranks, recompute="offload")
        longest = 0
        for batch, step_rows in zip(work.batches, of_batch, strict=True):
            too_long = [length for length, seconds in found.items() if seconds is None]
            if batch.length < longest or batch.length > min(too_long, default=batch.length):
                continue
            found[batch.length] = None
            with contextlib.suppress(torch.OutOfMemoryError):
                _, found[batch.length] = train.one(step_rows)
            if found[batch.length] is None:
                give_up(train)
            else:
                longest = max(longest, batch.length)
            figures = {"longest": float(longest)}
            holds = longest >= 80_000 if not args.tiny else None
            rows = [
                row("longest context, 8B", "tokens", figures, aim=aim, holds=holds, seconds=found)
            ]
            result = {"rows": rows, "planned": train.planned}
            note(args, result)  # for the case that time runs out
    return result


def measure_box(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Hardware, versions, free memory, and what this GPU, its host and bitsandbytes reach by
    themselves.
    """
    box: dict[str, Any] = {
        "machine": describe_machine(ranks.device),
        "precision": choose_precision("auto", ranks.device),
    }
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        box |= {
            "free_bytes": free,
            "total_bytes": total,
            "allocator": torch.cuda.get_allocator_backend(),
        }
        box["compute_capability"] = list(torch.cuda.get_device_capability(ranks.device))
        box["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if program := shutil.which("nvidia-smi"):
        asked = (
            "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
        )
        command = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
        box["nvidia_smi"] = subprocess.run(
            command, capture_output=True, text=True, timeout=20
        ).stdout.splitlines()
    note(args, box)
    return box | (ceilings(256 if args.tiny else 8192) if ranks.device.type == "cuda" else {})


def ceilings(size: int) -> dict[str, Any]:
    """The machine's upper limits, and the error of NF4, with square matrices of `size` rows.

    The rows of a product decide whether bitsandbytes multiplies with W decoded, or in one kernel
    that rounds W in another way: `fused_differs` is how far its products are from those with W
    decoded, relative to these.
    """
    bytes_on_host = 2 * GIB * size // 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    found: dict[str, Any] = {"matmul_tflops": 2 * size**3 / seconds_of(lambda: a @ a) / 1e12}
    found["copy_gb_s"] = 2 * a.nbytes / seconds_of(lambda: b.copy_(a)) / 1e9
    started = time.perf_counter()
    [host] = split_arena([bytes_on_host], pinned=True)
    found["register_seconds_of_2_gib"] = time.perf_counter() - started
    there = torch.empty(bytes_on_host, dtype=torch.uint8, device="cuda")
    copying = seconds_of(lambda: there.copy_(host, non_blocking=True), 2)
    found["from_host_gb_s"] = bytes_on_host / copying / 1e9
    codes, state = bnb.quantize_4bit(a, quant_type="nf4", compress_statistics=True)
    decoded = bnb.dequantize_4bit(codes, state)
    found["nf4_decode_ms"] = 1e3 * seconds_of(lambda: bnb.dequantize_4bit(codes, state))
    found["nf4_error"] = relative(decoded, a)
    found["fused_differs"] = {}
    for rows in (1, 4, 16, 64):
        x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
        fused = bitsandbytes.matmul_4bit(x, codes.t(), state)
        found["fused_differs"][f"{rows} rows"] = relative(fused, x @ decoded.t())
    return found


def seconds_of(work: Callable[[], object], times: int = 5) -> float:
    """The device's seconds for one call, after a first one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / times


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, divided by the norm of the expected values."""
    return ((found - expected).float().norm() / expected.float().norm()).item()


def measure_kinds(
    args: argparse.Namespace,
    ranks: Ranks,
    item: str,
    kinds: Mapping[str, Mapping[str, Any]],
    recompute: Sequence[str] = ("all",),
) -> dict[str, Any]:
    """A step of the whole 8B with the options of each kind, beside its plan."""
    work = work_of(args, ranks, "8b", (Batch(4, 2048),), layers=args.layers)
    found: dict[str, Any] = {"planned": {}, "load_seconds": {}, "losses": {}}
    speeds: dict[str, float] = {}
    with process_group(ranks):
        for kind, options in kinds.items():
            started = time.perf_counter()
            train, [step_rows] = build(work, ranks, **options)
            found["load_seconds"][kind] = time.perf_counter() - started
            for name in recompute:
                if name == "none":
                    set_recompute(train.run.trainer.model, 0)
                    release(ranks.device)
                label = f"{kind}, recompute {name}" if len(recompute) > 1 else kind
                with contextlib.suppress(torch.OutOfMemoryError):
                    steps = train.steps(step_rows)
                    found["losses"][label] = steps["losses"]
                    tokens = int(train.run.plan.data.train.lengths[step_rows].sum())
                    speeds[label] = tokens / statistics.median(steps["step_seconds"])
            found["planned"] |= {f"{kind}, {name}": each for name, each in train.planned.items()}
            found["rows"] = [row(f"{item}, 8B, {work.batches[0]}", "tokens/s", speeds)]
            note(args, found)  # for the case that time runs out
            del train
            release(ranks.device)
    return found


def measure_types(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A step of the whole 8B with each quantizer and with DoRA, beside its plan."""
    kinds = {kind: {"train_type": kind} for kind in ("qlora", "bnb_dora", "int8_lora", "hqq_lora")}
    return measure_kinds(args, ranks, "train types", kinds, ("all", "none"))


MEASURES: dict[str, Callable[[argparse.Namespace, Ranks], dict[str, Any]]] = {
    "box": measure_box,
    "offload": measure_offload,
    "types": measure_types,
    "context": measure_context,
    "padding": measure_padding,
}


def note(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Leave what is known of a part where the command finds it; in one go: a file that is there is
    whole.
    """
    if args.one_part:
        partial = Path(f"{args.output}.partial")
        partial.write_text(json.dumps(result))
        partial.replace(args.output)
