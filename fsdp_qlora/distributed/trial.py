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
        device: cuda or cpu. variables: more environment variables for them.
    """
    end = time.monotonic() + MAX_SECONDS
    problems = []
    variables = os.environ | variables | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __name__, device, f"{folder}/store"]
        own = [variables | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        ranks = [
            subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) for env in own
        ]
        for rank in ranks:
            try:
                _, said = rank.communicate(timeout=max(0.1, end - time.monotonic()))
                lines = [line for line in said.splitlines() if "Error: " in line] or [
                    f"status {rank.returncode}"
                ]
                problems += lines[-1:] if rank.returncode else []
            except subprocess.TimeoutExpired:
                problems.append(f"no answer within {MAX_SECONDS} s")
        for rank in ranks:
            rank.kill()
            rank.wait()
    return problems[0] if problems else ""


def exchange(device: torch.device) -> None:
    """Run on one of two ranks: a sum and a gather with known results. Raises RuntimeError if they
    arrive otherwise.
    """
    numbers = torch.arange(2**14, dtype=torch.float32)
    total = (numbers + dist.get_rank()).to(device)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), 2 * numbers + 1):
        raise RuntimeError("an all-reduce gives wrong sums")
    # quantized weights have all of them, NaNs included
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
