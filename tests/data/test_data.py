"""The data package: strict reading, exact masks, a safe cache, and an order that loses no row."""

import contextlib
import csv
import dataclasses
import errno
import gzip
import io
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches import cache, tokenization
from fsdp_qlora.data.batches.data_report import DataReport
from fsdp_qlora.data.batches.micro_batch import pad_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import (
    Schedule,
    epoch_order,
    split_by_length,
    split_by_tokens,
    split_eval,
)
from fsdp_qlora.data.batches.tokenization import check_vocabulary, describe_sample
from fsdp_qlora.data.content import Segment
from fsdp_qlora.data.prepare import DataOptions, prepare_rows
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.files import FILE_KINDS, look_into, read_file
from fsdp_qlora.data.text.formats import FORMATS, Format
from fsdp_qlora.data.text.templates import TEMPLATES
from fsdp_qlora.utils.errors import UserError
from tests.tiny import spelled_tokenizer

pytestmark = pytest.mark.quick

ROWS = [
    {"instruction": "Add the numbers.", "input": "2 and 3", "output": "The sum is 5."},
    {"instruction": "Name a colour.", "input": "", "output": "Blue."},
    {"instruction": "Say hello in French, twice.", "input": "", "output": "Bonjour, bonjour! Ça va?"},
]


def render_alpaca(row: dict[str, Any]) -> list[Segment]:
    return TEMPLATES["alpaca"].fill(FORMATS["alpaca"].read(row))


def make_tokenizer(*, ends_with_eos: bool = False) -> PreTrainedTokenizerFast:
    """Begins texts with <s>, as many decoders' tokenizers do; some end them too."""
    found = spelled_tokenizer("byte_level")
    found.pad_token = found.eos_token
    if ends_with_eos:
        found.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def prepare(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """prepare_rows with a tiny tokenizer and a cache of the test's own, cache/tokenized below tmp_path."""
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))

    def call(dataset: object, **given: Any) -> tuple[TokenizedRows, DataReport]:
        chosen = given.pop("tokenizer", tokenizer)
        config = TrainConfig(dataset=(str(dataset),), **{"context_length": 512, **given})
        return prepare_rows(chosen, config.pick(DataOptions, image_processor=None))

    return call


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def rows_of(dataset: object, limit: int | None = None) -> list[Any]:
    return [entry.row for entry in sources.find_source(str(dataset)).entries(limit)]


WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


# ---- reading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    rows = [*ROWS, {"instruction": 'Quote "this",\nplease.', "input": "", "output": "x" * 200_000}]
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", rows)
    assert (rows_of(path), rows_of(path, 2), list(rows_of(path)[0])) == (rows, rows[:2], list(rows[0]))


def lines_of(rows: list[dict[str, Any]], between: str = "\n", **how: Any) -> str:
    return between.join(json.dumps(row, **how) for row in rows)


CONTENTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "an array": json.dumps,
    "an array over several lines": partial(json.dumps, indent=1),
    "an array with an object a line": lambda rows: f"[\n{lines_of(rows, ',' + chr(10))}\n]",
    "an object a line": partial(lines_of, ensure_ascii=False),
    "an object a line behind a mark and blank lines": lambda rows: "\ufeff" + lines_of(rows, "\r\n \r\n"),
    "objects on one line": partial(lines_of, between=""),
    "objects over several lines": partial(lines_of, indent=1),
    "objects over several lines with commas": partial(lines_of, between=",\n", indent=1),
    "objects with commas": partial(lines_of, between=",\n"),
    "an object with the rows": lambda rows: json.dumps({"version": [1], "rows": rows}),
    "an object with the rows over several lines": lambda rows: json.dumps({"rows": rows, "version": 1}, indent=1),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_json_kind_is_detected_from_content_not_from_the_name(content: str, tmp_path: Path) -> None:
    text = CONTENTS[content](ROWS).encode()
    for name in ("a.json", "a.jsonl", "a.JSON.gz"):
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        assert rows_of(tmp_path / name) == ROWS
        assert sources.find_source(str(tmp_path / name)).count() == len(ROWS)


def test_text_file_is_read_as_json_lines_if_its_first_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(lines_of(ROWS))
    assert rows_of(path) == ROWS
    for text in ("{} begins\n", '{"a": 1} goes on\n', json.dumps(ROWS), "{\n}", "{}\n"):
        path.write_text(text)
        assert rows_of(path) == [{"text": line} for line in text.splitlines()]


