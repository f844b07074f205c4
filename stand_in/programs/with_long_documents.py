"""A command of fsdp_qlora for which documents of any length are long, so that blocks keep what
attention gives: `with_long_documents.py COMMAND WORDS...`.
"""

import runpy
import sys

from fsdp_qlora.model.architecture import kept_attention


def take_all_for_long() -> None:
    kept_attention.LONG = 0


def main(*words: str) -> None:
    take_all_for_long()
    sys.argv = ["fsdp_qlora", *words]
    runpy.run_module("fsdp_qlora", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
