"""A cache that another machine has filled is used."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.data.batches import tokenization
from tests.data.rows import ROWS, make_tokenizer, write_jsonl

pytestmark = pytest.mark.quick


def test_a_copied_cache_is_used_at_another_path_and_at_another_time(
    prepare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    rows, report = prepare(write_jsonl(here / "rows.jsonl", ROWS))
    there = tmp_path / "there" / "sets"
    there.mkdir(parents=True)
    path = write_jsonl(there / "rows.jsonl", ROWS)
    os.utime(path, (1e9, 1e9))
    shutil.copytree(tmp_path / "cache", tmp_path / "there" / "cache", copy_function=shutil.copy)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "there" / "cache"))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(tokenization, "tokenize_batch", refuse)
        carried, carried_report = prepare(path)
        assert carried.digest == rows.digest
        assert carried_report.num_tokens == report.num_tokens
        assert carried_report.origin == str(path)
        for changed in ({"context_length": 100}, {"tokenizer": make_tokenizer(ends_with_eos=True)}):
            with pytest.raises(AssertionError, match="tokenized again"):
                prepare(path, **changed)
        with pytest.raises(AssertionError, match="tokenized again"):
            prepare(path.rename(there / "other.jsonl"))
