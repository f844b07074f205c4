"""Streams: every row once in each epoch, from any place on as without a break, in little memory."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.run_data import RunData, prepare_data
from fsdp_qlora.planning.run_plan import pick_data
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import write_csv, write_json, write_jsonl, write_parquet
from tests.tiny import make_rows, make_tokenizer

pytestmark = pytest.mark.quick

ROWS = make_rows(57)


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., RunData]:
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    def open_it(dataset: Path, **given: Any) -> RunData:
        usual = {"dataset": (str(dataset),), "streaming": 10, "context_length": 512}
        options = TrainConfig(**{**usual, **given})
        return prepare_data(tokenizer, pick_data(options), vocab_size=len(tokenizer))

    return open_it


def schedule(data: RunData, *, data_size: int = 1) -> Schedule:
    assert data.rows_per_epoch is not None
    return Schedule(data.rows_per_epoch, 12 // data_size // 2, 12, data_size, num_epochs=2, max_steps=-1, seed=1)


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


def test_each_streamed_epoch_has_every_row_once_in_its_own_order(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.rows_per_epoch == 57 and data.stream is not None
    steps = [each.table for each in data.stream.steps(schedule(data))]
    epochs = [steps[:5], steps[5:]]  # of 12, 12, 12, 12 and 9 rows
    numbers = [[number for step in epoch for number in step.row_numbers.tolist()] for epoch in epochs]
    assert sorted(numbers[0]) == sorted(numbers[1]) and len(set(numbers[0])) == 57
    assert numbers[0] != numbers[1] != sorted(numbers[1])
    texts = sorted(tuple(rows.input_ids[a:b]) for step in epochs[0] for rows in [step] for a, b in spans(rows))
    kept = stream(folder, streaming=False).train
    assert texts == sorted(tuple(kept.input_ids[a:b]) for a, b in spans(kept))


def test_three_ranks_split_the_rows_of_a_streamed_step(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.stream is not None
    of_ranks = schedule(data, data_size=3)
    for step in data.stream.steps(of_ranks):
        rounds = of_ranks.rounds(step.rows, step.table.lengths)
        ranks = [[row for each in rounds for row in each[rank].tolist()] for rank in range(3)]
        assert sorted(row for rank in ranks for row in rank) == list(range(len(step.table)))
        assert all(ranks)


def spans(rows: Any) -> list[tuple[int, int]]:
    return list(zip(rows.offsets[:-1], rows.offsets[1:], strict=True))


def test_stream_resumes_at_every_position_without_a_difference(folder: Path, stream: Callable[..., RunData]) -> None:
    data = stream(folder)
    assert data.stream is not None
    steps = [(each.step, each.table.digest, each.position) for each in data.stream.steps(schedule(data))]
    for first in range(1, len(steps)):
        again = stream(folder)
        assert again.stream is not None and again.identity == data.identity
        # The steps do not depend on the number of ranks.
        left = again.stream.steps(schedule(again, data_size=first % 2 + 1), position=steps[first - 1][2], first=first)
        assert [(each.step, each.table.digest, each.position) for each in left] == steps[first:]


def test_unusable_rows_of_a_stream_are_counted(
    tmp_path: Path, stream: Callable[..., RunData], lines: list[str]
) -> None:
    bad = [{**row, "output": ""} if 30 <= i < 33 else row for i, row in enumerate(ROWS)]
    data = stream(write_jsonl(tmp_path / "rows.jsonl", bad), max_bad_rows=0.1)
    assert data.stream is not None
    assert len([None for _ in data.stream.steps(schedule(data))]) == 10
    assert any("rows.jsonl:31, 32, 33: empty output (3 rows)" in line for line in lines)
    bad = [{**row, "output": ""} if i > 1010 else row for i, row in enumerate(ROWS * 20)]
    data = stream(write_jsonl(tmp_path / "rows.jsonl", bad), max_bad_rows=0.01)
    assert data.stream is not None
    with pytest.raises(UserError, match=r"of 1,0\d\d rows so far cannot be used, allowed are 1.0%"):
        list(data.stream.steps(schedule(data)))


def test_options_a_stream_does_not_support_are_refused(tmp_path: Path, stream: Callable[..., RunData]) -> None:
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


def test_a_dataset_of_the_hub_is_streamed_file_by_file(
    tmp_path: Path, stream: Callable[..., RunData], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = enumerate((ROWS[:33], ROWS[33:]))
    paths = [write_parquet(tmp_path / f"{i}.parquet", part, row_group_size=5) for i, part in parts]
    load = datasets.load_dataset

    def load_files(name: str, *, split: str, streaming: bool, revision: str) -> Any:
        return load("parquet", data_files=[str(path) for path in paths], split=split, streaming=streaming)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="a" * 40))
    monkeypatch.setattr("datasets.load_dataset", load_files)
    with pytest.raises(UserError, match=r"the number of rows of owner/rows is unknown. Give --max_steps."):
        stream(Path("owner/rows"))
    data = stream(Path("owner/rows"), max_steps=9)
    assert data.stream is not None and data.rows_per_epoch is None
    of_epoch = Schedule(57, 12, 12, 1, num_epochs=1, max_steps=9, seed=1)
    steps = list(data.stream.steps(of_epoch))
    assert sorted(number for each in steps for number in each.table.row_numbers.tolist()) == list(range(1, 58))
    paths[0].unlink()  # after the 48th row nothing is read of the first file
    [last] = data.stream.steps(of_epoch, position=steps[3].position, first=4)
    assert last.table.digest == steps[4].table.digest


def test_streaming_memory_does_not_grow_with_the_file(tmp_path: Path, stream: Callable[..., RunData]) -> None:
    large = [{**row, "note": "x" * 50_000} for row in ROWS]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(20):  # 57 MB
            file.writelines(json.dumps(row) + "\n" for row in large)
    data = stream(tmp_path / "rows.jsonl")
    assert data.stream is not None
    kib = []
    for rows in data.stream.steps(schedule(data)):
        if rows.step % 20 == 0:
            with open(f"/proc/{os.getpid()}/status") as status:
                kib.append(int(next(line for line in status if line.startswith("RssAnon")).split()[1]))
    assert max(kib) - kib[0] < 16 * 1024, kib
