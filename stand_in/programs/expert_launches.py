"""Kernels and host seconds of a decoder block with 128 adapted experts in a micro-batch of qlora,
as JSON: `expert_launches.py TOKENS` with each way of its experts.
"""

import json
import sys
import time
from itertools import accumulate

import torch

from benchmarks.standin_memory import passes
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.kernels.in_use import Ways, using_ways
from fsdp_qlora.model.quantizers import routed
from stand_in.counts import recording

ADAPTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
REPEATS = 5


def fix_routes() -> None:
    """Let every expert get some tokens: most about as many, some a few times more or less."""
    read = routed.read_ends

    def read_and_spread(ends: torch.Tensor, num_tokens: int, num_choices: int) -> list[int]:
        read(ends, num_tokens, num_choices)  # the host waits as ever
        random = torch.Generator().manual_seed(0)
        shares = torch.randn(len(ends), generator=random).mul(0.6).exp()
        counts = (shares / shares.sum() * num_choices).int().clamp(1, num_tokens).tolist()
        counts[0] += num_choices - sum(counts)
        return list(accumulate(counts))

    routed.read_ends = read_and_spread


def main(tokens: str) -> None:
    fix_routes()
    options = {"lora_target_parameters": ADAPTED, "batch_size": 1, "context_length": int(tokens)}
    model, run = passes("moe", 2, **options)
    found = {}
    counted: dict[str, list[tuple[int, float]]] = {"plain": [], "padded": []}
    for number in (2, 1):
        del find_blocks(model)[number:]
        for way, measured in counted.items():
            with using_ways(Ways(experts=way)):
                run()
                with recording() as counts:
                    run()
                started = time.process_time()
                for _ in range(REPEATS):
                    run()
                measured.append((counts.kernels, (time.process_time() - started) / REPEATS))
    for way, (two, one) in counted.items():
        found[way] = {"kernels": two[0] - one[0], "host_seconds": two[1] - one[1]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
