"""A command of fsdp_qlora that computes as on a card: `with_kernels.py COMMAND WORDS...`.

Each kernel in Triton is one launch (stand_in/kernels.py), which --kernels auto always chooses.
"""

import runpy
import sys

from fsdp_qlora.model.kernels import in_use
from stand_in.kernels import chosen_ways


def choose_kernels() -> None:
    """Compute by these ways whenever others than the plain ones are asked for."""
    ways = chosen_ways()
    use = in_use.use_ways

    def use_kernels(asked: in_use.Ways) -> None:
        use(asked if asked == in_use.Ways() else ways)

    in_use.use_ways = use_kernels


def main(*words: str) -> None:
    choose_kernels()
    sys.argv = ["fsdp_qlora", *words]
    runpy.run_module("fsdp_qlora", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
