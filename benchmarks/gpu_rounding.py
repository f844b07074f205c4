"""The kernel that rounds weights with their updates, beside torch's operators. A part of gpu.py."""

import argparse
import math
from typing import Any

import torch

from benchmarks.gpu_parts import ratio_of, row
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON
from fsdp_qlora.model.kernels.rounding import has_triton, triton
from fsdp_qlora.model.kernels.trial import milliseconds, why_wrong
from fsdp_qlora.run.decoding_trials import WeightForm
from fsdp_qlora.run.rounding_trials import rounding_trials

_FORMS = {
    "mxfp4": WeightForm("e2m1", (32, 0, False), is_rounded=True),
    "nvfp4": WeightForm("e2m1", (16, 1, False), is_rounded=True),
    "fp8": WeightForm("fp8", (1, 0, "float8_e4m3fn"), is_rounded=True),
    "nf4": WeightForm("bnb", ("nf4", True), is_rounded=True),
}
# An MLP's matrix of Qwen3-8B, and the weights of all layers of its blocks.
_SHAPE = (12288, 4096)
_WEIGHTS = 6.95e9
_PASSES = 3  # of a step: forward, recomputed, backward


def measure_rounding(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A matrix rounded by each way in each format, and what that adds to a step of the 8B."""
    found: dict[str, Any] = {"rows": [], "not_right": {}}
    shape = (64, 128) if args.tiny else _SHAPE
    of_step = _PASSES * _WEIGHTS / math.prod(shape) / 1e3
    for kind, form in _FORMS.items():
        times, reason = _times(form, shape, ranks.device)
        if reason:
            found["not_right"][kind] = reason
        ratio = ratio_of(times, TRITON, PLAIN)
        item = f"rounding {shape[0]} x {shape[1]}, {kind}"
        found["rows"].append(row(item, "ms", times, ratio=ratio))
        added = {way: each * of_step for way, each in times.items()}
        found["rows"].append(row(f"added to a step of the 8B, {kind}", "s", added))
    return found


def _times(
    form: WeightForm, shape: tuple[int, int], device: torch.device
) -> tuple[dict[str, float], str]:
    """The milliseconds of each way, and why the kernel is not among them."""
    few, many = rounding_trials([form], shape, device)
    trial = many()
    times = {PLAIN: milliseconds(trial, PLAIN, device)}
    reason = "no card"
    if triton and has_triton(device):
        reason = why_wrong(few, [TRITON])[TRITON] or why_wrong(many, [TRITON])[TRITON]
    if not reason:
        times[TRITON] = milliseconds(trial, TRITON, device)
    return times, reason
