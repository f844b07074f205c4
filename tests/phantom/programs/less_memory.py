"""train.py, and another program that takes memory of its GPU after the first step. LEFT is the share of what a step
needs that remains; a rank without it has no such neighbour."""

import ctypes
import os
import sys
from typing import Any
from unittest import mock

import torch

import fsdp_qlora.run
import train
from fsdp_qlora.load_model import build_trainer
from fsdp_qlora.training.trainer import Trainer


def build(*args: Any) -> Trainer:
    trainer = build_trainer(*args)
    train_step = trainer.train_step

    def train_step_with_less(step: int, rows: Any) -> dict[str, Any]:
        used = torch.cuda.memory_allocated()
        if step == 1 and "LEFT" in os.environ:
            take(used, left=float(os.environ["LEFT"]))
        record = train_step(step, rows)
        if step == 1:
            print("left behind:", torch.cuda.memory_allocated() - used, "bytes")
        return record

    trainer.train_step = train_step_with_less  # type: ignore[method-assign]
    return trainer


def take(used: int, *, left: float) -> None:
    most = torch.cuda.max_memory_reserved() - used
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
    size = ctypes.c_size_t(int(free - left * most))
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), size) == 0


if __name__ == "__main__":
    with mock.patch.object(fsdp_qlora.run, "build_trainer", build):
        sys.exit(train.main(sys.argv[1:]))
