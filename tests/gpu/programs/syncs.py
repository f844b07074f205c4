"""Where steps of a tiny qlora run make the host wait for the GPU; the last line is {line of ours: how often}."""

import argparse
import collections
import json
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.common import RandomWeights, build_run, random_rows
from benchmarks.gpu_steps import SHAPES
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.ranks import distributed
from tests.tiny import ROOT

STEPS = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--micro_batches", type=int, default=1)
    args = parser.parse_args(argv)
    ranks = distributed.read_ranks()
    distributed.start_process_group(ranks)
    options = TrainConfig(
        precision="bf16",
        use_cpu_offload=args.offload,
        quant_cache="off",
        batch_size=1,
        gradient_accumulation_steps=args.micro_batches,
    )
    config = LlamaConfig(**SHAPES["tiny"], max_position_embeddings=64)
    weights = RandomWeights(config, torch.bfloat16, ranks.device)
    rows = random_rows(args.micro_batches, 64, config.vocab_size, masked=16, seed=0)
    trainer = build_run(options, config, weights, rows, ranks).trainer
    trainer.train_step(0, np.arange(len(rows)))
    places: collections.Counter[str] = collections.Counter()

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[_line_of_ours()] += 1

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    for step in range(1, 1 + STEPS):
        trainer.train_step(step, np.arange(len(rows)))
    torch.cuda.set_sync_debug_mode("default")
    distributed.stop_process_group()
    print(json.dumps({place: count / STEPS for place, count in places.items()}))
    return 0


def _line_of_ours() -> str:
    """The innermost function of the package on the stack, as file:function."""
    # A comprehension is a frame of its own before Python 3.12.
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename.startswith(f"{ROOT}/fsdp_qlora/") and not frame.name.startswith("<")
    ]
    return f"{frames[-1].filename.removeprefix(f'{ROOT}/')}:{frames[-1].name}" if frames else "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
