"""Kernels and kept bytes of a decoder block in a micro-batch of qlora, as JSON: `blocks.py 8b`."""

import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.standin_memory import passes
from fsdp_qlora.model.models import find_blocks
from fsdp_qlora.sharding.recompute import set_recompute
from tests.phantom.counts import recording

BLOCKS, FEWER, TOKENS = 4, 2, 2 * 2048


def main(shape: str) -> None:
    model, run = passes(shape, BLOCKS)
    found: dict[str, Any] = {}
    for number in (BLOCKS, FEWER):
        del find_blocks(model)[number:]
        for recompute in ("all", "none"):
            set_recompute(model, number if recompute == "all" else 0)
            for key, value in measure(run).items():
                name = f"{key}, recompute {recompute}"
                found[name] = found.get(name, 0) + (value if number == BLOCKS else -value)
    for name in found:
        found[name] /= (BLOCKS - FEWER) * (TOKENS if "bytes" in name else 1)
    print(json.dumps(found))


def measure(run: Callable[[], int]) -> dict[str, int]:
    """Of a forward and a backward pass."""
    run()
    with recording() as counts:
        kept = run()
    return {"kernels": counts.kernels, "products": counts.matrix_products, "bytes": kept}


if __name__ == "__main__":
    main(sys.argv[1])
