"""Ways that a trial must leave out, for the process that tries them."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fsdp_qlora.model.architecture.shapes import BlockShape
from fsdp_qlora.model.kernels.trial import PartTrials, Trial
from fsdp_qlora.run.kernel_trials import KernelForm

FORM = KernelForm([BlockShape(64, 4, 2, 16, 96)], "bfloat16", rows=1, longest=64)


def plain(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1]


def in_place(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.add_(1)]


def wrong(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 2]


def broken(x: torch.Tensor) -> NoReturn:
    raise RuntimeError("no C compiler was found.\nA long story follows.")


def crashes(x: torch.Tensor) -> NoReturn:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hangs(x: torch.Tensor) -> NoReturn:
    while True:
        time.sleep(60)


def of_ways(part: str, ways: Sequence[Callable[..., object]], number: int = 7) -> PartTrials:
    def make() -> Trial:
        return Trial({way.__name__: way for way in ways}, (torch.arange(number) / number,))

    names = [way.__name__ for way in ways if way is not plain]
    missing = {"fa4": "not installed"}
    return PartTrials(part, names, [make], make, apart=names, missing=missing)


def trials(form: KernelForm, device: torch.device) -> list[PartTrials]:
    assert form == FORM and device.type == "cpu"
    print("What a library prints.")
    return [
        of_ways("gate", [plain, in_place, crashes, wrong]),
        of_ways("norm", [plain, hangs, broken]),
    ]
