"""Rows of gpu.py: one thing before and after, in one process on the same weights or shape, beside what is aimed at.

Most are on some blocks of a large model's shape: what a block costs is the same in each of them, and loading is short.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import RandomWeights, Run, build_run
from benchmarks.gpu_peers import measure_peers
from benchmarks.gpu_steps import GIB, Batch, Files, Steps, Timed, make_config, make_options, make_rows, measure
from benchmarks.one_rank import RepeatedWeights, keep_own_part, limit_memory, rank_0_of, start_alone
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.model.precision import PRECISIONS, choose_precision
from fsdp_qlora.planning.plan import Plan
from fsdp_qlora.ranks import distributed
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.run.load_model import build_trainer
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute
from fsdp_qlora.training.probes import fit_recompute

BLOCKS = 8
# Quantiles 0/32, 1/32, ... of 999 Alpaca rows' lengths in tokens, with SmolLM2's tokenizer, context 512; 74% learned.
ALPACA_LENGTHS = (
    *(46, 55, 62, 66, 71, 75, 78, 82, 87, 92, 98, 107, 119, 127, 143, 153, 163),
    *(175, 188, 207, 225, 240, 261, 286, 301, 324, 349, 363, 389, 411, 435, 502, 512),
)
_LEARNED = 0.74
_CONTEXTS = (80_000, 98_304, 65_536, 49_152, 32_768)


def row(
    item: str, unit: str, figures: dict[str, float], *, aim: str = "", holds: bool | None = None, **more: Any
) -> dict[str, Any]:
    """One line of the report.

    Args:
        figures: not a number where the card is too small, or nothing was measured.
        aim: in words, empty if there is none. holds: whether it is reached, None if that was not measured.
        more: `ratio` of two of the figures, and whatever else belongs to them.
    """
    measured = {name: value if np.isfinite(value) else None for name, value in figures.items()}
    ratio = more.pop("ratio", None)
    ratio = ratio if ratio is not None and np.isfinite(ratio) else None
    return {"item": item, "unit": unit, "figures": measured, "ratio": ratio, "aim": aim, "holds": holds, **more}


def at_least(ratio: float, limit: float) -> bool | None:
    return ratio >= limit if np.isfinite(ratio) else None


def ratio_of(figures: dict[str, float], name: str, other: str) -> float:
    """One figure over another; not a number where one of them is missing."""
    one, of = figures.get(name, float("nan")), figures.get(other, float("nan"))
    return one / of if of else float("nan")


def work_of(args: argparse.Namespace, ranks: Ranks, shape: str, batches: tuple[Batch, ...], **more: Any) -> Steps:
    """What to run: of few steps, since only their median counts; a 64th of the tokens with --tiny."""
    if args.tiny:
        batches = tuple(Batch(batch.rows, max(batch.length // 64, 16)) for batch in batches)
        more |= {"layers": 2, "steps": 1}
    given: dict[str, Any] = {"shape": "tiny" if args.tiny else shape, "batches": batches}
    given |= {"steps": 3, "warmup_steps": 1, "seconds": 4.0}
    return Steps(**(given | {"precision": choose_precision(args.precision, ranks.device)} | more))


def build(
    work: Steps, ranks: Ranks, *, make_files: Files = RandomWeights, data: TokenizedRows | None = None, **options: Any
) -> tuple[Timed, list[np.ndarray]]:
    """A model that is ready to train, and the rows of each batch. options: of train.py, beside those of work."""
    config = make_config(work)
    rows: list[np.ndarray] = []
    if data is None:
        batches = tuple(batch._replace(rows=batch.rows * ranks.world_size) for batch in work.batches)
        data, rows = make_rows(batches, config.vocab_size)
    given = dataclasses.replace(make_options(work), **options)
    files = make_files(config, PRECISIONS[work.precision].frozen_dtype, ranks.device)
    run = build_run(given, config, files, data, ranks)
    return Timed(run, ranks.device, work), rows


def release(device: torch.device) -> None:
    """Give back what a deleted model held."""
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def note(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Leave what is known of a part where the command finds it; in one go: a file that is there is whole."""
    if args.one_part:
        partial = Path(f"{args.output}.partial")
        partial.write_text(json.dumps(result))
        partial.replace(args.output)


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    distributed.start_process_group(ranks)
    try:
        yield
    finally:
        distributed.stop_process_group()