def test_bad_rows_are_named_by_their_line_number(prepare: Any, tmp_path: Path) -> None:
    bad = {"instruction": "Say nothing.", "output": ""}
    for name in ("a.json", "a.txt"):
        write_jsonl(tmp_path / name, [*ROWS, bad])
        assert prepare(tmp_path / name, max_bad_rows=0.5)[1].places() == [(f"{tmp_path / name}:4", "empty output")]
    (tmp_path / "b.json").write_text(CONTENTS["objects over several lines"]([*ROWS, bad]))
    assert prepare(tmp_path / "b.json", max_bad_rows=0.5)[1].places()[0][0] == f"{tmp_path / 'b.json'} row 4"


def test_a_folder_of_files_with_one_row_each_is_a_dataset(prepare: Any, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for number, row in enumerate([*ROWS, {"output": "x", "instruction": ""}]):
        (tmp_path / "rows" / f"{number}.json").write_text(json.dumps(row, indent=4 * (number % 2) or None))
    tokenized, report = prepare(tmp_path / "rows", max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [1, 2, 3]
    assert report.places() == [(f"{tmp_path}/rows/3.json row 1", "empty instruction")]


def test_format_of_a_large_file_is_detected_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "1")
    many = [{**ROWS[0], "output": "x" * 100_000}] * 300
    (tmp_path / "a.jsonl").write_text(json.dumps(many))
    (tmp_path / "b.json").write_text(lines_of(many))
    with counting_memory() as most:
        assert look_into(tmp_path / "a.jsonl") == FILE_KINDS[".json"]
        assert look_into(tmp_path / "b.json") == FILE_KINDS[".jsonl"]
        assert sum(1 for _ in sources.find_source(str(tmp_path / "b.json")).entries()) == 300
        assert most() < 8 << 20


def test_folder_is_read_in_order_of_name_and_its_rows_can_be_located(prepare: Any, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    bad = {"instruction": "Say nothing.", "output": ""}
    write_jsonl(folder / "b.jsonl", [ROWS[0], bad])
    write_json(folder / "a.json", [ROWS[1], ROWS[2], bad])
    write_csv(folder / "c.csv", [{"instruction": "Now?", "output": ""}])
    (folder / "notes.txt").write_text("not data")
    (folder / ".hidden.json").write_text("not data")
    expected = [*ROWS[1:], bad, ROWS[0], bad, {"instruction": "Now?"}]
    assert [row["instruction"] for row in rows_of(folder)] == [row["instruction"] for row in expected]
    assert len(rows_of(folder, 4)) == 4  # of both files together
    tokenized, report = prepare(folder, max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [1, 2, 4]
    assert len(report.describe_rejected()) == 1
    places = [f"{folder}/a.json row 3", f"{folder}/b.jsonl:2", f"{folder}/c.csv:2"]
    assert [place for place, _ in report.places()] == places


def make_parquet(rows: int = 500, **more: object) -> bytes:
    """A file of 500 rows whose columns may be replaced or added to."""
    columns = {"instruction": [f"Say {n}." for n in range(rows)], "output": [f"{n}" * 4 for n in range(rows)]}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({**columns, **more}), buffer, row_group_size=200)
    return buffer.getvalue()


def not_utf8(rows: int = 500) -> pyarrow.Array:
    """Texts of which the 401st is not UTF-8: a writer that does not look leaves such."""
    made = pyarrow.array([b"text"] * 400 + [b"\xff\xfe"] + [b"text"] * (rows - 401))
    return pyarrow.Array.from_buffers(pyarrow.string(), len(made), made.buffers())


GOOD = json.dumps(ROWS[0])
PARQUET = make_parquet()
DEEP = "[" * 200_000
# File -> (its content, what the refusal says behind the file's path).
MALFORMED = {
    # JSON lines
    "line.jsonl": (f"{GOOD}\n\n{{'instruction': 1}}\n".encode(), ":3: Expecting property name"),
    "cut.jsonl": (f"{GOOD}\n{GOOD[:20]}".encode(), ":2: Unterminated string"),
    "cut_late.jsonl": ((GOOD + "\n").encode() * 300 + GOOD[:-9].encode(), ":301: Unterminated string"),
    "list.jsonl": (b"[1, 2]\n", ":1: expected an object with columns, found an array"),
    "latin.jsonl": (f"{GOOD}\n".encode() + '{"output": "é"}\n'.encode("latin-1"), ":2: not UTF-8 text"),
    "utf16.jsonl": (f"{GOOD}\n".encode("utf-16"), ":1: not UTF-8 text"),
    "packed.jsonl": (gzip.compress(GOOD.encode()), ":1: not UTF-8 text"),
    "deep.jsonl": (f"{GOOD}\n{DEEP}\n".encode(), ":2: nested too deeply"),
    "number.jsonl": (f'{GOOD}\n{{"output": {"9" * 5000}}}\n'.encode(), ":2: a number that cannot be read"),
    "two_names.jsonl": (b'{"output": "a", "output": "b"}\n', ":1: 'output' occurs twice in an object"),
    "two_objects.jsonl": (f"{GOOD}\n{GOOD}{GOOD}\n".encode(), ":2: Extra data"),
    "cut_first.jsonl": (f"{GOOD[:20]}\n{GOOD}\n".encode(), ":1: Unterminated string"),
    "no_text.jsonl": (f'{GOOD}\n{{"instruction": "a", "output": 7}}\n'.encode(), ":2: output is not text but int"),
    "null.jsonl": (f'{GOOD}\n{{"instruction": null, "output": "b"}}\n'.encode(), ":2: empty instruction"),
    "blank.jsonl": (b"\n\n", ": the dataset is empty"),
    "columns.jsonl": (b'{"ask": "a", "tell": "b"}\n', ": missing columns. It has: ask, tell"),
    # JSON
    "comma.json": (f"[{GOOD},\n {GOOD}\n {GOOD}]".encode(), ":3: Expecting ',' delimiter (column 2)"),
    "cut.json": (f"[{GOOD},\n {GOOD}".encode(), ":2: Expecting ',' delimiter"),
    "line.json": (f"{GOOD}\n\n{{'instruction': 1}}\n".encode(), ":3: Expecting property name"),
    "objects.json": (json.dumps(ROWS[0], indent=1).encode() + b'\n{\n"output": b}', ":7: Expecting value (column 11)"),
    "number.json": (b"7", " row 1: expected an object with columns, found a number"),
    "element.json": (f"[{GOOD}, 7]".encode(), " row 2: expected an object with columns, found a number"),
    "deep.json": (DEEP.encode(), ": nested too deeply"),
    "latin.json": ('[{"output": "é"}]'.encode("latin-1"), ": not UTF-8 text"),
    "blank.json": (b"", ": the dataset is empty"),
    "array.json": (b"[]", ": the dataset is empty"),
    # CSV
    "short.csv": (b"instruction,output\na,b\nc\n", ":3: 1 values, but the header has 2"),
    "after_lines.csv": (b'instruction,output\n"a\nb",c\nd\n', ":4: 1 values, but the header has 2"),
    "quote.csv": (b'instruction,output\na,"b\n', ": unexpected end of data"),
    "twice.csv": (b"output,output\na,b\n", ":1: a column name occurs twice"),
    "latin.csv": ("instruction,output\na,é\n".encode("latin-1"), ":2: not UTF-8 text"),
    "header.csv": (b"instruction,output\n", ": the dataset is empty"),
    # Others
    "cut.parquet": (PARQUET[:-100], ": not a parquet file"),
    "encrypted.parquet": (PARQUET[:-4] + b"PARE", ": not a parquet file"),
    "page.parquet": (PARQUET[:5000] + b"\xff" * 200 + PARQUET[5200:], ": not a parquet file"),
    "not_utf8.parquet": (make_parquet(output=not_utf8()), " row 401: not a parquet file"),
    "kind.docx": (b"text", "is not of a known kind"),
    "cut.jsonl.gz": (gzip.compress(GOOD.encode() * 99)[:-9], ": the packed file is damaged or cut off"),
    "plain.csv.gz": (b"instruction,output\n", ": the packed file is damaged or cut off"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_refused_with_its_place(name: str, prepare: Any, tmp_path: Path) -> None:
    content, message = MALFORMED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert message in str(error.value)


def test_parquet_columns_that_are_not_used_or_hold_no_text_are_not_read(prepare: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    times = pyarrow.array([2**62] * 500, pyarrow.timestamp("us"))  # more than Python's datetime holds
    path.write_bytes(make_parquet(note=not_utf8(), Input=["blue"] * 500, wish=["say"] * 500, time=times))
    tokenized, report = prepare(path)
    assert len(tokenized) == 500 and report.unused_columns == ["note", "wish", "time"]
    tokenized, report = prepare(path, columns=("instruction=wish",))
    assert len(tokenized) == 500 and report.unused_columns == ["instruction", "note", "time"]
    with pytest.raises(UserError, match=r"rows.parquet row 401: .*'note'"):
        prepare(path, columns=("output=note",))
    path.write_bytes(make_parquet(blob=[b"text"] * 500))
    with pytest.raises(UserError, match="bytes"):
        prepare(path, columns=("output=blob",))


def bomb(name: str, kib: int) -> bytes:
    """A small file that unpacks to one long row."""
    head, _, tail = BOMBS[name].partition("@")
    text = head + "a" * (kib << 10) + tail
    if not name.endswith(".parquet"):
        return gzip.compress(text.encode())
    stream = io.BytesIO()
    table = pyarrow.Table.from_pylist([{"instruction": "a", "output": "b"}, {"instruction": "a", "output": text}])
    pyarrow.parquet.write_table(table, stream, compression=name.partition(".")[0])
    return stream.getvalue()


BOMBS = {
    "line.jsonl.gz": '{"instruction": "a", "output": "@"}',
    "text.txt.gz": "@",
    "field.csv.gz": 'instruction,output\na,"@"\n',
    "lines.csv.gz": 'instruction,output\na,"\n@\nb"\n',
    "array.json.gz": '[{"instruction": "a", "output": "@"}]',
    "zstd.parquet": "@",
    "none.parquet": "@",  # as large as what is in it
}


@contextlib.contextmanager
def counting_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that tells the most bytes that Python and pyarrow had allocated at once."""
    usual = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(usual)
    pyarrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(usual)


@pytest.mark.parametrize("name", BOMBS)
def test_a_row_that_is_too_long_is_refused_before_it_is_in_memory(
    name: str, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(bomb(name, 32 << 10))
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "1")
    with counting_memory() as most:
        with pytest.raises(UserError, match=rf"{name}.*longer than 1 MiB.*FSDP_QLORA_MAX_ROW_MIB"):
            prepare(tmp_path / name)
        assert most() < 16 << 20 or name == "none.parquet"
    (tmp_path / name).write_bytes(bomb(name, 40))
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "0.01")
    with pytest.raises(UserError, match="longer than"):
        prepare(tmp_path / name)
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "0.1")
    assert prepare(tmp_path / name)[1].num_used > 0


def test_a_table_that_repeats_one_long_text_is_read_a_few_rows_at_a_time(
    tmp_path: Path,
) -> None:
    table = pyarrow.table({"text": pyarrow.array(["a" * (1 << 20)]).dictionary_encode().take([0] * 300)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", store_schema=False)
    assert (tmp_path / "rows.parquet").stat().st_size < 1 << 20
    with counting_memory() as most:
        assert sum(1 for _ in read_file(tmp_path / "rows.parquet", FILE_KINDS[".parquet"])) == 300
        assert most() < 64 << 20


def test_a_row_of_a_saved_dataset_that_is_too_long_is_refused(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.Dataset.from_list([*ROWS, {**ROWS[0], "output": "a" * 20_000}]).save_to_disk(str(tmp_path / "saved"))
    assert prepare(tmp_path / "saved")[1].num_used == len(ROWS) + 1
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "0.01")
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "other_cache"))
    with pytest.raises(UserError, match=rf"saved row {len(ROWS) + 1}: longer than"):
        prepare(tmp_path / "saved")


def test_a_file_changed_while_it_is_read_leaves_no_rows_in_the_cache(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    tokenize = tokenization.tokenize_batch

    def change(*arguments: Any) -> Any:
        write_jsonl(path, ROWS[::-1])
        return tokenize(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tokenization, "tokenize_batch", change)
        with pytest.raises(UserError, match=r"rows.jsonl was changed while it was read. Start again"):
            prepare(path)
    assert not list((tmp_path / "cache" / "tokenized").glob("*.safetensors"))
    write_jsonl(path, ROWS)
    assert len(prepare(path)[0]) == 3


@pytest.mark.parametrize("name", ["absent.jsonl", "no/such/folder", "folder/", "./owner/dataset", "folder/rows.txt"])
def test_missing_file_is_not_taken_for_a_hub_name(name: str) -> None:
    with pytest.raises(UserError, match=r"no such file or folder: .*alpaca_demo.*\.parquet"):
        sources.find_source(name)


def test_files_without_rows_are_refused_before_reading(prepare: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "named").mkdir()
    write_jsonl(tmp_path / "named" / "a\udcff.jsonl", ROWS)  # the byte 0xff
    for dataset, options, message in (
        (tmp_path / "rows.jsonl", {}, "not a regular file"),
        (tmp_path / "empty", {}, "has no file of a known kind"),
        (tmp_path / "named", {}, r"a\\udcff.jsonl' is not UTF-8 text. Rename the file"),
        ("alpaca_dmeo", {}, r"unknown name 'alpaca_dmeo'. Did you mean 'alpaca_demo'\?"),
        ("alpaca_demo", {"dataset_format": "alpacca"}, r"unknown format 'alpacca'. Formats: auto, alpaca"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(dataset, **options)


def test_targets_are_counted_without_a_wide_copy_of_the_dataset() -> None:
    rows, tokens = 30_000, 100
    learned = np.arange(rows * tokens) % 3 == 1
    offsets = np.arange(rows + 1, dtype=np.int64) * tokens
    tokenized = TokenizedRows(np.zeros(rows * tokens, np.int32), learned, offsets, np.arange(rows))
    tracemalloc.start()
    found = tokenized.num_targets
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found, learned.reshape(rows, tokens)[:, 1:].sum(axis=1))
    assert peak < 2 * learned.nbytes, f"{peak:,} bytes"


def test_unreachable_hub_fails_at_once_and_names_what_works_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("would retry for long"))
    with pytest.raises(UserError, match=r"yahma/alpaca-cleaned: .*Name or service .*alpaca_demo.*local"):
        sources.find_source("alpaca")
    with pytest.raises(UserError, match=r"owner/data-v1.5: there is no such file .*Name or service"):
        sources.find_source("owner/data-v1.5")


def test_alpaca_sample_is_the_first_128_rows_of_the_hub_dataset(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    table = datasets.Dataset.from_list([{**ROWS[1], "output": f"Row {i}."} for i in range(200)])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: table)
    assert len(prepare("alpaca")[0]) == 200
    assert prepare("alpaca_demo", context_length=4096)[1].rejected == {}
    assert prepare("alpaca_sample")[0].row_numbers.tolist() == list(range(1, 129))
    assert len(prepare("alpaca_sample", dataset_samples=5)[0]) == 5


# ---- tokens and masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_input", [{}, {"input": None}, {"input": ""}, {"input": " \n"}])
def test_prompt_is_the_published_alpaca_template(no_input: dict[str, Any]) -> None:
    segments = render_alpaca({"instruction": "Add {x}.", "input": "1, 2", "output": "3"})
    assert segments[0].text == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {x}.\n\n### Input:\n1, 2\n\n### Response:"
    )
    segments = render_alpaca({"instruction": "Go.", "output": "Ok", **no_input})
    assert segments[0].text == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nGo.\n\n### Response:"
    )


@pytest.mark.parametrize("ends_with_eos", [False, True])
def test_response_and_end_of_sequence_are_learned_and_nothing_else(
    ends_with_eos: bool, prepare: Any, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(ends_with_eos=ends_with_eos)
    tokenized, report = prepare(write_jsonl(tmp_path / "rows.jsonl", ROWS), tokenizer=tokenizer)
    for i, row in enumerate(ROWS):
        prompt, response = (segment.text for segment in render_alpaca(row))
        part = slice(*tokenized.offsets[i : i + 2])
        ids, learned = tokenized.input_ids[part], tokenized.learned[part]
        assert tokenizer.decode(ids[~learned]) == "<s>" + prompt
        assert tokenizer.decode(ids[learned]) == response + "</s>"
        assert ids.tolist().count(tokenizer.eos_token_id) == 1
        assert learned.tolist() == sorted(learned.tolist())  # masked first, then learned
        assert (tokenized.lengths[i], tokenized.num_targets[i]) == (len(ids), learned.sum())
    assert (report.num_tokens, report.num_targets) == (len(tokenized.input_ids), tokenized.learned.sum())


def test_a_format_with_three_segments_needs_one_table_row(
    prepare: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(row: Any) -> list[Segment]:
        return [Segment(row["a1"], True), Segment(row["q2"], False), Segment(row["a2"], row["learn_last"])]

    monkeypatch.setitem(FORMATS, "turns", Format(("a1", "q2", "a2"), ("learn_last",), render))
    rows = [
        {"a1": "Blue.", "q2": " Twice?", "a2": " Blue, blue.", "learn_last": True},
        {"a1": "Add.", "q2": " Why?", "a2": " No.", "learn_last": False},
        {"a1": "", "q2": "Name a colour.", "a2": "", "learn_last": True},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def shown(tokenized: TokenizedRows, row: int) -> list[str]:
        return re.sub(r" \(\d+ tokens\) ---\n", "", describe_sample(tokenized, row, tokenizer)).split("\n--- ")[1:]

    tokenized, report = prepare(path, max_bad_rows=0.5)
    assert (report.dataset_format, report.rejected) == ("turns", {"nothing to learn": [3]})
    assert shown(tokenized, 0) == ["learned<s>Blue.", "masked Twice?", "learned Blue, blue.</s>"]
    assert shown(tokenized, 1) == ["learned<s>Add.", "masked Why? No.</s>"]
    last, _ = prepare(path, max_bad_rows=0.5, learn="last")
    assert shown(last, 0) == ["masked<s>Blue. Twice?", "learned Blue, blue.</s>"]
    assert shown(prepare(path, max_bad_rows=0.5, learn="all")[0], 1) == ["learned<s>Add. Why? No.</s>"]


def test_truncation_is_counted_and_rows_without_room_are_rejected(
    prepare: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    long_response = {**ROWS[1], "output": "Blue, " * 200}
    long_prompt = {**ROWS[0], "input": "2 and 3 " * 50}
    path = write_jsonl(tmp_path / "rows.jsonl", [long_prompt, long_response, ROWS[2]])
    full, full_report = prepare(path, context_length=4096)
    assert full_report.num_truncated == 0
    lengths, prompts = full.lengths.tolist(), (full.lengths - full.num_targets).tolist()
    context_length = prompts[0]  # the first prompt alone fills it
    assert lengths[2] < context_length < lengths[1]
    tokenized, report = prepare(path, context_length=context_length, max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [2, 3]
    assert tokenized.lengths.tolist() == [context_length, lengths[2]]
    assert tokenized.num_targets.tolist() == [context_length - prompts[1], lengths[2] - prompts[2]]
    assert tokenizer.eos_token_id not in tokenized.input_ids[:context_length]  # not taught to stop at the cut
    assert report.rejected == {"no room for a response within context_length": [1]}
    assert (report.num_truncated, report.num_tokens_cut) == (1, lengths[1] - context_length)
    assert prepare(path, context_length=context_length + 1)[0].num_targets[0] == 1
    with pytest.raises(UserError, match=r"1 of 1 rows cannot be used.*\n.*rows.jsonl:1: no room for a response"):
        prepare(path, context_length=5, dataset_samples=1, max_bad_rows=1.0)


def test_unusable_rows_are_listed_and_too_many_are_refused(
    prepare: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [{"output": ""}, {"output": " \n"}, {"output": 7}, {"instruction": None}, {"input": ["x"]}]
    rows = [{**ROWS[1], **change} for change in [*bad, {"output": "\ud800"}]]
    rows.append({"instruction": "No output at all."})
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, *ROWS * 31])
    with path.open("a") as file:
        file.write("{broken}\n" + json.dumps(ROWS[0]) + "\n")
    rejected = {
        "empty output": [1, 2, 7],
        "output is not text but int": [3],
        "empty instruction": [4],
        "input is not text but list": [5],
        "output has half a surrogate pair": [6],
        "Expecting property name enclosed in double quotes (column 2); each line must be one JSON object": [101],
    }
    with caplog.at_level(logging.WARNING, "fsdp_qlora"):
        tokenized, report = prepare(path, max_bad_rows=0.08)
    assert report.rejected == rejected
    assert (len(tokenized), report.num_used, report.num_rows) == (94, 94, 102)
    assert f"{path}:1, 2, 7: empty output (3 rows)" in caplog.text
    # Now from the cache, whose file does not make the limit void.
    for options, limit in (({"max_bad_rows": 0.07}, "allowed are 7.0%"), ({"max_bad_rows": 0.0}, "allowed are 0.0%")):
        with pytest.raises(
            UserError, match=rf"8 of 102 rows cannot be used, .*{limit}(.|\n)*rows.jsonl:1, 2, 7: empty output .3 rows"
        ):
            prepare(path, **options)


def test_dummy_rows_fill_the_context_and_are_all_learned(prepare: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenized, report = prepare("dummy", context_length=16, seed=3)
    assert set(tokenized.lengths) == {16}
    assert set(tokenized.num_targets) == {15}  # the first token of a row has nothing to be predicted from
    assert (len(tokenized), report.num_targets) == (512, 512 * 15)
    check_vocabulary(tokenized, len(tokenizer))
    assert (prepare("dummy", context_length=16, seed=3)[0].input_ids == tokenized.input_ids).all()
    assert len(prepare("dummy", context_length=16, dataset_samples=9)[0]) == 9


def test_token_outside_the_vocabulary_is_reported_with_its_row(prepare: Any, tmp_path: Path) -> None:
    tokenized, _ = prepare(write_jsonl(tmp_path / "rows.jsonl", [{}, *ROWS]), max_bad_rows=0.5)
    largest = int(tokenized.input_ids.max())
    number = 2 + next(i for i in range(3) if largest in tokenized.input_ids[slice(*tokenized.offsets[i : i + 2])])
    check_vocabulary(tokenized, largest + 1)
    with pytest.raises(UserError, match=f"Row {number} has the token id {largest}, .* {largest} embeddings"):
        check_vocabulary(tokenized, largest)


# ---- the cache ------------------------------------------------------------------------------------------


def test_cached_rows_are_memory_mapped_without_tokenizing_again(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_cache_key_covers_all_that_decides_the_tokens(prepare: Any, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("damage", ["cut", "half", "head", "empty", "noise", "foreign", "mixed", "bit"])
def test_a_damaged_cache_file_is_made_again(damage: str, prepare: Any, tmp_path: Path, lines: list[str]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 50)  # of many pages of memory
    expected = prepare(path)[0].input_ids.tolist()
    [file] = (tmp_path / "cache" / "tokenized").glob("*.safetensors")
    data, arrays = file.read_bytes(), load_file(file)
    file.unlink()  # the first call's rows are still mapped
    if damage == "foreign":
        save_file({"input_ids": np.zeros(3, dtype=np.int32)}, file)
    elif damage == "mixed":
        save_file({**arrays, "input_ids": arrays["input_ids"][:-1]}, file, {"digest": "0", "report": "{}"})
    else:
        bit = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        cuts = {"cut": data[:-7], "half": data[: len(data) // 2], "head": data[:300]}
        file.write_bytes({**cuts, "empty": b"", "noise": b"\xff" * len(data), "bit": bit}[damage])
    assert prepare(path)[0].input_ids.tolist() == expected
    assert any("damaged" in line for line in lines)
    assert all(np.array_equal(array, load_file(file)[name]) for name, array in arrays.items())


def test_only_one_rank_tokenizes(prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_killed_cache_writer_does_not_block_the_next_run(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        victim = multiprocessing.get_context("fork").Process(target=prepare, args=(path,))
        victim.start()
        victim.join(timeout=30)
    assert victim.exitcode == -signal.SIGKILL
    assert len(prepare(path)[0]) == len(ROWS)


def test_read_only_token_cache_is_used(
    prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    expected = prepare("alpaca_demo", context_length=4096)[0].digest
    monkeypatch.setattr(cache.FileLock, "acquire", refuse)
    caplog.clear()
    assert prepare("alpaca_demo", context_length=4096)[0].digest == expected
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "file" / "cache"))
    assert prepare("alpaca_demo", context_length=4096)[0].digest == expected
    assert "file/cache/tokenized cannot be written" in caplog.text and "FSDP_QLORA_CACHE" in caplog.text


# ---- order and batches ----------------------------------------------------------------------------------


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    order = epoch_order(np.arange(100), seed=1, epoch=2)
    assert sorted(order.tolist()) == list(range(100))
    assert (epoch_order(np.arange(100), seed=1, epoch=2) == order).all()
    assert (epoch_order(np.arange(100), seed=1, epoch=3) != order).any()
    assert (epoch_order(np.arange(100), seed=2, epoch=2) != order).any()
    # Fixed for good: a run that resumes after an upgrade continues in the same order.
    assert epoch_order(np.arange(8), seed=42, epoch=0).tolist() == [0, 1, 4, 2, 6, 5, 7, 3]
    subset = np.array([3, 30, 5])
    assert sorted(epoch_order(subset, seed=0, epoch=0).tolist()) == [3, 5, 30]


@pytest.mark.parametrize("split", [split_by_length, split_by_tokens])
@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_an_epoch_holds_every_row_once_and_ranks_keep_in_step(
    split: Callable[..., list[np.ndarray]], data_size: int, batch_size: int, accumulation: int
) -> None:
    global_batch_size = data_size * batch_size * accumulation
    for num_rows in range(1, 41):
        lengths = np.random.default_rng(num_rows).integers(2, 50, size=num_rows + 7)
        rows = np.arange(7, num_rows + 7)  # a subset: rows 0 to 6 are held out
        order = epoch_order(rows, seed=0, epoch=num_rows)
        seen: list[int] = []
        num_steps = -(-num_rows // global_batch_size)
        for step in range(num_steps):
            step_rows = order[step * global_batch_size : (step + 1) * global_batch_size]
            rounds = split(step_rows, lengths, data_size=data_size, batch_size=batch_size)
            assert all(len(each) == data_size for each in rounds)
            if step < num_steps - 1:
                assert len(rounds) == accumulation
            pieces = list(itertools.chain(*rounds))
            sizes = [len(piece) for piece in pieces]
            assert max(sizes) <= batch_size
            assert split is split_by_tokens or max(sizes) - min(sizes) <= 1
            seen += [int(row) for piece in pieces for row in piece]
        assert sorted(seen) == rows.tolist()


def test_ranks_get_equal_work_in_each_micro_batch() -> None:
    lengths = np.array([10, 80, 30, 70, 20, 60, 40, 50])
    rounds = split_by_length(np.arange(8), lengths, data_size=2, batch_size=2)
    assert [[lengths[rows].tolist() for rows in each] for each in rounds] == [
        [[80, 70], [60, 50]],
        [[40, 30], [20, 10]],
    ]
    rounds = split_by_tokens(np.arange(8), lengths, data_size=2, batch_size=2)
    assert [[lengths[rows].tolist() for rows in each] for each in rounds] == [
        [[80, 10], [70, 20]],
        [[60, 30], [50, 40]],
    ]
    schedule = Schedule(8, 2, 8, 2, num_epochs=1, max_steps=-1, seed=0)
    assert schedule.useful_shares(rounds, lengths) == (1.0, 1.0)
    padded = dataclasses.replace(schedule, batching="padded")
    # Of 2 x (80 + 60 + 40 + 20) tokens, and of twice 2 x (80 + 40) in the time of the first rank.
    assert padded.useful_shares(padded.rounds(np.arange(8), lengths), lengths) == (360 / 400, 360 / 480)


@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_packing_uses_the_fewest_micro_batches(data_size: int, batch_size: int) -> None:
    context_length, room = 64, batch_size * 64
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(2, context_length + 1, size=48)
        sizes = {"data_size": data_size, "batch_size": batch_size}
        rounds = split_by_tokens(np.arange(48), lengths, **sizes, most_tokens=room)
        pieces = list(itertools.chain(*rounds))
        assert sorted(row for piece in pieces for row in piece.tolist()) == list(range(48))
        tokens = [int(lengths[piece].sum()) for piece in pieces]
        assert max(tokens) <= room and tokens == sorted(tokens, reverse=True)
        needed = -(-int(lengths.sum()) // (data_size * room))
        # What is left free in a micro-batch is less than the longest row (at most half of it for batch_size 1).
        assert needed <= len(rounds) <= max(needed + 1, -(-2 * needed * batch_size // (2 * batch_size - 1)) + 1)
        assert len(rounds) <= -(-48 // (data_size * batch_size))


def test_longest_micro_batch_is_the_one_with_most_computed_tokens() -> None:
    schedule, lengths = Schedule(3, 1, 1, 1, num_epochs=1, max_steps=-1, seed=0), np.array([4096, 3900, 100])
    for computed, longest in ((lengths, 0), (lengths - [1900, 20, 0], 1)):  # pairs that share a prompt
        assert schedule.longest_micro_batch(np.arange(3), lengths, computed) == ([longest], 1)


def test_schedule_resumed_mid_epoch_has_the_same_remaining_rows() -> None:
    for num_rows, batch_size in ((23, 1), (24, 2), (5, 3)):
        schedule = Schedule(num_rows, batch_size, 4 * batch_size, 2, num_epochs=3, max_steps=-1, seed=7)
        rows = np.arange(num_rows) * 10
        whole = [(step, part.tolist()) for step, part in schedule.rows_of_steps(rows)]
        for first in range(schedule.total_steps + 1):
            parts = schedule.rows_of_steps(rows, first=first)
            assert [(step, part.tolist()) for step, part in parts] == whole[first:]
        # On other ranks the steps keep their rows.
        other = dataclasses.replace(schedule, data_size=3)
        assert [(step, part.tolist()) for step, part in other.rows_of_steps(rows)] == whole


@pytest.mark.parametrize(("fraction", "num_eval"), [(0.0, 0), (0.001, 1), (0.1, 10), (0.5, 50)])
def test_held_out_rows_are_fixed_by_the_seed_and_never_trained_on(fraction: float, num_eval: int) -> None:
    train, held_out = split_eval(100, fraction=fraction, seed=1)
    assert len(held_out) == num_eval
    assert sorted([*train, *held_out]) == list(range(100))
    again = split_eval(100, fraction=fraction, seed=1)
    assert np.array_equal(again[0], train) and np.array_equal(again[1], held_out)
    if num_eval:
        assert not np.array_equal(split_eval(100, fraction=fraction, seed=2)[1], held_out)
        with pytest.raises(UserError, match="eval_fraction"):
            split_eval(1, fraction=fraction, seed=0)


def test_batch_is_padded_on_the_right_and_labels_only_what_is_learned() -> None:
    tokenized = TokenizedRows(
        input_ids=np.array([5, 6, 7, 8, 9, 5, 4], dtype=np.int32),
        learned=np.array([False, False, True, True, True, True, True]),
        offsets=np.array([0, 5, 7]),
        row_numbers=np.array([1, 2]),
    )
    batch = pad_rows(tokenized, np.array([1, 0]), pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 4, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.targets.tolist() == [4, 7, 8, 9]
    assert batch.target_rows.tolist() == [0, 5 + 1, 5 + 2, 5 + 3]  # each is predicted from the token before it
    assert len(batch.targets) == tokenized.num_targets.sum() == 4
    nothing = pad_rows(tokenized, np.zeros(0, dtype=np.int64), pad_token_id=3)
    assert nothing.input_ids.tolist() == [[3, 3]]
    assert nothing.targets.tolist() == [-100]
