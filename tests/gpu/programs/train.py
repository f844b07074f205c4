"""train.py with what its options do not say: python -m tests.gpu.programs.train --backend gloo --
OPTIONS.

Over gloo several ranks share a card, which NCCL refuses; --memory_mib takes away the rest of the
card's memory.
"""

import argparse
import sys
from typing import Any


def connect_by(backend: str) -> None:
    """Let the ranks of this process's runs be connected by this backend, or as the program chooses
    if it is empty.
    """
    import torch.distributed as dist

    from fsdp_qlora.run import session

    start = session.start_process_group

    def start_by_it(*args: Any, **options: Any) -> None:
        start(*args, **options, backend=backend)
        print(f"ranks are connected by {dist.get_backend()}", flush=True)

    if backend:
        session.start_process_group = start_by_it


def main(argv: list[str]) -> int:
    end = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    parser.add_argument("--memory_mib", type=float, default=0)
    args = parser.parse_args(argv[:end])

    import torch

    import train

    connect_by(args.backend)
    if args.memory_mib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_mib * 2**20 / total, 0)
    return train.main(argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