def median_seconds(train: Timed, rows: np.ndarray) -> float:
    """Of a step; not a number if the card is too small for it."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return statistics.median(train.steps(rows)["step_seconds"])
    give_up(train)
    return float("nan")


def give_up(train: Timed) -> None:
    """Give back what a step held for which the memory did not suffice."""
    train.run.trainer.optimizer.zero_grad()
    reshard_all(train.run.trainer.model)
    release(train.device)


# --- the rows ---


def measure_padding(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """32 rows of a step with Alpaca's lengths, 8 in a micro-batch: padded, one behind the other, packed."""
    work = work_of(args, ranks, "8b", (Batch(8, 512),), layers=args.layers or BLOCKS)
    data = alpaca_rows(make_config(work).vocab_size, shorter=8 if args.tiny else 1)
    step_rows = np.arange(len(data))
    layouts = {"padding": (True, False), "no padding": (False, False), "packing": (False, True)}
    figures, shares = {}, {}
    with process_group(ranks):
        longest = int(data.lengths.max())
        train, _ = build(work, ranks, data=data, gradient_accumulation_steps=4, context_length=longest)
        config, plan = train.run.config, train.run.plan
        for name, (padding, packing) in layouts.items():
            schedule = dataclasses.replace(plan.schedule, padding=padding, packing=packing)
            run_plan = Plan(plan.model, plan.data, schedule, warmup_steps=0)
            own = dataclasses.replace(train.run, trainer=build_trainer(config, run_plan, ranks))
            figures[name] = int(data.lengths.sum()) / median_seconds(Timed(own, ranks.device, work), step_rows)
            shares[name] = schedule.useful_shares(schedule.micro_batches(step_rows, data.lengths), data.lengths)[0]
    return {
        "rows": [
            row("no padding, packing", "useful tokens/s", figures, useful_of_computed=shares),
        ]
    }


def alpaca_rows(vocab_size: int, *, shorter: int = 1, count: int = 32) -> TokenizedRows:
    """Rows of random tokens with Alpaca's lengths, in an order without one."""
    generator = np.random.default_rng(0)
    lengths = np.array(ALPACA_LENGTHS, dtype=np.int64)[generator.permutation(len(ALPACA_LENGTHS))[:count]] // shorter
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    learned = position >= np.repeat((1 - _LEARNED) * lengths, lengths)
    ids = generator.integers(vocab_size, size=int(offsets[-1]), dtype=np.int32)
    return TokenizedRows(ids, learned, offsets, np.arange(1, count + 1))


