"""Speed and memory of qlora training on one GPU, without a checkpoint: `python benchmarks/gpu.py --output gpu.json`.

One command, under nine minutes: each part runs in a process of its own for a limited time, and one that fails or
takes too long is an `error` in the JSON and does not stop the others. benchmarks/README.md has a table of the parts.
--report writes one Markdown file to send to the project: figures with their aims, what failed, versions; without
paths and names of the machine and its user.

Exits with 1 if a part fails or a loss does not fall; that a card is too small for a batch, a missed aim, and a part for
which no time was left are no failures. Without a GPU it says so and exits with 0; --tiny runs the same code on a tiny
shape in one process, on the CPU where there is no GPU. On the stand-in for CUDA there are no values to look at.
"""

import argparse
import contextlib
import dataclasses
import gc
import getpass
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import RandomWeights, build_run, describe_machine, is_stand_in, write_results
from benchmarks.gpu_steps import GIB, Batch, Steps, Timed, make_config, make_options, make_rows, measure
from benchmarks.one_rank import limit_memory
from benchmarks.peers import measure_peers
from fsdp_qlora import __version__
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks, read_ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.planning.fit import fit_recompute
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.load_model import build_trainer
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute
from fsdp_qlora.utils.redact import redact

MAX_SECONDS = 535.0

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
    work: Steps, ranks: Ranks, *, data: TokenizedRows | None = None, **options: Any
) -> tuple[Timed, list[np.ndarray]]:
    """A model that is ready to train, and the rows of each batch. options: of train.py."""
    config = make_config(work)
    rows: list[np.ndarray] = []
    if data is None:
        data, rows = make_rows(work.batches, config.vocab_size)
    given = dataclasses.replace(make_options(work), **options)
    files = RandomWeights(config, PRECISIONS[work.precision].frozen_dtype, ranks.device)
    run = build_run(given, config, files, data, ranks, lengths=work.planned_lengths if rows else None)
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


# --- the parts ---


