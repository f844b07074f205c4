"""Streams: every row once in each epoch, from any place on as without a break, in little memory."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import DataOptions, RunData, prepare_data
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.data.streaming import StreamPosition
from fsdp_qlora.errors import UserError
from tests.data.dataset_hub import DatasetHub
from tests.data.test_data import write_csv, write_json, write_jsonl, write_parquet
from tests.tiny import ROOT, make_rows, make_tokenizer

pytestmark = pytest.mark.quick

ROWS = make_rows(57)


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., RunData]:
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    def open_it(dataset: Path, **given: Any) -> RunData:
        options = TrainConfig(**{"dataset": (str(dataset),), "streaming": True, "shuffle_buffer": 10, **given})
        return prepare_data(tokenizer, options.pick(DataOptions), vocab_size=len(tokenizer))

    return open_it


def schedule(data: RunData, *, world_size: int = 1) -> Schedule:
    assert data.rows_per_epoch is not None
    return Schedule(data.rows_per_epoch, 12 // world_size // 2, 2, world_size, num_epochs=2, max_steps=-1, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The rows in files of each kind; blank lines between them, and small groups of rows."""
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.jsonl").write_text("\n" + "\n\n".join(map(json.dumps, ROWS[:13])) + "\n")
    (rows / "b.jsonl.gz").write_bytes(gzip.compress(write_jsonl(tmp_path / "b", ROWS[13:24]).read_bytes()))
    write_parquet(rows / "c.parquet", ROWS[24:40], row_group_size=5)
    write_csv(rows / "d.csv", ROWS[40:50])
    write_json(rows / "e.json", ROWS[50:])
    return rows


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.rows_per_epoch == 57 and data.stream is not None
    steps = [rows for _, rows, _ in data.stream.steps(schedule(data), StreamPosition())]
    epochs = [steps[:5], steps[5:]]  # of 12, 12, 12, 12 and 9 rows
    numbers = [[number for step in epoch for number in step.row_numbers.tolist()] for epoch in epochs]
    assert sorted(numbers[0]) == sorted(numbers[1]) and len(set(numbers[0])) == 57
    assert numbers[0] != numbers[1] != sorted(numbers[1])
    texts = sorted(tuple(rows.input_ids[a:b]) for step in epochs[0] for rows in [step] for a, b in spans(rows))
    kept = stream(folder, streaming=False, shuffle_buffer=10_000).train
    assert texts == sorted(tuple(kept.input_ids[a:b]) for a, b in spans(kept))


