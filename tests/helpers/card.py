"""Lets operators on the CPU answer as a CUDA card does where the two differ in stored bytes."""

from collections.abc import Sequence

import torch

_16_BIT = (torch.bfloat16, torch.float16)
_libraries: list[torch.library.Library] = []  # an implementation lasts as long as its library


def answer_as_a_card() -> None:
    """From here on, `torch._foreach_copy_` computes in this process as on a card.

    Its CUDA kernel reads 16-bit floats into float32 and rounds them back, so every NaN becomes
    0x7fff (pytorch#159333).
    """
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        library.impl("_foreach_copy_", _foreach_copy, "CPU")
        _libraries.append(library)


def _foreach_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
        if target.dtype in _16_BIT:
            target.view(torch.int16).masked_fill_(target.isnan(), 0x7FFF)
