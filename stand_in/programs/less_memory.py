"""train.py, and another program that takes memory of its GPU after the first step. LEFT is the
share of what a step needs that remains; a rank without it has no such neighbour.
"""

import ctypes
import os
import sys
from typing import Any
from unittest import mock

import torch

import fsdp_qlora.run.train
import train
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.run.build_trainer import build_trainer


def build_with_less(*args: Any) -> Any:
    """`build_trainer`'s trainer, for which memory is taken away after the first step."""
    trainer = build_trainer(*args)
    train_step = trainer.train_step

    def train_step_with_less(rows: StepRows) -> Any:
        if rows.step == 1 and "LEFT" in os.environ:
            take_all_but(float(os.environ["LEFT"]))
        return train_step(rows)

    trainer.train_step = train_step_with_less  # type: ignore[method-assign]
    return trainer


def take_all_but(share: float) -> None:
    used = torch.cuda.memory_allocated()
    needed = torch.cuda.max_memory_reserved() - used
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
    size = ctypes.c_size_t(int(free - share * needed))
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), size) == 0


if __name__ == "__main__":
    with mock.patch.object(fsdp_qlora.run.train, "build_trainer", build_with_less):
        sys.exit(train.main(sys.argv[1:]))
