"""Kernels beside the plain way of each part: the part `ways` of gpu.py."""

import argparse
import dataclasses
import importlib.util
import os
import shutil
import time
from typing import Any

import torch

from benchmarks.gpu_parts import note, release, row
from benchmarks.gpu_steps import Batch, Steps, make_config
from benchmarks.gpu_ways import error_of
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.kernels.in_use import PLAIN
from fsdp_qlora.model.kernels.norm import ROUNDED_FIRST
from fsdp_qlora.model.kernels.trial import PartTrials, milliseconds, why_wrong
from fsdp_qlora.run.decoding_trials import WeightForm
from fsdp_qlora.run.kernel_trials import KernelForm, NormForm, trials
from fsdp_qlora.run.trial_process import NotTried, tried_apart


def measure_ways(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Each part's kernels beside the plain way: which are right here, in a process of their own and
    in this one, and how fast they are.
    """
    lengths = (64,) if args.tiny else (2048, 8192, 16384)
    work = Steps("tiny" if args.tiny else "8b", (Batch(1, lengths[-1]),))
    precision = PRECISIONS[choose_precision(args.precision, ranks.device)]
    shapes = [*dict.fromkeys(block_shapes(make_config(work)))]
    form = KernelForm(
        shapes,
        dtype=str(precision.compute_dtype).removeprefix("torch."),
        rows=1,
        longest=lengths[-1],
        has_silu=True,
        norms=[NormForm(ROUNDED_FIRST, shapes[0].hidden)],
        weights=[WeightForm("bnb", ("nf4", True))],
        vocabulary=128_256,
    )
    found: dict[str, Any] = {
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "triton": importlib.util.find_spec("triton") is not None,
    }
    if ranks.device.type == "cuda":
        started = time.perf_counter()
        try:
            found["verdicts"] = tried_apart(form, ranks.device)
        except (NotTried, OSError) as error:
            found["verdicts"] = {"failed": error_of(error)}
        found["seconds_of_verdicts"] = time.perf_counter() - started
    found |= {"reasons": {}, "ms": {}, "gb_s": {}, "rows": []}
    for tokens in lengths:
        for part in trials(dataclasses.replace(form, longest=tokens), ranks.device):
            _measure_part(part, tokens, found, ranks.device)
            note(args, found)  # for the case that time runs out
            release(ranks.device)
    return found


def _measure_part(
    part: PartTrials, tokens: int, found: dict[str, Any], device: torch.device
) -> None:
    """Add a part's milliseconds, and the bytes that it reads and writes in a second."""
    label = f"{part.part}, {tokens} tokens"
    trial = part.timed()
    reasons = dict.fromkeys(part.ways, "")
    for make in part.proofs:
        reasons = {way: reasons[way] or why for way, why in why_wrong(make, part.ways).items()}
    said = {way: reason or "right" for way, reason in reasons.items()}
    found["reasons"][label] = {**part.missing, **said}
    right = [PLAIN, *(way for way in part.ways if not reasons[way])]
    times = {way: milliseconds(trial, way, device) for way in right}
    moved = sum(each.nbytes for each in [*trial.inputs, *trial.results(PLAIN)])
    found["ms"][label] = times
    found["gb_s"][label] = {way: moved / 1e6 / ms for way, ms in times.items()}
    fastest = min(times.values())
    found["rows"].append(row(f"{label}, 8B", "ms", times, ratio=times[PLAIN] / fastest))