def measure_recompute(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The 7B shape under the memory of a smaller card: every block recomputes, none, and as many as must."""
    limit_memory(args.memory_gib)
    work = work_of(args, ranks, "7b", (Batch(1, 2048), Batch(2, 2048)), layers=args.layers)
    rows, numbers = [], {}
    with process_group(ranks):
        train, of_batch = build(work, ranks)
        model = train.run.trainer.model
        blocks = len(recomputed_blocks(model))
        for batch, step_rows in zip(work.batches, of_batch, strict=True):
            figures = {}
            for name in ("all", "auto", "none"):
                number = {"all": blocks, "none": 0}.get(name)
                number = set_number(model, number) if number is not None else fit(args, train, step_rows)
                empty_cache(ranks.device)
                numbers[f"{batch}, {name}"] = number
                figures[name] = batch.rows * batch.length / median_seconds(train, step_rows)
            gain = ratio_of(figures, "none", "all")
            aim = f"none at least 1.25 times all within {args.memory_gib:g} GiB" if batch.rows == 1 else ""
            holds = at_least(gain, 1.25) if aim else None
            rows.append(row(f"recompute, 7B, {batch}", "tokens/s", figures, aim=aim, holds=holds, ratio=gain))
    return {"rows": rows, "blocks_with_recompute": numbers, "num_blocks": blocks}


def set_number(model: torch.nn.Module, number: int) -> int:
    set_recompute(model, number)
    return number


def fit(args: argparse.Namespace, train: Timed, step_rows: np.ndarray) -> int:
    """What `--recompute auto` finds with the memory that this process may have."""
    trainer = train.run.trainer

    class Limited:
        def start(self) -> None:
            empty_cache(train.device)
            reset_peak(train.device)

        def room(self) -> int:
            used = torch.cuda.max_memory_reserved(train.device) if train.device.type == "cuda" else 0
            return int((args.memory_gib - 1) * GIB) - used

    def try_step() -> int:
        return trainer._try(step_rows, 1)

    return fit_recompute(trainer.model, try_step, Limited(), lambda value: value, block_bytes=GIB)


def measure_offload(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Blocks of the 70B shape on one card: resident, all but the adapters in host memory, and half of the blocks."""
    layers = 2 if args.tiny else args.layers or BLOCKS
    work = work_of(args, ranks, "70b", (Batch(2, 2048),), layers=layers)
    some = max(layers // 2, 2)
    figures = {}
    with process_group(ranks):
        choices: dict[str, bool | int] = {"resident": False, "offloaded": True, f"{some} of {layers} blocks": some}
        for name, offload in choices.items():
            train, [step_rows] = build(work, ranks, use_cpu_offload=offload)
            figures[name] = 1e3 * median_seconds(train, step_rows)
            del train
            release(ranks.device)
    more = ratio_of(figures, "offloaded", "resident")
    aim = "offloaded at most 1.05 times resident"
    holds = at_least(1.05, more) if np.isfinite(more) else None
    return {"rows": [row("offload, 70B blocks", "ms per step", figures, aim=aim, holds=holds, ratio=more)]}


def measure_activation_offload(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A long row on some blocks of the 8B shape, its blocks' inputs on the card and on the host."""
    work = work_of(args, ranks, "8b", (Batch(1, 16384),), layers=args.layers or BLOCKS)
    seconds, memory = {}, {}
    with process_group(ranks):
        for name, offload in {"inputs on the card": False, "inputs on the host": True}.items():
            train, [step_rows] = build(work, ranks, use_activation_cpu_offload=offload)
            reset_peak(ranks.device)
            seconds[name] = 1e3 * median_seconds(train, step_rows)
            memory[name] = peak(ranks.device) / GIB
            del train
            release(ranks.device)
    what = f"activation offload, 8B blocks, {work.batches[0]}"
    ratio = ratio_of(seconds, "inputs on the host", "inputs on the card")
    return {"rows": [row(what, "ms per step", seconds, ratio=ratio), row(what, "GiB, peak", memory)]}


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Most bytes allocated since; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure_context(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The longest row of which a step runs on the whole 8B shape under the memory of a smaller card."""
    limit_memory(args.memory_gib)
    lengths = _CONTEXTS
    work = work_of(args, ranks, "8b", tuple(Batch(1, length) for length in lengths), layers=args.layers)
    aim = f"at least 80,000 tokens within {args.memory_gib:g} GiB"
    found: dict[int, float | None] = {}
    with process_group(ranks):
        train, of_batch = build(work, ranks, use_activation_cpu_offload=True)
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
            result = {"rows": [row("longest context, 8B", "tokens", figures, aim=aim, holds=holds, seconds=found)]}
            note(args, result)  # for the case that time runs out
    return result


def measure_optimizers(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A step of 128 tokens, in which the host's work counts: 8 bits, whose library waits for each tensor, or fused."""
    work = work_of(args, ranks, "8b", (Batch(1, 128),), layers=args.layers or BLOCKS)
    figures = {}
    with process_group(ranks):
        for optimizer in ("adamw_8bit", "adamw"):
            train, [step_rows] = build(work, ranks, optimizer=optimizer)
            figures[optimizer] = 1e3 * median_seconds(train, step_rows)
            del train
            release(ranks.device)
    ratio = ratio_of(figures, "adamw", "adamw_8bit")
    return {"rows": [row("optimizer of adapters, 8B blocks", "ms per step of 128 tokens", figures, ratio=ratio)]}


def measure_placement(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Rank 0 of 2 that gathers the frozen weights, and one that has all of them. The links' time is missing."""
    ranks = rank_0_of(2)
    work = work_of(args, ranks, "8b", (Batch(1, 512), Batch(1, 2048)), layers=args.layers or BLOCKS)
    figures: dict[str, dict[str, float]] = {str(batch): {} for batch in work.batches}
    start_alone(ranks)
    try:
        for strategy in ("full_shard", "ddp"):
            train, of_batch = build(work, ranks, make_files=RepeatedWeights, sharding_strategy=strategy)
            keep_own_part(train.run.trainer.model)
            for batch, step_rows in zip(work.batches, of_batch, strict=True):
                figures[str(batch)][strategy] = 1e3 * median_seconds(train, step_rows)
            del train
            release(ranks.device)
    finally:
        distributed.stop_process_group()
    return {
        "rows": [
            row(
                f"replicated, 8B blocks, {batch}, one of two ranks",
                "ms per step",
                each,
                ratio=ratio_of(each, "ddp", "full_shard"),
            )
            for batch, each in figures.items()
        ]
    }


def measure_speed(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The whole 8B shape with and without recompute, how busy the card is, and the installed peers on the same rows."""
    work = work_of(args, ranks, "8b", (Batch(4, 2048), Batch(2, 2048)), layers=args.layers)
    batch, small = work.batches
    kept: list[Run] = []
    with process_group(ranks):
        ours = measure(Steps(**{**vars(work), "trace": True}), ranks, prepare=kept.append)
        train = Timed(kept.pop(), ranks.device, work)
        tokens, speeds = batch.rows * batch.length, {}
        speeds["recompute all"] = tokens / _median(ours["batches"][str(batch)])
        memory = dict(ours["memory_bytes"])
        _, of_batch = make_rows((batch, small), make_config(work).vocab_size)
        busy = busy_share(train, of_batch[1])
        set_recompute(train.run.trainer.model, 0)
        release(ranks.device)
        reset_peak(ranks.device)
        speeds["recompute none"] = tokens / median_seconds(train, of_batch[0])
        memory["recompute none"] = {"peak_allocated": peak(ranks.device)}
        busy_none = busy_share(train, of_batch[1])
        del train
    release(ranks.device)
    rows = [
        row(f"speed, 8B, {batch}", "tokens/s", speeds, aim=aim, holds=at_least(speeds[name] / limit, 1.0))
        for name, limit, aim in (
            ("recompute all", 11_000, "at least 11,000 with recompute on an H200"),
            ("recompute none", 15_000, "at least 15,000 without recompute on an H200"),
        )
    ]
    if ranks.device.type == "cuda":
        shares = {"recompute all": busy, "recompute none": busy_none}
        holds = at_least(busy, 0.95)
        rows.append(row(f"GPU busy, 8B, {small}", "share of the step", shares, aim="at least 0.95", holds=holds))
    found = {**ours, "memory_bytes": memory, "rows": rows}
    if "losses" in ours["batches"][str(batch)]:
        note(args, found)  # for the case that time runs out
        peers = measure_peers(work, ours, ranks.device)
        found |= {"peers": peers["peers"], "rows": [*rows, *beside_peers(peers, batch)]}
    return found


def beside_peers(found: dict[str, Any], batch: Batch) -> list[dict[str, Any]]:
    """Our speed over that of the fastest peer that does the same work."""
    speeds = {
        name: batch.rows * batch.length / record["median_step_seconds"]
        for name, record in found["peers"].items()
        if "error" not in record and record["same_work"] is not False
    }
    gain = speeds["ours"] / max([speed for name, speed in speeds.items() if name != "ours"], default=float("nan"))
    aim = "at least 1.25 times the fastest peer"
    return [row(f"beside peers, 8B, {batch}", "tokens/s", speeds, aim=aim, holds=at_least(gain, 1.25), ratio=gain)]


def _median(batch: dict[str, Any]) -> float:
    return float(batch.get("median_step_seconds", "nan"))


def busy_share(train: Timed, step_rows: np.ndarray) -> float:
    """The time in which a kernel or copy runs, as a share of a step's; not a number on a CPU.

    The time of the kernels is from a step under the profiler, the step's from others.
    """
    if train.device.type != "cuda":
        return float("nan")
    seconds = median_seconds(train, step_rows)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train.one(step_rows)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA]
    return covered([(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]) / 1e9 / seconds


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of what some spans cover together."""
    found = end = 0
    for first, last in sorted(spans):
        found += max(0, last - max(first, end))
        end = max(end, last)
    return found
