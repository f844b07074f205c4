"""Kernels, kept bytes and host time of a decoder block in a micro-batch of qlora, as JSON: `blocks.py 8b`."""

import json
import sys
import time
from typing import Any

import torch

from benchmarks.standin_memory import COMMON, SHAPES, build
from fsdp_qlora.models import find_blocks
from fsdp_qlora.sharding.recompute import set_recompute
from tests.phantom.counts import recording

BLOCKS, FEWER = 4, 2


def main(shape: str) -> None:
    trainer, _, _, rows = build(SHAPES[shape] | {"num_hidden_layers": BLOCKS}, 1, 2048, COMMON | {"recompute": "none"})
    trainer.train_step(0, rows)
    trainer.model.train()
    trainer._set_gradient_sync(False)
    [micro_batch] = trainer._micro_batches([rows])
    found: dict[str, Any] = {}
    for number in (BLOCKS, FEWER):
        del find_blocks(trainer.model)[number:]
        for recompute in ("all", "none"):
            set_recompute(trainer.model, number if recompute == "all" else 0)
            for key, value in measure(trainer, micro_batch).items():
                name = f"{key}, recompute {recompute}"
                found[name] = found.get(name, 0) + (value if number == BLOCKS else -value)
    tokens = micro_batch["input_ids"].numel()
    for name in found:
        found[name] /= (BLOCKS - FEWER) * (tokens if "bytes" in name else 1)
    print(json.dumps(found))


def measure(trainer: Any, micro_batch: dict[str, Any]) -> dict[str, float]:
    """Of a forward and a backward pass. The host's time is the least of three."""

    def run() -> int:
        with trainer._documents_apart():
            before = torch.cuda.memory_allocated()
            loss = trainer._loss(micro_batch)
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        return kept

    run()
    with recording() as counts:
        kept = run()
    seconds = []
    for _ in range(3):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return {"kernels": counts.kernels, "products": counts.matrix_products, "bytes": kept, "seconds": min(seconds)}


if __name__ == "__main__":
    main(sys.argv[1])
