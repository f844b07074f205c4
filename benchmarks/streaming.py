"""Memory and speed of a stream over a file that is larger than it holds: python -m benchmarks.streaming --gib 2

A file of instructions is made, each with 1 KiB of text and 9 KiB in a column that is not used, and streamed once, as
one rank does. Printed are the process's private memory after each tenth, and the speed without any training.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.run_data import prepare_data
from fsdp_qlora.planning.run_plan import pick_data
from tests.tiny import make_tokenizer

_TEXT_BYTES, _OTHER_BYTES = 1024, 9216


def make_file(path: Path, gib: float) -> int:
    """Write about `gib` GiB of rows; returns their number."""
    chance = random.Random(0)
    words = ["river", "colour", "please", "seven", "mountain", "answer", "write", "number"]
    count = int(gib * 2**30 / (_TEXT_BYTES + _OTHER_BYTES))
    other = "x" * _OTHER_BYTES
    with path.open("w") as file:
        for row in range(count):
            text = " ".join(chance.choices(words, k=_TEXT_BYTES // 7))
            file.write(json.dumps({"instruction": f"{row}?", "output": text, "other": other}) + "\n")
    return count


def private_mib() -> float:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--shuffle_buffer", type=int, default=10_000, help="as in train.py")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_tokenizer(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        path, started = folder / "rows.jsonl", time.monotonic()
        count = make_file(path, args.gib)
        print(f"{count:,} rows, {path.stat().st_size / 2**30:.2f} GiB, made in {time.monotonic() - started:.0f} s")
        options = TrainConfig(dataset=(str(path),), context_length=512, streaming=args.shuffle_buffer)
        started = time.monotonic()
        data = prepare_data(tokenizer, pick_data(options), vocab_size=len(tokenizer))
        print(f"opened and counted in {time.monotonic() - started:.1f} s, {private_mib():.0f} MiB")
        assert data.stream is not None and data.rows_per_epoch == count
        schedule = Schedule(count, 16, 16, 1, num_epochs=1, max_steps=-1, seed=0)
        seen, started = np.zeros(count + 1, dtype=np.int64), time.monotonic()
        tenth = max(1, schedule.total_steps // 10)
        for rows in data.stream.steps(schedule):
            seen[rows.table.row_numbers] += 1
            if (rows.step + 1) % tenth == 0:
                print(f"{(rows.step + 1) / schedule.total_steps:4.0%} of the rows: {private_mib():.0f} MiB", flush=True)
        seconds = time.monotonic() - started
        print(f"every row once: {bool((seen[1:] == 1).all())}; {count / seconds:,.0f} rows/s")


if __name__ == "__main__":
    main()