def measure_padding(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """32 rows of a step with Alpaca's lengths, 8 in a micro-batch: padded, padding-free, packed."""
    work = work_of(args, ranks, "8b", (Batch(8, 512),), layers=args.layers or BLOCKS)
    data = alpaca_rows(make_config(work).vocab_size, shorter=8 if args.tiny else 1)
    step_rows = np.arange(len(data))
    layouts = {"padding": "padded", "padding-free": "padding_free", "packing": "packed"}
    figures, shares = {}, {}
    with process_group(ranks):
        longest = int(data.lengths.max())
        train, _ = build(work, ranks, data=data, gradient_accumulation_steps=4, context_length=longest)
        config, plan = train.run.config, train.run.plan
        for name, batching in layouts.items():
            schedule = dataclasses.replace(plan.schedule, batching=batching)
            run_plan = Plan(plan.placed, plan.data, schedule, warmup_steps=0)
            own = dataclasses.replace(train.run, trainer=build_trainer(config, run_plan, ranks))
            figures[name] = int(data.lengths.sum()) / median_seconds(Timed(own, ranks.device, work), step_rows)
            shares[name] = schedule.useful_shares(schedule.rounds(step_rows, data.lengths), data.lengths)[0]
    return {
        "rows": [
            row("padding-free, packing", "useful tokens/s", figures, useful_of_computed=shares),
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
    return {"rows": rows, "planned": train.planned, "blocks_with_recompute": numbers, "num_blocks": blocks}


def set_number(model: torch.nn.Module, number: int) -> int:
    set_recompute(model, number)
    return number


def fit(args: argparse.Namespace, train: Timed, step_rows: np.ndarray) -> int:
    """What `--recompute auto` finds with the memory that this process may have."""
    trainer = train.run.trainer

    def try_step() -> tuple[int, int]:
        empty_cache(train.device)
        reset_peak(train.device)
        held = trainer.try_micro_batch(train.run.plan.data.train, step_rows, 1)
        used = torch.cuda.max_memory_reserved(train.device) if train.device.type == "cuda" else 0
        return held, int((args.memory_gib - 1) * GIB) - used

    return fit_recompute(trainer.model, try_step, lambda value: value, block_bytes=GIB)


def measure_offload(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Blocks of the 70B shape on one card: resident, all but the adapters in host memory, and half of the blocks."""
    layers = 2 if args.tiny else args.layers or BLOCKS
    work = work_of(args, ranks, "70b", (Batch(2, 2048),), layers=layers)
    some = max(layers // 2, 2)
    figures: dict[str, float] = {}
    planned: dict[str, Any] = {}
    with process_group(ranks):
        choices: dict[str, bool | int] = {"resident": False, "offloaded": True, f"{some} of {layers} blocks": some}
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
            rows = [row("longest context, 8B", "tokens", figures, aim=aim, holds=holds, seconds=found)]
            result = {"rows": rows, "planned": train.planned}
            note(args, result)  # for the case that time runs out
    return result


def measure_speed(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The whole 8B shape with and without recompute, how busy the card is, and the installed peers on the same rows."""
    work = work_of(args, ranks, "8b", (Batch(4, 2048), Batch(2, 2048)), layers=args.layers)
    batch, small = work.batches
    with process_group(ranks):
        ours, train = measure(work, ranks)
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
        planned = train.planned
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
    found = {**ours, "memory_bytes": memory, "rows": rows, "planned": planned}
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


def measure_box(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Hardware, versions, free memory, and which kernels attention takes."""
    box: dict[str, Any] = {
        "machine": describe_machine(ranks.device),
        "precision": choose_precision("auto", ranks.device),
    }
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        box |= {"free_bytes": free, "total_bytes": total, "allocator": torch.cuda.get_allocator_backend()}
        box["compute_capability"] = list(torch.cuda.get_device_capability(ranks.device))
    if program := shutil.which("nvidia-smi"):
        asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
        command = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
        box["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    return box


class Part(NamedTuple):
    """measure: gives the part's results. seconds: after which its process is ended; loading and imports count."""

    measure: Callable[[argparse.Namespace, Ranks], dict[str, Any]]
    seconds: float


PARTS: dict[str, Part] = {
    "box": Part(measure_box, 20),
    "speed": Part(measure_speed, 120),
    "offload": Part(measure_offload, 70),
    "padding": Part(measure_padding, 60),
    "recompute": Part(measure_recompute, 80),
    "context": Part(measure_context, 120),
}


# --- the report ---


_PATH = re.compile(r"(?<![\w/.)])(?:file://|~|[A-Za-z]:)?/(?:[^\s/:\"',;)]+/)+([^\s/:\"',;)]*)")


def command(argv: list[str]) -> str:
    """The command, without the files that it writes."""
    given = iter(argv)
    kept = []
    for word in given:
        if word in ("--output", "--report"):
            next(given, None)
        elif not word.startswith(("--output=", "--report=")):
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["python benchmarks/gpu.py", *kept])


def report(record: dict[str, Any], command: str) -> str:
    """The file's text. record: what gpu.py writes as JSON."""
    parts = record["parts"]
    rows = [each for result in parts.values() for each in result.get("rows", [])]
    said = "" if record["has_values"] else "On the stand-in for CUDA: no figure of time or loss means anything.\n\n"
    text = (
        f"# fsdp_qlora {__version__} on {_box(parts).get('gpu', 'a CPU')}\n\n"
        f"{time.strftime('%Y-%m-%d')}: `{command}`\n\n"
        f"{said}## The machine\n\n{_machine(parts)}\n\n"
        f"## Before and after\n\n{_table(('', 'unit', 'figures', 'ratio', 'aim', ''), map(_row, rows))}\n\n"
        f"## Planned and measured\n\n{_table(_PLANNED, _planned(parts))}\n\n"
        f"## Steps\n\n{_table(('part', 'tokens', 'tokens/s', 's per step', 'MFU', 'GiB reserved'), _steps(parts))}\n\n"
        f"## Peers\n\n{_table(('part', 'who', 's per step', 'loss', 'gradient norm', 'same work'), _peers(parts))}\n\n"
        f"## What did not run\n\n{_table(('part', 'why'), _not_run(parts))}\n\n"
        f"## Everything\n\n```json\n{json.dumps(record, indent=1)}\n```\n"
    )
    return scrub(text)


def scrub(text: str) -> str:
    """Without secrets, this machine's and user's names, and folders: of a path its last part stays."""
    text = _PATH.sub(lambda found: f".../{found[1]}", redact(text))
    for name, hidden in ((socket.gethostname(), "[host]"), (_user(), "[user]")):
        if len(name) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", hidden, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def describe_row(row: dict[str, Any]) -> str:
    """One line for the screen."""
    aim = f"; {row['aim']}{_HOLDS[row['holds']]}" if row["aim"] else ""
    return f"{row['item']}, {row['unit']}: {_figures(row)}{aim}"


_HOLDS = {True: ": yes", False: ": NO", None: ": not known"}


def _row(row: dict[str, Any]) -> list[str]:
    shown = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return [row["item"], row["unit"], _figures(row), shown, row["aim"], _HOLDS[row["holds"]][2:] if row["aim"] else ""]


def _figures(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in row["figures"].items())


def _number(value: float | None) -> str:
    if value is None:
        return "out of memory"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: tuple[str, ...], lines: Any) -> str:
    rows = [[str(cell).replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)) if rows else "Nothing."


def _box(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = parts.get("box", {}).get("machine", {})
    return found


def _machine(parts: dict[str, Any]) -> str:
    box = {name: value for name, value in parts.get("box", {}).items() if name not in ("machine", "part_seconds")}
    return _table(("", ""), [(name, _plain(value)) for name, value in {**_box(parts), **box}.items()])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_PLANNED = ("part", "", "GiB planned", "GiB reserved", "tokens/s planned", "tokens/s measured")


def _planned(parts: dict[str, Any]) -> list[list[str]]:
    return [
        [
            *(part, name, _number(each["planned_gib"]["reserved"]), _number(each["measured_gib"]["reserved"])),
            *(_number(each["planned_tokens_per_second"]), _number(each["tokens_per_second"])),
        ]
        for part, result in parts.items()
        for name, each in result.get("planned", {}).items()
    ]


def _steps(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, part in parts.items():
        for batch, each in part.get("batches", {}).items():
            if "out_of_memory" in each:
                found.append([name, batch, "out of memory", "", "", ""])
                continue
            memory, mfu = part["memory_bytes"].get(batch, {}).get("peak_reserved"), each["mfu"]
            figures = [f"{each['tokens_per_second']:.0f}", f"{each['median_step_seconds']:.3f}"]
            figures += ["" if mfu is None else f"{100 * mfu:.0f}%", "" if memory is None else f"{memory / GIB:.2f}"]
            found.append([name, batch, *figures])
    return found


def _peers(parts: dict[str, Any]) -> list[list[str]]:
    return [
        [part, name, *([each["error"], "", "", ""] if "error" in each else _peer(each))]
        for part, result in parts.items()
        for name, each in result.get("peers", {}).items()
    ]


def _peer(found: dict[str, Any]) -> list[str]:
    numbers = [f"{found[name]:.4g}" for name in ("median_step_seconds", "first_loss", "first_grad_norm")]
    return [*numbers, "yes" if found.get("same_work") else "no"]


def _not_run(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, result in parts.items():
        if why := result.get("left_out") or result.get("error"):
            lines = [line for line in result.get("output", "").splitlines() if line.strip()]
            found.append([name, f"{why}{f': {lines[-1].strip()}' if lines else ''}"])
    return found


# --- the command ---


def note(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Leave what is known of a part where the command finds it; in one go: a file that is there is whole."""
    if args.one_part:
        partial = Path(f"{args.output}.partial")
        partial.write_text(json.dumps(result))
        partial.replace(args.output)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, also on the CPU: tests this program")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument("--layers", type=int, default=0, help="decoder blocks, if not the shape's own number")
    parser.add_argument("--precision", default="auto", choices=["auto", *PRECISIONS])
    parser.add_argument("--memory_gib", type=float, default=24.0, help="of the card that some parts pretend to have")
    parser.add_argument("--max_seconds", type=float, default=MAX_SECONDS, help="of all parts together")
    parser.add_argument("--output", default="", help="JSON file to write")
    parser.add_argument("--report", default="", help="Markdown file to write")
    parser.add_argument("--one_part", default="", help=argparse.SUPPRESS)  # by which the command calls itself
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_here(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A part's results, from this process."""
    try:
        return PARTS[name].measure(args, read_ranks())
    except Exception as error:  # whatever it is, the other parts go on
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def variables_of_a_part() -> dict[str, str]:
    """The allocator as train.py sets it, and one card: TRL refuses to train in a process that sees several."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, "CUDA_VISIBLE_DEVICES": first}


def run_apart(name: str, argv: list[str], seconds: float) -> dict[str, Any]:
    """A part's results, from a process of its own that is ended after `seconds`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).resolve()), *argv, "--output", str(result)]
        command += ["--one_part", name, "--seconds", str(seconds)]
        with open(log, "w") as output:
            variables = variables_of_a_part()
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=variables)
            try:
                process.wait(max(seconds, 0.1))
                ending = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                ending = f"not done after {seconds:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tail = log.read_text()[-1500:]
        found = json.loads(result.read_text()) if result.exists() else {"error": ending, "output": tail}
        if not ending.endswith("status 0"):  # what is there is what was known by then
            found |= {"error": ending}
    return {**found, "part_seconds": time.perf_counter() - started}


def run_parts(args: argparse.Namespace, argv: list[str]) -> dict[str, dict[str, Any]]:
    """All parts in their order, while there is time."""
    end = time.perf_counter() + args.max_seconds
    results = {}
    for name in args.parts:
        print(f"{name} ...", flush=True)
        if args.tiny:
            args.seconds, started = PARTS[name].seconds, time.perf_counter()
            results[name] = run_here(name, args)
            results[name]["part_seconds"] = time.perf_counter() - started
            gc.collect()
        else:
            left = end - time.perf_counter()
            results[name] = (
                run_apart(name, argv, min(PARTS[name].seconds, left)) if left > 15 else {"left_out": "no time left"}
            )
        for each in results[name].get("rows", []) if args.tiny or is_stand_in() else []:
            each["holds"] = None  # of a shape too small to measure anything, or of kernels that compute nothing
        for line in describe(results[name]):
            print(f"  {line}", flush=True)
    return results


def describe(result: dict[str, Any]) -> list[str]:
    """A part's results in a few lines, for people."""
    if "left_out" in result:
        return [f"left out: {result['left_out']}"]
    lines = [f"FAILED: {result['error']}"] if "error" in result else []
    lines += [describe_row(each) for each in result.get("rows", [])]
    for _, name, planned, reserved, speed, measured in _planned({"": result}):
        lines.append(f"{name}: planned {planned} GiB, {speed} tokens/s; measured {reserved} GiB, {measured} tokens/s")
    lines += [f"{name}: {row}" for name, row in result.get("peers", {}).items()]
    for batch, row in result.get("batches", {}).items():
        if "out_of_memory" in row:
            lines.append(f"{batch}: out of memory")
            continue
        memory = result["memory_bytes"].get(batch, {})
        reserved = f", {memory['peak_reserved'] / GIB:.1f} GiB reserved" if "peak_reserved" in memory else ""
        share = f", MFU {100 * row['mfu']:.0f}%" if row["mfu"] else ""
        losses = f", loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        speed = f"{row['tokens_per_second']:.0f} tokens/s, {row['median_step_seconds']:.2f} s"
        lines.append(f"{batch}: {speed}{share}{reserved}{losses}")
    return lines


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if args.one_part:
        found = run_here(args.one_part, args)
        note(args, (json.loads(Path(args.output).read_text()) if Path(args.output).exists() else {}) | found)
        return 0
    if not torch.cuda.is_available() and not args.tiny:
        print("No GPU is visible, so nothing was measured (--tiny runs the same code on the CPU).")
        return 0
    started = time.perf_counter()
    results = run_parts(args, argv)
    has_values = not is_stand_in()
    record = {"options": {**vars(args), "output": "", "report": ""}, "has_values": has_values, "parts": results}
    if args.output:
        write_results(args.output, " ".join(["python benchmarks/gpu.py", *argv]), record)
    if args.report:
        Path(args.report).parent.mkdir(parents=True, exist_ok=True)
        Path(args.report).write_text(report(record, command(argv)))
        print(f"Written: {args.report}: a file to send, without paths and names of this machine")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if not has_values:
        print("On the stand-in for CUDA: kernels compute nothing, so no figure of time or loss means anything.")
    bad = [
        name
        for name, result in results.items()
        if "error" in result or (has_values and not result.get("loss_falls", True))
    ]
    for name in bad:
        print(f"FAILED: {name}: see its error above, or its loss did not fall.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
