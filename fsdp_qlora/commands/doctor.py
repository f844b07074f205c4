"""The command `doctor`: what to fix on this machine before a run."""

import argparse

from fsdp_qlora.run.machine import check_machine


def run(args: argparse.Namespace) -> int:
    """Check this machine before a run, one line per check: ok, or FIX and what to do. The checks are the GPUs and their
    kernels, what two ranks send each other (with NCCL on GPUs, else with gloo), memory, disk and logins. A check takes
    two minutes at most; all run without a GPU too. The exit status is 1 if something must be fixed. `env` prints facts.
    """
    is_all_fine = True
    for name, sentence, is_fine in check_machine():
        print(f"{'ok' if is_fine else 'FIX':4}  {name:14}  {sentence}", flush=True)
        is_all_fine &= is_fine
    return 0 if is_all_fine else 1
