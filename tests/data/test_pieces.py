"""Rows that are kept piece by piece are those of one file, whatever interrupts their making."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tqdm import tqdm

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import row_reader
from fsdp_qlora.data.batches import pieces, tokenization
from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.side_by_side import SideBySide
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.sources.source import Source
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.utils import verified_stamps
from fsdp_qlora.utils.errors import UserError
from tests.data.conftest import SharedWorker
from tests.data.rows import TOKENIZER, write_jsonl

pytestmark = pytest.mark.quick

Rows = list[dict[str, Any]]
PER_BATCH = 5
PER_PIECE = 20  # entries
CHATS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunData]:
    """read_rows with batches of PER_BATCH rows, in pieces or as one file, with caches apart."""
    monkeypatch.setattr("fsdp_qlora.data.run_data.TemplateWorker", SharedWorker)
    monkeypatch.setattr(row_reader, "ROWS_PER_BATCH", PER_BATCH)

    def call(*datasets: object, cache: str = "pieces", per_piece: int = 0, **given: Any) -> RunData:
        monkeypatch.setattr(pieces, "MOST_ENTRIES", per_piece or PER_PIECE)
        monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / cache))
        config = TrainConfig(dataset=tuple(map(str, datasets)), **{"context_length": 500, **given})
        return read_rows(TOKENIZER, pick_data(config), vocab_size=2**31)

    return call


def sentence(number: int) -> str:
    """Words, of another length for each number."""
    return " ".join(f"w{number * place % 17}" for place in range(1 + number * 7 % 23))


def instructions(count: int) -> Rows:
    """Rows of which some cannot be used, with a column that only later ones have."""
    rows: Rows = [
        {"instruction": sentence(i), "input": "", "output": sentence(i + 1)} for i in range(count)
    ]
    rows[3]["output"] = ""
    rows[count // 2] = {"question": 1}
    rows[-2]["source"] = "a book"
    return rows


def pairs(count: int) -> Rows:
    return [
        {"prompt": sentence(i), "chosen": sentence(i + 1), "rejected": sentence(i + 2)}
        for i in range(count)
    ]


def labels(count: int) -> Rows:
    return [
        {"prompt": sentence(i), "completion": sentence(i + 1), "label": i % 3 > 0}
        for i in range(count)
    ]


def weighted(count: int) -> Rows:
    """Chats, of which only some have weights: masks of bools, and later of floats."""
    rows: Rows = []
    for i in range(count):
        answer: dict[str, Any] = {"role": "assistant", "content": sentence(i + 1)}
        if i > 30:
            answer["weight"] = 0.5
        rows.append({"messages": [{"role": "user", "content": sentence(i)}, answer]})
    return rows


def taught(count: int) -> Rows:
    return [
        {"instruction": sentence(i), "output": sentence(i + 1), "teacher_prompt": sentence(i + 2)}
        for i in range(count)
    ]


def folders_of(cache: Path) -> list[Path]:
    """The folders of datasets in pieces, and of joined ones."""
    return [path for path in (cache / "tokenized").iterdir() if path.is_dir()]


def folder_of(cache: Path) -> Path:
    """The folder of the only dataset in pieces."""
    [folder] = folders_of(cache)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """The content of each file; not of the stamp, which has the time, nor of partial files."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "verified.json" and not path.name.startswith(".")
    }


