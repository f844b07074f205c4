"""train.py with what its options do not say: python -m tests.gpu.programs.train --backend gloo -- OPTIONS.

Over gloo several ranks share a card, which NCCL refuses; --memory_mib takes away the rest of the card's memory.
--share_left 0.5 takes away half of what a step needs, before the second one, on the last rank.
"""

import argparse
import functools
import os
import sys

from tests.less_memory import build_with_less


def main(argv: list[str]) -> int:
    end = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    parser.add_argument("--memory_mib", type=float, default=0)
    parser.add_argument("--share_left", type=float, default=0)
    args = parser.parse_args(argv[:end])

    import torch

    import train
    from fsdp_qlora.ranks import distributed
    from fsdp_qlora.run import run

    if args.backend:
        distributed.start_process_group = functools.partial(distributed.start_process_group, backend=args.backend)

    def allow(num_bytes: float) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, 0)

    def take(used: int, needed: int) -> None:
        if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
            allow(used + args.share_left * needed)

    if args.memory_mib:
        allow(args.memory_mib * 2**20)
    if args.share_left:
        run.build_trainer = functools.partial(build_with_less, run.build_trainer, take)  # type: ignore[attr-defined]
    return train.main(argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
