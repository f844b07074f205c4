"""train.py, and another program that takes memory of its GPU after the first step. LEFT is the share of what a step
needs that remains; a rank without it has no such neighbour."""

import ctypes
import os
import sys
from functools import partial
from unittest import mock

import torch

import fsdp_qlora.run.run
import train
from fsdp_qlora.run.load_model import build_trainer
from tests.less_memory import build_with_less


def take(used: int, needed: int) -> None:
    if "LEFT" not in os.environ:
        return
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
    size = ctypes.c_size_t(int(free - float(os.environ["LEFT"]) * needed))
    assert ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(ctypes.c_void_p()), size) == 0


if __name__ == "__main__":
    with mock.patch.object(fsdp_qlora.run.run, "build_trainer", partial(build_with_less, build_trainer, take)):
        sys.exit(train.main(sys.argv[1:]))
