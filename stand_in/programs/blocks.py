"""Kernels of a decoder block in a micro-batch of qlora, and bytes kept of each token, as JSON:
`blocks.py 8b`.
"""

import json
import sys

from benchmarks.standin_memory import passes
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.sharding.recompute import set_recompute
from stand_in.counts import recording

BLOCKS = 4
FEWER = 2
TOKENS = 2 * 2048


def main(shape: str) -> None:
    model, run = passes(shape, BLOCKS)
    found: dict[str, list[tuple[int, int]]] = {"all": [], "none": []}
    for number in (BLOCKS, FEWER):
        del find_blocks(model)[number:]
        for recompute, measured in found.items():
            set_recompute(model, number if recompute == "all" else 0)
            run()
            with recording() as counts:
                kept = run()
            measured.append((counts.kernels, kept // TOKENS))
    blocks = BLOCKS - FEWER
    print(
        json.dumps(
            {
                how: [(a - b) / blocks for a, b in zip(*both, strict=True)]
                for how, both in found.items()
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
