"""A trial of what ranks send each other: two processes of this machine, which a time limit ends."""

import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from fsdp_qlora.distributed.process_group import process_group_closed, start_process_group
from fsdp_qlora.distributed.ranks import read_ranks

MAX_SECONDS = 60  # for two ranks to start and exchange; then they hang


def problem_of_two_ranks(device: str, **variables: str) -> str:
    """Start two ranks that exchange numbers; returns what went wrong, "" for nothing.

    Args:
        device: cuda or cpu.
        variables: more environment variables for them.
    """
    end = time.monotonic() + MAX_SECONDS
    problems = []
    common = os.environ | variables | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, device, f"{folder}/store"]
        processes = []
        for rank in "01":
            environment = common | {"RANK": rank, "LOCAL_RANK": rank}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
            )
        for process in processes:
            try:
                # One limit for both: the second one gets what the first has left.
                remaining = max(0.1, end - time.monotonic())
                _, errors = process.communicate(timeout=remaining)
            except subprocess.TimeoutExpired:
                problems.append(f"no answer within {MAX_SECONDS} s")
                continue
            if process.returncode:
                lines = [line for line in errors.splitlines() if "Error: " in line]
                problems.append(lines[-1] if lines else f"status {process.returncode}")
        # Also those that have ended, which `wait` reaps.
        for process in processes:
            process.kill()
            process.wait()
    return problems[0] if problems else ""


def exchange(device: torch.device) -> None:
    """Run on one of two ranks: a sum and a gather with known results.

    Raises RuntimeError if they arrive otherwise.
    """
    numbers = torch.arange(2**14, dtype=torch.float32)
    total = (numbers + dist.get_rank()).to(device)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), 2 * numbers + 1):
        raise RuntimeError("an all-reduce gives wrong sums")
    # All patterns of 16 bits, NaNs included: quantized weights have them all, viewed as bf16.
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    gathered = torch.empty(2 * len(bits), dtype=torch.bfloat16, device=device)
    dist.all_gather_into_tensor(gathered, bits.view(torch.bfloat16).to(device))
    if not torch.equal(gathered.cpu().view(torch.int16), bits.repeat(2)):
        raise RuntimeError("an all-gather changes bits")


def main(device: str, store: str) -> None:
    ranks = read_ranks(device)
    with process_group_closed():
        start_process_group(
            ranks, dist.FileStore(store, ranks.world_size), timeout_minutes=MAX_SECONDS / 60
        )
        exchange(ranks.device)


if __name__ == "__main__":
    main(*sys.argv[1:])
