"""Trains on the GPUs of a Ray cluster: python scripts/cluster/ray_train.py NUM_WORKERS --model_name
... --dataset ...

One worker per GPU (per CPU with --device cpu). --output_dir, model and rows are on a file system of
all nodes. When a worker or node dies, a new group of workers resumes from the newest checkpoint:
RAY_MAX_FAILURES times (3).
"""

import os
import sys
from typing import Any

import ray.train
import torch.distributed
from ray.train.torch import TorchTrainer


def train_one_rank(arguments: dict[str, Any]) -> None:
    """One rank: Ray has set RANK, WORLD_SIZE and MASTER_ADDR, and made a process group that the run
    makes itself.
    """
    import fsdp_qlora

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    fsdp_qlora.train(**arguments)


def main(argv: list[str]) -> None:
    num_workers = int(argv[0])
    names = argv[1::2]
    values = argv[2::2]
    arguments = {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)}
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    TorchTrainer(
        train_one_rank,
        train_loop_config=arguments,
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_workers, use_gpu=arguments.get("device") != "cpu"
        ),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(
                max_failures=int(os.environ.get("RAY_MAX_FAILURES", "3"))
            )
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
