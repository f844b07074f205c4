"""What real steps of a small model of each train type allocate, and what its plan says:
`allocated.py qlora full`.

Bytes as JSON, on the GPU if there is one, else on the CPU. Of two ranks this is rank 0; the other
is of torch's fake process group.
"""

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import standin_memory
from benchmarks.common import peak_bytes
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.data.batches.schedule import StepRows
from fsdp_qlora.data.longest_rows import longest_of_table
from fsdp_qlora.distributed.shards import local_part
from fsdp_qlora.sharding.loading.weight_files import BUFFER

# Large enough that segments of 512 bytes do not matter.
_SHAPE = standin_memory._shape("llama", 4096, 256, 704, 4, 4, 2, head_dim=64)
# Little work for attention, whose time grows with the square of a row.
_SLIM = standin_memory._shape("llama", 1024, 128, 352, 2, 2, 2, head_dim=16)
_LONG_ROW = {"shape": "slim", "batch_size": 1, "context_length": 16384}


def measure(train_type: str, **changed: Any) -> tuple[int, int]:
    """The most that is allocated, and what the plan says."""
    case: dict[str, Any] = {"shape": "small", "ranks": 2, "context_length": 256}
    case |= {"on_nonfinite": "skip"}  # the fake group fills no buffers
    if TRAIN_TYPES[train_type].trains_new_blocks:
        case["new_blocks"] = [1, 3]
    case |= changed
    plans = []

    def steps() -> None:
        trainer, plan, rows = standin_memory.build(
            **case, **standin_memory.SHARD, train_type=train_type
        )
        plans.append(plan)
        for parameter in trainer.model.parameters():  # numbers with which the loss is finite
            local_part(parameter).detach().fill_(0.01 if parameter.is_floating_point() else 1)
        trainer.try_longest(longest_of_table(rows, trainer.collator))
        for step in range(0 if changed else 2):
            trainer.train_step(StepRows(step, *rows))

    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps()
        most = torch.cuda.max_memory_allocated() - before
    else:
        most = peak_bytes(steps)
    dist.destroy_process_group()
    return most, plans[0].memory.allocated


def main(train_types: list[str], sharing: tuple[int, ...] = ()) -> int:
    """sharing: measure a long row too, shared by so many ranks."""
    torch.set_num_threads(1)
    os.environ[BUFFER] = "1"
    standin_memory.SHAPES |= {"small": _SHAPE, "slim": _SLIM}
    cases: dict[str, Any] = {name: {} for name in train_types}
    cases |= {
        str(size): _LONG_ROW | {"ranks": size, "context_parallel_size": size} for size in sharing
    }
    found = {}
    for name, changed in cases.items():
        found[name] = measure("qlora" if changed else name, **changed)
        gc.collect()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
