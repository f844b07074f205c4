"""train.py with what its options do not say: python -m tests.gpu.programs.train --backend gloo -- OPTIONS.

Over gloo several ranks share a card, which NCCL refuses; --memory_mib takes away the rest of the card's memory.
--share_left 0.5 takes away half of what a step needs, after the first one, on the last rank.
"""

import argparse
import functools
import sys
from typing import Any


def main(argv: list[str]) -> int:
    end = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    parser.add_argument("--memory_mib", type=float, default=0)
    parser.add_argument("--share_left", type=float, default=0)
    args = parser.parse_args(argv[:end])

    import train
    from fsdp_qlora import distributed, run

    if args.backend:
        distributed.start_process_group = functools.partial(distributed.start_process_group, backend=args.backend)
    if args.memory_mib:
        _allow(args.memory_mib * 2**20)
    if args.share_left:
        run.build_trainer = functools.partial(_build_trainer, run.build_trainer, args.share_left)  # type: ignore[attr-defined]
    return train.main(argv[end + 1 :])


def _allow(num_bytes: float) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory, 0)


def _build_trainer(build: Any, share: float, *args: Any) -> Any:
    import torch

    trainer = build(*args)
    train_step = trainer.train_step

    def train_step_with_less(step: int, rows: Any) -> Any:
        if step == 1 and trainer.ranks.rank == trainer.ranks.world_size - 1:
            used, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            _allow(used + share * (most - used))
        return train_step(step, rows)

    trainer.train_step = train_step_with_less
    return trainer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
