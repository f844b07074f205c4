"""A command of fsdp_qlora with a fault in what it does on a GPU: `with_faults.py FAULT COMMAND
WORDS...`.
"""

import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from stand_in.programs.with_races import FSDP2, OURS, Fault


def copy_next_rows(
    copy: Any, target: torch.Tensor, source: torch.Tensor, **options: Any
) -> torch.Tensor:
    """As if a shard began one row later."""
    copied: torch.Tensor = copy(
        target, source.roll(-1, 0) if source.dim() > 1 else source, **options
    )
    return copied


def copy_as_bf16(
    copy: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> None:
    """Bytes, and codes that are stored as fp32, go through a gather that is one of bf16."""

    def as_bf16(tensor: torch.Tensor) -> torch.Tensor:
        is_even = tensor.numel() * tensor.itemsize % 2 == 0
        return (
            tensor.view(torch.bfloat16)
            if is_even and tensor.dtype in (torch.uint8, torch.float32)
            else tensor
        )

    copy([*map(as_bf16, targets)], [*map(as_bf16, sources)])


def scale_twice(scale: Any, tensors: Sequence[torch.Tensor], factor: float) -> None:
    scale(tensors, factor)
    scale(tensors, factor)


FAULTS = {
    "wrong_shard": Fault(torch.Tensor, "copy_", copy_next_rows, OURS, within="copy"),
    # In all gathers, the program's own test of a gathered layer finds it before the first step.
    "gather_in_bf16": Fault(torch, "_foreach_copy_", copy_as_bf16, FSDP2, within="pre_backward"),
    "scale_twice": Fault(torch, "_foreach_mul_", scale_twice, OURS),
}


def main(fault: str, *words: str) -> None:
    FAULTS[fault].make()
    sys.argv = ["fsdp_qlora", *words]
    runpy.run_module("fsdp_qlora", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
