"""--context_length auto: which rows decide, on which number, and how a resumed run keeps it."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

from fsdp_qlora.checkpoint.checkpoint import STATE
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import pipeline
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.sources import spread
from fsdp_qlora.data.sources.source import find_source
from fsdp_qlora.data.sources.spread import sample
from fsdp_qlora.planning.reading import earlier_run, pick_data, with_kept_rows
from fsdp_qlora.utils.run_files import RUN, STATUS
from tests.data.rows import write_csv, write_json, write_parquet
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks
from tests.helpers.tokenizers import spelled_tokenizer

MANY = 10**6  # tokens


def answers(*lengths: int) -> list[dict[str, Any]]:
    return [{"prompt": "hi", "completion": "go" * length} for length in lengths]


def prepared(
    paths: list[Path], context_length: object = "auto", *, longest: int | None = None, **given: Any
) -> RunData:
    options = {
        "dataset": tuple(map(str, paths)),
        "context_length": context_length,
        "max_bad_rows": 1.0,
        **given,
    }
    tokenizer = spelled_tokenizer("byte_level")
    options = pick_data(TrainConfig(**options))
    return read_rows(tokenizer, options, vocab_size=len(tokenizer), longest=longest)


# Name -> (datasets of rows, options).
CASES: dict[str, tuple[list[list[dict[str, Any]]], dict[str, Any]]] = {
    "one of a hundred is longer": ([answers(*[40] * 99, 900)], {}),
    "two of a hundred are longer": ([answers(*[40] * 98, 900, 900)], {}),
    "a power of two": ([answers(61, 29)], {}),
    "one more": ([answers(62, 29)], {}),
    "a small dataset of long rows": ([answers(*[40] * 300), answers(300, 300)], {}),
    "texts, which are never cut": (
        [[{"text": "go" * 100}, {"text": "hi"}]],
        {"dataset_format": "text"},
    ),
    "the longer answer": (
        [[{"prompt": "hi", "chosen": "go" * 90, "rejected": "no" * 9}]],
        {"objective": "dpo"},
    ),
    "more than auto takes": ([answers(5000, 6000)], {}),
    "more than the model": ([answers(40, 900)], {"longest": 100}),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_auto_context_is_the_power_of_two_that_keeps_99_percent(name, tmp_path, lines):
    parts, options = CASES[name]
    paths = [write_rows(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(parts)]
    expected = 2
    for path in paths:
        whole = prepared([path], MANY, **options).train
        lengths = np.diff(whole.document_offsets).reshape(len(whole), -1).max(axis=1)
        while (lengths <= expected).mean() < 0.99:
            expected *= 2
    expected = min(expected, 4096, options.get("longest", 4096))
    lines.clear()
    found = prepared(paths, **options)
    assert found.context_length == expected and f"Context: {expected:,} tokens (auto" in lines[0]
    assert found.train.digest == prepared(paths, expected, **options).train.digest


def in_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write_parquet(path, rows, row_group_size=3000)


def in_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def in_files(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.mkdir()
    for number in range(30):
        part = rows[number * len(rows) // 30 : (number + 1) * len(rows) // 30]
        write_rows(path / f"{number:02}.jsonl", part)
    return path


def in_packed_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    plain = write_rows(path.with_suffix(""), rows)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


LARGE = {
    "a.jsonl": write_rows,
    "a.parquet": in_parquet,
    "table": in_table,
    "folder": in_files,
    "a.jsonl.gz": in_packed_file,
    "a.json": write_json,
    "a.csv": write_csv,
}


@pytest.mark.quick
@pytest.mark.parametrize("name", LARGE)
def test_auto_context_looks_at_places_of_large_datasets(name, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(pipeline, "_MOST_MEASURED", 200)
    monkeypatch.setattr("fsdp_qlora.data.sources.json_file._PIECE", 2**10)
    rows = answers(*[5] * 1000, *[40] * 1900, *[200] * 100)  # the last 3% are the longest
    path = LARGE[name](tmp_path / name, rows)
    context_length = prepared([path], longest=1000).context_length
    said = lines[0].replace(",", "")
    used = int(re.findall(r"99% of (\d+) rows ", said)[0])
    assert 100 <= used <= 400
    if name in ("a.jsonl.gz", "a.json", "a.csv"):
        assert context_length < 256 and "from the beginning of files" in said
    else:
        [total] = re.findall(r"at 100 places of about (\d+) have", said)
        assert context_length == 256 and abs(int(total) - 3000) < 3000 / 4


@pytest.mark.quick
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder"])
def test_a_sample_of_a_dataset_has_rows_of_each_length_by_their_number(name, tmp_path):
    lengths = [1] * 20000 + [1000] * 2000 + [1] * 2000 + [30] * 16000
    path = LARGE[name](tmp_path / name, answers(*lengths))
    source = find_source(str(path))
    found = sample(source, 2000, None, tuple)
    again = sample(find_source(str(path)), 2000, None, tuple)
    assert [entry.row for entry in found.entries] == [entry.row for entry in again.entries]
    assert 1000 <= len(found.entries) <= 4000 and 30000 < found.num_rows < 50000
    counts = Counter(len(entry.row["completion"]) // 2 for entry in found.entries)
    for length, count in Counter(lengths).items():
        assert abs(counts[length] / len(found.entries) - count / len(lengths)) < 0.03
    every = [entry.row for entry in source.entries()]
    assert sample(source, len(every), None, tuple).entries[-1].row == every[-1]


@pytest.mark.quick
@pytest.mark.parametrize("large", [0, 100, 1900])
def test_a_sample_has_no_more_bytes_than_fit_in_memory(large, tmp_path, monkeypatch):
    lengths = [5] * 2000
    lengths[large : large + 60] = [500] * 60
    path = write_rows(tmp_path / "a.jsonl", answers(*lengths))
    monkeypatch.setattr(spread, "_MOST_BYTES", 30_000)
    found = sample(find_source(str(path)), 1000, None, tuple)
    sizes = [len(entry.row["completion"]) for entry in found.entries]
    assert 10 < len(sizes) < 1000 and sum(sizes) < 32_000
    assert found.num_rows > 1000
    # A single row that is larger, and a dataset that fits.
    monkeypatch.setattr(spread, "_MOST_BYTES", 0)
    assert sample(find_source(str(path)), 1000, None, tuple).entries
    monkeypatch.setattr(spread, "_MOST_BYTES", 2**20)
    assert len(sample(find_source(str(path)), 2000, None, tuple).entries) == 2000


@pytest.mark.quick
def test_resumed_run_keeps_its_context_length(tmp_path):
    run, copy, step, other = (tmp_path / name for name in ("run", "copy", "step", "other"))
    record = {"options": {"context_length": 640, "dataset": ["a.jsonl"]}}
    for folder, name, content in (
        (run, RUN, record),
        (copy, RUN, record),
        (step, STATE, {"about": record}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))

    def kept(output_dir: Path, *, dataset: str = "b.jsonl", **options: Any) -> object:
        config = TrainConfig(output_dir=str(output_dir), dataset=(dataset,), **options)
        return with_kept_rows(config, earlier_run(config).decisions()).context_length

    assert kept(run) == kept(other, resume=str(run)) == kept(other, resume=str(step)) == 640
    assert kept(other, mirror=str(copy)) == 640
    assert kept(other) == kept(run, resume="off") == kept(run, resume="auto:replace") == "auto"
    assert kept(run, dry_run=True) == "auto" and kept(run, context_length=100) == 100
    assert kept(run, dataset="a.jsonl", resume="auto:replace") == 640
    (run / STATUS).write_text(json.dumps({"state": "finished"}))
    assert kept(run, dataset="a.jsonl", resume="auto:replace") == "auto"


def test_ranks_agree_on_auto_context_and_resuming_keeps_it(models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(24))
    options = {
        "model_name": models(),
        "dataset": rows,
        "max_steps": 2,
        "quant_cache": "off",
        "log_to": "stdout",
    }

    def start(name: str, **given: Any) -> tuple[list[int], str, object]:
        output = tmp_path / name
        statuses, said = run_ranks(
            2, flags(**options, output_dir=output, **given), tmp_path / "logs"
        )
        recorded = json.loads((output / RUN).read_text())["options"]["context_length"]
        assert recorded == yaml.safe_load((output / "config.yaml").read_text())["context_length"]
        return statuses, said, recorded

    statuses, said, number = start("decided", max_hours=1e-6)
    assert statuses == [3, 3] and f"Context: {number} tokens (auto" in said
    statuses, said, _ = start("decided", context_length=200)
    assert statuses == [2, 2] and f"--context_length was {number} and is 200" in said
    # As a run of an earlier version, whose default was a number.
    assert start("given", max_hours=1e-6, context_length=250)[::2] == ([3, 3], 250)
    statuses, said, number = start("given")
    assert (
        statuses == [0, 0]
        and number == 250
        and ("Context: 250 tokens, with which the run was started") in said
    )
