"""--context_length auto: which rows decide, on which number, and how a resumed run keeps it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fsdp_qlora.checkpoint.checkpoint import STATE
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import pipeline
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.planning.reading import earlier_run, pick_data, with_kept_context
from fsdp_qlora.utils.run_files import RUN, STATUS
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
    datasets, options = CASES[name]
    paths = [write_rows(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(datasets)]
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


@pytest.mark.quick
def test_auto_context_samples_rows_of_large_datasets(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(pipeline, "_MOST_MEASURED", 10)
    path = write_rows(tmp_path / "rows.jsonl", answers(*[40] * 60, *[200] * 20))
    assert (
        prepared([path]).context_length == 256 and ("99% of 10 of 80 rows have at most") in lines[0]
    )


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
        return with_kept_context(config, earlier_run(config).decisions()).context_length

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