def assert_same(found: RunData, expected: RunData) -> None:
    assert found.train.digest == expected.train.digest
    assert isinstance(found.train.input_ids, SideBySide)
    assert found.train.arrays.keys() == expected.train.arrays.keys()
    for name, array in expected.train.arrays.items():
        other = found.train.arrays[name]
        assert other.dtype == array.dtype and other.shape == array.shape, name
        assert np.array_equal(other[:], array[:]), name
    # The digest is known from the index: the arrays have it, too.
    assert dataclasses.replace(found.train).digest == expected.train.digest
    # As JSON, which has the order of reasons.
    assert [json.dumps(dataclasses.asdict(report)) for report in found.reports] == [
        json.dumps(dataclasses.asdict(report)) for report in expected.reports
    ]
    assert found.provenance == expected.provenance and found.identity == expected.identity


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (instructions, {"max_bad_rows": 0.2}),
        (instructions, {"max_bad_rows": 0.2, "dataset_samples": 48}),
        (instructions, {"max_bad_rows": 0.9, "context_length": 220}),
        (pairs, {"objective": "dpo"}),
        (labels, {"objective": "kto"}),
        (weighted, {"prompt_template": "chatml"}),
        (taught, {"objective": "distill"}),
    ],
    ids=["instructions", "samples", "cut", "pairs", "labels", "weighted", "taught"],
)
def test_pieces_have_the_rows_and_report_of_one_file(rows, options, read, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", rows(70))
    expected = read(path, cache="one", per_piece=1000, **options)
    assert not isinstance(expected.train.input_ids, SideBySide)
    assert_same(read(path, **options), expected)
    names = hashes(folder_of(tmp_path / "pieces")).keys()
    count = 3 if "dataset_samples" in options else 4
    numbered = {f"{i:06d}.safetensors" for i in range(count)}
    assert names == numbered | {"index.json", "rows.safetensors"}
    assert_same(read(path, **options), expected)  # and read again


def test_slices_and_several_datasets_in_pieces_are_those_of_files(read, tmp_path):
    first = write_jsonl(tmp_path / "first.jsonl", pairs(70))
    second = write_jsonl(tmp_path / "second.jsonl", pairs(90)[70:])
    sets = (f"{first}[7:65]", second, first)
    expected = read(*sets, cache="one", per_piece=1000, objective="dpo")
    found = read(*sets, objective="dpo")
    assert_same(found, expected)
    # What is joined has no tokens of its own.
    joined = folders_of(tmp_path / "pieces")
    sizes = sorted(sum(file.stat().st_size for file in path.iterdir()) for path in joined)
    assert len(joined) == 3 and sizes[0] < found.train.input_ids[:].nbytes
    assert_same(read(*sets, objective="dpo"), expected)


def test_tokens_side_by_side_are_read_as_one_array():
    whole = np.arange(20, dtype=np.int32)
    beside = SideBySide([whole[:4], whole[4:4], SideBySide([whole[4:11], whole[11:]])])
    places = np.array([[19, 4, 3], [0, 10, 11]])
    assert (beside[places] == whole[places]).all() and beside[places].dtype == np.int32
    for start in range(20):
        for stop in range(start, 21):
            assert beside[start:stop].tolist() == whole[start:stop].tolist()
    assert np.shares_memory(beside[5:9], whole)
    with pytest.raises(IndexError):
        beside[np.array([20])]
    with pytest.raises(TypeError, match="are not joined"):
        np.asarray(beside)
    mixed = SideBySide([np.ones(2, np.bool_), np.full(2, 0.5, np.float32)])
    assert mixed[:].tolist() == [1, 1, 0.5, 0.5] and mixed[:2].dtype == np.float32


def _read_alone(read, path, cache):
    # A progress bar's lock is shared by forked processes, and one that is killed would keep it.
    tqdm.set_lock(threading.RLock())
    read(path, cache=cache, max_bad_rows=0.2)


def test_a_preparation_killed_at_any_moment_goes_on_to_the_same_bytes(read, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", instructions(240))
    expected = read(path, cache="whole", max_bad_rows=0.2)
    whole = hashes(folder_of(tmp_path / "whole"))
    assert len(whole) == 14
    context = multiprocessing.get_context("fork")
    found = set()
    for moment in range(20):
        cache = f"killed{moment}"
        victim = context.Process(target=_read_alone, args=(read, path, cache))
        victim.start()
        num_pieces = moment // 2
        while victim.is_alive() and len([*(tmp_path / cache).rglob("0*.safetensors")]) < num_pieces:
            time.sleep(0.001)
        time.sleep(moment % 4 / 100)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        kept = (tmp_path / cache).rglob("0*.safetensors")
        states = {file.name: file.stat().st_mtime_ns for file in kept}
        assert read(path, cache=cache, max_bad_rows=0.2).train.digest == expected.train.digest
        folder = folder_of(tmp_path / cache)
        assert hashes(folder) == whole
        assert all((folder / name).stat().st_mtime_ns == time for name, time in states.items())
        found.add(len(states))
    assert len(found) > 3  # moments within the preparation


def test_partial_files_are_removed_when_they_are_an_hour_old(read, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    read(path, objective="dpo")
    folder = folder_of(tmp_path / "pieces")
    (folder / "index.json").unlink()
    names = [".000001.safetensors.0123456789abcdef.partial", ".tmpzvoDBl"]
    for name in names:
        (folder / name).touch()
    read(path, objective="dpo")
    assert {path.name for path in folder.glob(".*")} == {*names}  # of another machine, maybe
    (folder / "index.json").unlink()
    for name in names:
        os.utime(folder / name, (time.time() - 4000,) * 2)
    read(path, objective="dpo")
    assert not [*folder.glob(".*")]


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_damaged_piece_is_made_again_alone(is_finished, read, tmp_path, lines):
    path = write_jsonl(tmp_path / "rows.jsonl", weighted(120))
    expected = read(path, prompt_template="chatml").train.digest
    folder = folder_of(tmp_path / "pieces")
    before = hashes(folder)
    if not is_finished:
        (folder / "index.json").unlink()
        (folder / "000005.safetensors").unlink()
    damaged = folder / "000002.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.unlink()  # the first call's rows are still mapped
    damaged.write_bytes(content)
    others = {file: file.stat() for file in folder.glob("0*") if file != damaged}
    lines.clear()
    assert read(path, prompt_template="chatml").train.digest == expected
    assert len([line for line in lines if "are damaged" in line]) == 1
    assert hashes(folder) == before
    for file, status in others.items():
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


@pytest.mark.parametrize("name", ["index.json", "rows.safetensors"])
def test_a_damaged_index_is_made_again_of_the_pieces(name, read, tmp_path, monkeypatch, lines):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    expected = read(path, objective="dpo").train.digest
    folder = folder_of(tmp_path / "pieces")
    before = hashes(folder)
    content = bytearray((folder / name).read_bytes())
    content[-9] ^= 1
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    lines.clear()
    monkeypatch.setattr(tokenization, "tokenize_batch", lambda *_: pytest.fail("tokenized again"))
    assert read(path, objective="dpo").train.digest == expected
    assert len([line for line in lines if "is damaged" in line]) == 1
    assert hashes(folder) == before


def test_a_full_disk_is_said_and_a_later_start_goes_on(read, tmp_path):
    rows = instructions(70)
    for row in rows[40:]:
        row["output"] = sentence(9) * 40
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {"max_bad_rows": 0.2, "context_length": 4000}
    whole = read(path, cache="whole", **options)
    sizes = [
        file.stat().st_size for file in sorted(folder_of(tmp_path / "whole").glob("0*.safetensors"))
    ]
    assert sizes[2] > 2 * max(sizes[:2])

    def refused() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[2] - 1, sizes[2] - 1))
        try:
            read(path, **options)
        except UserError as error:
            (tmp_path / "said").write_text(str(error))

    child = multiprocessing.get_context("fork").Process(target=refused)
    child.start()
    child.join()
    said = (tmp_path / "said").read_text()
    assert "cannot be written" in said and "FSDP_QLORA_CACHE" in said
    assert "goes on behind the 40 rows that are kept" in said and "are free" in said
    folder = folder_of(tmp_path / "pieces")
    assert sorted(hashes(folder)) == ["000000.safetensors", "000001.safetensors"]
    first = (folder / "000000.safetensors").stat()
    assert_same(read(path, **options), whole)
    assert (folder / "000000.safetensors").stat() == first


def test_a_folder_that_cannot_be_written_to_refuses_several_pieces(read, tmp_path, caplog):
    (tmp_path / "file").touch()
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    with pytest.raises(UserError, match=r"cannot be written to .* behind the 0 rows"):
        read(path, cache="file/cache", objective="dpo")
    assert len(read(f"{path}[:15]", cache="file/cache", objective="dpo").train) == 15
    assert "not kept for the next start" in caplog.text


def test_a_file_of_before_is_used_whatever_its_size(read, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    expected = read(path, per_piece=1000, objective="dpo")
    monkeypatch.setattr(tokenization, "tokenize_batch", lambda *_: pytest.fail("tokenized again"))
    found = read(path, objective="dpo")
    assert found.identity == expected.identity
    assert not folders_of(tmp_path / "pieces")


def test_one_process_of_a_start_hashes_the_files(read, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    hashed = list[str]()
    digest = TokenizedRows.__dict__["digest"].func

    def note(rows: TokenizedRows) -> str:
        hashed.append("")
        return str(digest(rows))

    expected = read(path, objective="dpo").train.digest
    monkeypatch.setattr(TokenizedRows, "digest", property(note))
    read(path, objective="dpo")
    assert not hashed
    piece = folder_of(tmp_path / "pieces") / "000001.safetensors"
    os.utime(piece)
    read(path, objective="dpo")
    assert len(hashed) == 4
    later = time.time() + 100
    monkeypatch.setattr(verified_stamps.psutil.Process, "create_time", lambda self: later)
    read(path, objective="dpo")
    assert len(hashed) == 8
    monkeypatch.undo()
    assert read(path, objective="dpo").train.digest == expected


@pytest.mark.parametrize("moment", ["today", None, [], 1e12])
def test_a_stamp_of_no_moment_until_now_does_not_count(moment, tmp_path):
    file = tmp_path / "file"
    file.touch()
    stamp = verified_stamps.Stamp(tmp_path / "stamp", [file])
    stamp.write()
    assert stamp.is_valid
    noted = json.loads((tmp_path / "stamp").read_text())
    (tmp_path / "stamp").write_text(json.dumps(noted | {"time": moment}))
    assert not stamp.is_valid


def test_rows_of_ended_processes_are_tried_again_in_another_start(read, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", instructions(70))
    expected = read(path, cache="one", max_bad_rows=0.2)
    tokenize = tokenization.tokenize_batch

    def end(rows: Any, *arguments: Any) -> Any:
        if rows[0][0] == 26:
            arguments[-1].reject(26, f"{pieces.ENDED_WORKERS}, the last by signal 9")
            rows = rows[1:]
        return tokenize(rows, *arguments)

    monkeypatch.setattr(tokenization, "tokenize_batch", end)
    for _ in range(2):  # other ranks of the start have the same rows
        found = read(path, max_bad_rows=0.2)
        assert len(found.train) == len(expected.train) - 1
    monkeypatch.setattr(tokenization, "tokenize_batch", tokenize)
    before = {file: file.stat().st_mtime_ns for file in folder_of(tmp_path / "pieces").glob("0*")}
    later = time.time() + 1
    monkeypatch.setattr(verified_stamps.psutil.Process, "create_time", lambda self: later)
    assert_same(read(path, max_bad_rows=0.2), expected)
    after = {file: file.stat().st_mtime_ns for file in before}
    assert [file.name for file in before if after[file] != before[file]] == ["000001.safetensors"]


def test_the_length_of_most_rows_is_numpys_quantile():
    choose = np.random.default_rng(0)
    for count in [*range(1, 400), 12_345]:
        lengths = choose.integers(1, 500, count)
        report = DataReport("")
        report.set_length_of_99_percent(Counter(lengths.tolist()))
        assert report.length_of_99_percent == np.quantile(lengths, 0.99, method="inverted_cdf")


def test_a_dataset_that_changes_while_it_is_read_leaves_no_pieces(read, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    tokenize = tokenization.tokenize_batch

    def change(rows: Any, *arguments: Any) -> Any:
        if rows[0][0] == 41:
            with path.open("a") as file:
                file.write("{}\n")
        return tokenize(rows, *arguments)

    monkeypatch.setattr(tokenization, "tokenize_batch", change)
    with pytest.raises(UserError, match="was changed while it was read"):
        read(path, objective="dpo", max_bad_rows=0.2)
    assert not [*(tmp_path / "pieces").rglob("0*.safetensors")]


@pytest.mark.parametrize("moment", [0, 41, 69])
def test_content_that_is_replaced_and_comes_back_is_refused(moment, read, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    content = path.read_bytes()
    status = path.stat()
    tokenize = tokenization.tokenize_batch
    made = []

    def swap() -> None:
        path.write_bytes(content.replace(b"w0", b"w1"))
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def change(rows: Any, *arguments: Any) -> Any:
        made.append(rows[0][0])
        if any(row[0] == moment for row in rows):
            swap()
        return tokenize(rows, *arguments)

    @contextlib.contextmanager
    def wait(path: Path, waiting: str) -> Iterator[bool]:
        swap()  # before the lock is had
        yield True

    if not moment:
        monkeypatch.setattr("fsdp_qlora.data.batches.cache.locked", wait)
    monkeypatch.setattr(tokenization, "tokenize_batch", change)
    with pytest.raises(UserError, match="was changed while it was read"):
        read(path, objective="dpo")
    assert not [*(tmp_path / "pieces").rglob("0*.safetensors")]
    assert bool(made) == bool(moment)


def test_the_bytes_of_pieces_and_the_rows_made_in_this_start_are_said(read, tmp_path, caplog):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))

    def said(dataset: object = path) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "fsdp_qlora"):
            read(dataset, objective="dpo")
        return " ".join(line for line in caplog.messages if line.startswith("Tokens:"))

    made = said()
    assert "70 rows prepared in" in made and "rows a second" in made
    folder = folder_of(tmp_path / "pieces")
    arrays = [load_file(file) for file in folder.glob("0*.safetensors")]
    num_bytes = sum(
        array.nbytes for piece in arrays for name, array in piece.items() if name != "facts"
    )
    size = re.match(r"Tokens: ([\d.]+) KiB in the cache", made)
    assert size and float(size[1]) * 1024 == pytest.approx(num_bytes, rel=0.1)
    assert said() == size[0]
    (folder / "index.json").unlink()
    (folder / "000003.safetensors").unlink()
    assert f"{size[0]}, 10 rows prepared in" in said()
    assert said(f"{path}[:15]") == ""


def test_pace_is_said_where_the_share_that_was_read_is_unknown(read, tmp_path, monkeypatch, caplog):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    monkeypatch.setattr(Source, "share_read", lambda self: 0.0)
    with caplog.at_level(logging.INFO, "fsdp_qlora"):
        read(path, objective="dpo")
    assert "rows a second, piece by piece" in caplog.text


def test_progress_goes_on_at_the_row_where_it_stopped(read, tmp_path, capsys, caplog):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    with caplog.at_level(logging.INFO, "fsdp_qlora"):
        read(path, objective="dpo")
    assert "rows a second" in caplog.text and "goes on behind" not in caplog.text
    folder = folder_of(tmp_path / "pieces")
    (folder / "index.json").unlink()
    (folder / "000003.safetensors").unlink()
    capsys.readouterr()
    with caplog.at_level(logging.INFO, "fsdp_qlora"):
        read(path, objective="dpo")
    assert caplog.text.count("goes on behind the 60 rows that are kept") == 1
    said = capsys.readouterr().err
    assert "Tokenizing: 60 rows" in said and "Tokenizing: 70 rows" in said


def test_any_rank_that_tokenizes_says_its_pace_and_where_it_goes_on(
    read, tmp_path, capsys, monkeypatch
):
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(70))
    monkeypatch.setenv("RANK", "1")
    read(path, objective="dpo")
    assert re.search(r"\[rank 1\] Tokenizing [\d,]+ rows a second", capsys.readouterr().err)
    folder = folder_of(tmp_path / "pieces")
    (folder / "index.json").unlink()
    (folder / "000003.safetensors").unlink()
    read(path, objective="dpo")
    assert "[rank 1] Tokenizing goes on behind the 60 rows" in capsys.readouterr().err