def test_three_ranks_have_every_row_of_a_step_once(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.stream is not None
    of_ranks = schedule(data, world_size=3)
    for _, rows, _ in data.stream.steps(of_ranks, StreamPosition()):
        pieces = of_ranks.micro_batches(np.arange(len(rows)), rows.lengths)
        ranks = [[row for piece in pieces[rank::3] for row in piece.tolist()] for rank in range(3)]
        assert sorted(row for rank in ranks for row in rank) == list(range(len(rows)))
        assert len(pieces) % 3 == 0 and all(ranks)


def spans(rows: Any) -> list[tuple[int, int]]:
    return list(zip(rows.offsets[:-1], rows.offsets[1:], strict=True))


def test_from_every_place_it_goes_on_as_without_a_break(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.stream is not None
    steps = [(step, rows.digest, place) for step, rows, place in data.stream.steps(schedule(data), StreamPosition())]
    for first in range(1, len(steps)):
        again = stream(folder)
        assert again.stream is not None and again.identity == data.identity
        # The steps do not depend on the number of ranks.
        left = again.stream.steps(schedule(again, world_size=first % 2 + 1), steps[first - 1][2], first=first)
        assert [(step, rows.digest, place) for step, rows, place in left] == steps[first:]


def test_rows_that_cannot_be_used_are_counted_as_they_come(
    tmp_path: Path, stream: Callable[..., RunData], lines: list[str]
) -> None:
    bad = [{**row, "output": ""} if 30 <= i < 33 else row for i, row in enumerate(ROWS)]
    data = stream(write_jsonl(tmp_path / "rows.jsonl", bad), max_bad_rows=0.1)
    assert data.stream is not None
    assert len([None for _ in data.stream.steps(schedule(data), StreamPosition())]) == 10
    assert any("3 x empty output" in line and "rows.jsonl:31, 32, 33" in line for line in lines)
    bad = [{**row, "output": ""} if i > 1010 else row for i, row in enumerate(ROWS * 20)]
    data = stream(write_jsonl(tmp_path / "rows.jsonl", bad), max_bad_rows=0.01)
    assert data.stream is not None
    with pytest.raises(UserError, match=r"of 1,0\d\d rows so far cannot be used, allowed are 1.0%"):
        list(data.stream.steps(schedule(data), StreamPosition()))


def test_what_a_stream_cannot_do_is_one_sentence(tmp_path: Path, stream: Callable[..., RunData]) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for dataset, words in {
        f"{rows}[:10]": "reads all of", "dummy": "takes files, folders", "no/such.jsonl": "no such file or folder",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=words):
            stream(Path(dataset))
    with pytest.raises(UserError, match="missing columns"):
        stream(write_jsonl(tmp_path / "other.jsonl", [{"a": "b"}]))
    with pytest.raises(UserError, match="the dataset is empty"):
        stream(write_jsonl(tmp_path / "empty.jsonl", []))
    assert stream(rows, max_steps=7).rows_per_epoch is None


STREAM = """
import json, sys
from transformers import AutoTokenizer
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.prepare import DataOptions, prepare_data
from fsdp_qlora.data.schedule import Schedule
from fsdp_qlora.data.streaming import StreamPosition
from fsdp_qlora.errors import UserError
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for max_steps in (-1, 9):
    options = TrainConfig(dataset=("owner/rows",), streaming=True, shuffle_buffer=10, max_steps=max_steps)
    try:
        data = prepare_data(tokenizer, options.pick(DataOptions), vocab_size=len(tokenizer))
    except UserError as error:
        print("REFUSED", error)
schedule = Schedule(108, 12, 1, 1, num_epochs=1, max_steps=9, seed=1)
steps = list(data.stream.steps(schedule, StreamPosition()))
print("ROWS", json.dumps([rows.row_numbers.tolist() for _, rows, _ in steps]))
print("COUNT", data.rows_per_epoch)
print("FROM", flush=True)
sys.stdin.readline()
left = list(data.stream.steps(schedule, steps[3][2], first=4))
print("SAME", [rows.digest for _, rows, _ in left] == [rows.digest for _, rows, _ in steps[4:]])
"""


def test_a_dataset_of_the_hub_is_streamed_by_ranges_of_its_files(tmp_path: Path) -> None:
    files = [
        write_parquet(tmp_path / f"{i}.parquet", part, row_group_size=5)
        for i, part in enumerate((ROWS[:33], ROWS[33:]))
    ]
    hub = DatasetHub({f"data/train-0000{i}-of-00002.parquet": file.read_bytes() for i, file in enumerate(files)})
    make_tokenizer(tmp_path / "tokenizer")
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "FSDP_QLORA_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", STREAM, str(tmp_path / "tokenizer")]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **places}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    said = {}
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        said[word] = rest
        if word == "FROM":
            before = len(hub.ranges)
            process.stdin.write("\n")
            process.stdin.flush()
    hub.server.shutdown()
    assert process.wait() == 0
    assert said["REFUSED"].endswith("the number of rows of owner/rows is unknown. Give --max_steps.")
    steps = json.loads(said["ROWS"])
    epoch = [number for step in steps for number in step][:57]
    assert sorted(epoch) == list(range(1, 58)) and said["COUNT"] == "None"
    # After the 48th row nothing is asked for of the first file before the next epoch.
    assert said["SAME"] == "True" and "00001" in hub.ranges[before][0]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, stream: Callable[..., RunData]) -> None:
    large = [{**row, "note": "x" * 50_000} for row in ROWS]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(20):  # 57 MB
            file.writelines(json.dumps(row) + "\n" for row in large)
    data = stream(tmp_path / "rows.jsonl")
    assert data.stream is not None
    kib = []
    for step, _, _ in data.stream.steps(schedule(data), StreamPosition()):
        if step % 20 == 0:
            with open(f"/proc/{os.getpid()}/status") as status:
                kib.append(int(next(line for line in status if line.startswith("RssAnon")).split()[1]))
    assert max(kib) - kib[0] < 16 * 1024, kib
