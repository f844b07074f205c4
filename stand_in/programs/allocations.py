"""Random allocations in torch's allocator and in the plan's model of it.

The last line is JSON: what they reserve, and what the model says.
"""

import json
import random

import torch

from fsdp_qlora.planning.allocator import Change, reserved_bytes

SEEDS = 6
CHANGES = 400
# Some more allocations than ends of allocations.
ENDS = 0.48


def reserve(seed: int) -> tuple[int, int]:
    torch.cuda.empty_cache()
    chance = random.Random(seed)
    alive: dict[int, torch.Tensor] = {}
    changes: list[Change] = []
    for key in range(CHANGES):
        if alive and chance.random() < ENDS:
            ended = chance.choice([*alive])
            del alive[ended]
            changes.append(Change(ended, 0))
        else:
            size = int(2 ** chance.uniform(8, 27))
            alive[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
            changes.append(Change(key, size))
    return torch.cuda.memory_reserved(), reserved_bytes(changes)


def main() -> None:
    found = [reserve(seed) for seed in range(SEEDS)]
    print(json.dumps([*zip(*found, strict=True)]))


if __name__ == "__main__":
    main()
