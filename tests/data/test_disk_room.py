"""The disk of the cache is looked at before a large dataset is tokenized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.data import disk_room
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
