"""A command of fsdp_qlora in which tokens reach experts: `with_routes.py COMMAND WORDS...`.

No kernel counts them here. The host reads the counts as ever, and then takes those of the routing's
worst case.
"""

import runpy
import sys

import torch

from fsdp_qlora.model.quantizers import routed


def fix_routes() -> None:
    """Let all experts be chosen from now on."""
    read = routed.read_ends

    def read_and_choose(ends: torch.Tensor, num_tokens: int, num_choices: int) -> list[int]:
        read(ends, num_tokens, num_choices)
        return read(ends.to("meta"), num_tokens, num_choices)

    routed.read_ends = read_and_choose


def main(*words: str) -> None:
    fix_routes()
    sys.argv = ["fsdp_qlora", *words]
    runpy.run_module("fsdp_qlora", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
