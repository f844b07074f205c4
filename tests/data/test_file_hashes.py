"""Large files are hashed once a machine, and again when they differ in anything."""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_qlora.data.sources import file_hashes
from fsdp_qlora.data.sources.file_hashes import hash_file
from fsdp_qlora.utils import files

pytestmark = pytest.mark.quick


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """hashed(path): checks the hash, and says how many files were read for it."""
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "_LARGE", 10)
    read = []
    record_of = files.record_of
    monkeypatch.setattr(file_hashes, "record_of", lambda path: read.append(path) or record_of(path))

    def check(path: Path) -> int:
        read.clear()
        assert hash_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()
        return len(read)

    return check


def write(path: Path, content: str, *, age: float = 100) -> Path:
    path.write_text(content)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_unchanged_file_is_hashed_once_and_a_changed_one_again(hashed, tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", "a" * 100)
    assert [hashed(path), hashed(path)] == [1, 1]  # it is too young to be kept
    monkeypatch.setattr(file_hashes, "_YOUNG_NS", 0)
    assert [hashed(path), hashed(path)] == [1, 0]
    assert hashed(write(path, "b" * 100)) == 1  # with the same size and time
    before = path.stat()
    replaced = write(tmp_path / "other", "c" * 100)
    os.utime(replaced, ns=(before.st_atime_ns, before.st_mtime_ns))
    replaced.replace(path)
    assert [hashed(path), hashed(path)] == [1, 0]
    small = write(tmp_path / "small.jsonl", "a")
    assert [hashed(small), hashed(small)] == [1, 1]


def test_damaged_and_unwritable_records_are_hashed_again(hashed, tmp_path, monkeypatch):
    monkeypatch.setattr(file_hashes, "_YOUNG_NS", 0)
    path = write(tmp_path / "rows.jsonl", "a" * 100)
    assert [hashed(path), hashed(path)] == [1, 0]
    [record] = (tmp_path / "cache" / "hashes").glob("*.json")
    good = record.read_text()
    for damaged in (good.replace('"content": "', '"content": "0'), good[:-5], "[]", ""):
        record.write_text(damaged)
        assert [hashed(path), hashed(path)] == [1, 0]
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(path))  # a file
    assert [hashed(path), hashed(path)] == [1, 1]


def test_processes_that_start_together_share_one_hash(hashed, tmp_path, monkeypatch):
    monkeypatch.setattr(file_hashes, "_YOUNG_NS", 0)
    path = write(tmp_path / "rows.jsonl", "a" * 100)
    context = multiprocessing.get_context("fork")
    numbers = context.Queue()
    processes = [
        context.Process(target=lambda: numbers.put(hashed(path)), daemon=True) for _ in range(4)
    ]
    for process in processes:
        process.start()
    assert sorted(numbers.get(timeout=60) for _ in processes) == [0, 0, 0, 1]
