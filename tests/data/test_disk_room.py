"""The disk of the cache is looked at before a large dataset is tokenized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.data import disk_room, host_room, row_reader
from fsdp_qlora.data.batches import pieces, tokenization
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import ROWS, write_jsonl

pytestmark = pytest.mark.quick


def test_tokens_that_do_not_fit_are_refused_or_warned_of_before_reading(
    prepare: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 100)
    needed = path.stat().st_size * 5 / 4
    monkeypatch.setattr(disk_room, "_LARGE", 1000)
    monkeypatch.setattr(disk_room, "free_disk", lambda folder: needed / 21)
    with pytest.raises(UserError, match=r"may take about .* Free some space, set FSDP_QLORA_CACHE"):
        prepare(path)
    assert len(prepare(path, dataset_samples=5)[0]) == 5
    for free, warns in ((needed / 19, True), (needed + 1, False)):
        monkeypatch.setattr(disk_room, "free_disk", lambda folder, free=free: free)
        caplog.clear()
        assert len(prepare(path, context_length=512 - warns)[0]) == 300
        assert ("if it gets full" in caplog.text) == warns
    # Rows that are in the cache need no room.
    monkeypatch.setattr(disk_room, "free_disk", lambda folder: 0)
    assert len(prepare(path)[0]) == 300


def test_a_cache_that_cannot_be_written_is_refused_before_a_piece_is_made(
    prepare: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 100)
    monkeypatch.setattr(row_reader, "ROWS_PER_BATCH", 10)
    monkeypatch.setattr(pieces, "MOST_ENTRIES", 50)
    tokenized = []
    tokenize = tokenization.tokenize_batch

    def count(contents: Any, *given: Any) -> Any:
        tokenized.extend(contents)
        return tokenize(contents, *given)

    monkeypatch.setattr(tokenization, "tokenize_batch", count)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot be written to .* about 6 pieces"):
        prepare(path)
    assert len(tokenized) == 10
    # Rows of a single piece stay in memory.
    assert len(prepare(path, dataset_samples=40)[0]) == 40


def test_little_host_memory_is_said_once_before_rows_are_tokenized(
    prepare: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 100)
    monkeypatch.setattr(pieces, "MOST_ENTRIES", 50)
    monkeypatch.setattr(row_reader, "ROWS_PER_BATCH", 10)
    for free, times in ((69 * 2**20, 1), (10 * 2**30, 0)):
        monkeypatch.setattr(host_room, "host_memory_free", lambda ranks, free=free: free)
        caplog.clear()
        assert len(prepare(path, context_length=512 - times)[0]) == 300
        assert caplog.text.count("of host memory") == times
    # Rows that are in the cache are not tokenized.
    monkeypatch.setattr(host_room, "host_memory_free", lambda ranks: 0)
    prepare(path)
    assert "of host memory" not in caplog.text
