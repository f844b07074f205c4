"""How long a save of 1 GiB stops training, waited for and in the background: `python
benchmarks/saving.py`.

A plain module whose fp32 weights and AdamW states are 1 GiB together, on one rank of a CPU, saved
in turn in both ways to a new folder on the disk of the temporary files (TMPDIR names another).
Prints the seconds of each call of `Saver.save`, and until the checkpoint was published; the median
of 5 rounds. Exits with 1 if a save in the background stops training for more than half as long.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard

from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.saving import Saver
from fsdp_qlora.checkpoint.train_state import TrainState
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.sharding.optimizer import ShardedOptimizer

# 3 x 21 x 16 MiB
ROUNDS = 5
LAYERS = 21
WIDTH = 2048


def main() -> int:
    ranks = read_ranks("cpu")
    start_process_group(ranks, HashStore())
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    fully_shard(model, mesh=mesh)
    optimizer = ShardedOptimizer(model, "adamw", lr=0.01, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.take_gradients()
    optimizer.step(0.01)
    state = TrainState(model, optimizer, mesh, ranks, is_large=True)
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), state, ranks, identity={}, save_total_limit=1)
        for step in range(2 * ROUNDS):
            is_waited_for = step % 2 == 0
            start = time.perf_counter()
            saver.save(Progress(step=step), until_published=is_waited_for)
            stopped = time.perf_counter() - start
            saver.finish()
            seconds[is_waited_for].append((stopped, time.perf_counter() - start))
        saver.close()
    stop_process_group()
    print(
        f"{state.num_bytes / 2**30:.2f} GiB, {ROUNDS} rounds, median seconds (fastest to slowest)"
    )
    for is_waited_for, name in ((True, "waited for"), (False, "in the background")):
        for index, what in enumerate(("stops training", "until published")):
            values = [both[index] for both in seconds[is_waited_for]]
            print(
                f"{name:18} {what:16} {statistics.median(values):6.2f} ({min(values):.2f} to "
                f"{max(values):.2f})"
            )
    paused, waited = (
        statistics.median(first for first, _ in seconds[key]) for key in (False, True)
    )
    return int(paused > waited / 2)


if __name__ == "__main__":
    sys.exit(main())
