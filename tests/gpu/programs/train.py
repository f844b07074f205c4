"""train.py with what its options do not say: python -m tests.gpu.programs.train --backend gloo -- OPTIONS.

Over gloo several ranks share a card, which NCCL refuses; --memory_mib takes away the rest of the card's memory.
"""

import argparse
import functools
import sys


def main(argv: list[str]) -> int:
    end = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    parser.add_argument("--memory_mib", type=float, default=0)
    args = parser.parse_args(argv[:end])

    import torch

    import train
    from fsdp_qlora.distributed.process_group import start_process_group

    if args.backend:
        start_process_group = functools.partial(start_process_group, backend=args.backend)
    if args.memory_mib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_mib * 2**20 / total, 0)
    return train.main(argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
