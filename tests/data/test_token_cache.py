"""The cache of tokenized rows is reused, repaired and shared by ranks."""

import errno
import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.utils import locks
from tests.data.rows import ROWS, make_tokenizer, write_jsonl

pytestmark = pytest.mark.quick


def test_cached_rows_are_memory_mapped_without_tokenizing_again(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", [*ROWS * 50, {}])
    first, first_report = prepare(path)
    monkeypatch.setattr(tokenization, "tokenize_batch", lambda *_: pytest.fail("tokenized again"))
    second, second_report = prepare(path)
    assert second_report == first_report
    for name in ("input_ids", "learned", "offsets", "row_numbers"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
        assert getattr(first, name).dtype == getattr(second, name).dtype
        assert not getattr(second, name).flags.writeable
    [file] = (tmp_path / "cache" / "tokenized").glob("*.safetensors")
    if sys.platform == "linux":
        assert file.name in Path("/proc/self/maps").read_text()


def test_cache_key_covers_all_that_decides_the_tokens(prepare, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    other = write_jsonl(tmp_path / "other.jsonl", ROWS)

    def count_files() -> int:
        return len(list((tmp_path / "cache" / "tokenized").glob("*.safetensors")))

    prepare(path)
    inputs: list[dict[str, Any]] = [
        {"context_length": 500},
        {"dataset_samples": 2},
        {"dataset_format": "alpaca"},
        {"tokenizer": make_tokenizer(ends_with_eos=True)},
        {"dataset": other},
    ]
    for number, options in enumerate(inputs, start=2):
        prepare(**{"dataset": path, **options})
        assert count_files() == number
    used = make_tokenizer()
    used(["a", "b c d"], padding=True, truncation=True, max_length=2)
    prepare(path, tokenizer=used, seed=5)  # an equal tokenizer; the seed decides nothing here
    assert count_files() == 6
    write_jsonl(path, ROWS[::-1])
    assert prepare(path)[1].num_rows == 3
    assert count_files() == 7


@pytest.mark.parametrize(
    "damage", ["cut", "half", "head", "empty", "noise", "foreign", "mixed", "bit"]
)
def test_a_damaged_cache_file_is_made_again(damage, prepare, tmp_path, lines):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 50)  # of many pages of memory
    expected = prepare(path)[0].input_ids.tolist()
    [file] = (tmp_path / "cache" / "tokenized").glob("*.safetensors")
    data = file.read_bytes()
    arrays = load_file(file)
    file.unlink()  # the first call's rows are still mapped
    if damage == "foreign":
        save_file({"input_ids": np.zeros(3, dtype=np.int32)}, file)
    elif damage == "mixed":
        save_file(
            {**arrays, "input_ids": arrays["input_ids"][:-1]}, file, {"digest": "0", "report": "{}"}
        )
    else:
        bit = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        cuts = {"cut": data[:-7], "half": data[: len(data) // 2], "head": data[:300]}
        file.write_bytes({**cuts, "empty": b"", "noise": b"\xff" * len(data), "bit": bit}[damage])
    assert prepare(path)[0].input_ids.tolist() == expected
    assert any("damaged" in line for line in lines)
    assert all(np.array_equal(array, load_file(file)[name]) for name, array in arrays.items())


def test_only_one_rank_tokenizes(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    tokenize = tokenization.tokenize_batch

    def tokenize_and_note(*arguments: Any) -> Any:
        (tmp_path / f"tokenized_by_{os.getpid()}").touch()
        time.sleep(0.5)  # long enough for the others to come
        return tokenize(*arguments)

    def work() -> None:
        assert len(prepare(path)[0]) == len(ROWS)

    monkeypatch.setattr(tokenization, "tokenize_batch", tokenize_and_note)
    ranks = [multiprocessing.get_context("fork").Process(target=work) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(list(tmp_path.glob("tokenized_by_*"))) == 1


def test_killed_cache_writer_does_not_block_the_next_run(prepare, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        victim = multiprocessing.get_context("fork").Process(target=prepare, args=(path,))
        victim.start()
        victim.join(timeout=30)
    assert victim.exitcode == -signal.SIGKILL
    assert len(prepare(path)[0]) == len(ROWS)


def test_read_only_token_cache_is_used(prepare, tmp_path, monkeypatch, caplog):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    expected = prepare("alpaca_demo", context_length=4096)[0].digest
    monkeypatch.setattr(locks.FileLock, "acquire", refuse)
    caplog.clear()
    assert prepare("alpaca_demo", context_length=4096)[0].digest == expected
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "file" / "cache"))
    assert prepare("alpaca_demo", context_length=4096)[0].digest == expected
    assert (
        "file/cache/tokenized cannot be written"
    ) in caplog.text and "FSDP_QLORA_CACHE" in caplog.text
