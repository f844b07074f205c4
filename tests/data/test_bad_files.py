"""Malformed, oversized, changing and missing files are refused with their place."""

import gzip
import io
import json
import os
import tracemalloc
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.files import FILE_KINDS
from fsdp_qlora.data.sources.reading import Reading
from fsdp_qlora.data.sources.tables import read_parquet
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import ROWS, counting_memory, write_jsonl

pytestmark = pytest.mark.quick


def make_parquet(rows: int = 500, **more: object) -> bytes:
    """A file of 500 rows whose columns may be replaced or added to."""
    columns = {
        "instruction": [f"Say {n}." for n in range(rows)],
        "output": [f"{n}" * 4 for n in range(rows)],
    }
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
    "cut_late.jsonl": (
        (GOOD + "\n").encode() * 300 + GOOD[:-9].encode(),
        ":301: Unterminated string",
    ),
    "list.jsonl": (b"[1, 2]\n", ":1: expected an object with columns, found an array"),
    "latin.jsonl": (
        f"{GOOD}\n".encode() + '{"output": "é"}\n'.encode("latin-1"),
        ":2: not UTF-8 text",
    ),
    "utf16.jsonl": (f"{GOOD}\n".encode("utf-16"), ":1: not UTF-8 text"),
    "packed.jsonl": (gzip.compress(GOOD.encode()), ":1: not UTF-8 text"),
    "deep.jsonl": (f"{GOOD}\n{DEEP}\n".encode(), ":2: nested too deeply"),
    "number.jsonl": (
        f'{GOOD}\n{{"output": {"9" * 5000}}}\n'.encode(),
        ":2: a number that cannot be read",
    ),
    "two_names.jsonl": (
        b'{"output": "a", "output": "b"}\n',
        ":1: 'output' occurs twice in an object",
    ),
    "two_objects.jsonl": (f"{GOOD}\n{GOOD}{GOOD}\n".encode(), ":2: Extra data"),
    "cut_first.jsonl": (f"{GOOD[:20]}\n{GOOD}\n".encode(), ":1: Unterminated string"),
    "no_text.jsonl": (
        f'{GOOD}\n{{"instruction": "a", "output": 7}}\n'.encode(),
        ":2: output is not text but int",
    ),
    "null.jsonl": (
        f'{GOOD}\n{{"instruction": null, "output": "b"}}\n'.encode(),
        ":2: empty instruction",
    ),
    "blank.jsonl": (b"\n\n", ": the dataset is empty"),
    "columns.jsonl": (b'{"ask": "a", "tell": "b"}\n', ": missing columns. It has: ask, tell"),
    # JSON
    "comma.json": (
        f"[{GOOD},\n {GOOD}\n {GOOD}]".encode(),
        ":3: Expecting ',' delimiter (column 2)",
    ),
    "cut.json": (f"[{GOOD},\n {GOOD}".encode(), ":2: Expecting ',' delimiter"),
    "line.json": (f"{GOOD}\n\n{{'instruction': 1}}\n".encode(), ":3: Expecting property name"),
    "objects.json": (
        json.dumps(ROWS[0], indent=1).encode() + b'\n{\n"output": b}',
        ":7: Expecting value (column 11)",
    ),
    "number.json": (b"7", " row 1: expected an object with columns, found a number"),
    "element.json": (
        f"[{GOOD}, 7]".encode(),
        " row 2: expected an object with columns, found a number",
    ),
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
    "cut.jsonl.gz": (
        gzip.compress(GOOD.encode() * 99)[:-9],
        ": the packed file is damaged or cut off",
    ),
    "plain.csv.gz": (b"instruction,output\n", ": the packed file is damaged or cut off"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_refused_with_its_place(name, prepare, tmp_path):
    content, message = MALFORMED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert message in str(error.value)


def test_parquet_columns_that_are_not_used_or_hold_no_text_are_not_read(prepare, tmp_path):
    path = tmp_path / "rows.parquet"
    # more than Python's datetime holds
    times = pyarrow.array([2**62] * 500, pyarrow.timestamp("us"))
    path.write_bytes(
        make_parquet(note=not_utf8(), Input=["blue"] * 500, wish=["say"] * 500, time=times)
    )
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
    table = pyarrow.Table.from_pylist(
        [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": text}]
    )
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


@pytest.mark.parametrize("name", BOMBS)
def test_a_row_that_is_too_long_is_refused_before_it_is_in_memory(
    name, prepare, tmp_path, monkeypatch
):
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


def test_a_block_that_begins_within_a_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_bytes(b"a" * (32 << 20))
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "1")
    read_ranges = FILE_KINDS[".txt"].read_ranges
    assert read_ranges is not None
    with counting_memory() as most:
        with pytest.raises(UserError, match=r"long.txt at byte 5.*longer than 1 MiB"):
            next(read_ranges(tmp_path / "long.txt", tuple, [(5.0, 9.0)]))
        assert most() < 16 << 20


def test_a_table_that_repeats_one_long_text_is_read_a_few_rows_at_a_time(tmp_path):
    table = pyarrow.table(
        {"text": pyarrow.array(["a" * (1 << 20)]).dictionary_encode().take([0] * 300)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", store_schema=False)
    assert (tmp_path / "rows.parquet").stat().st_size < 1 << 20
    with counting_memory() as most:
        assert sum(1 for _ in read_parquet(tmp_path / "rows.parquet", Reading())) == 301
        assert most() < 64 << 20


def test_a_row_of_a_saved_dataset_that_is_too_long_is_refused(prepare, tmp_path, monkeypatch):
    datasets.Dataset.from_list([*ROWS, {**ROWS[0], "output": "a" * 20_000}]).save_to_disk(
        str(tmp_path / "saved")
    )
    assert prepare(tmp_path / "saved")[1].num_used == len(ROWS) + 1
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "0.01")
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "other_cache"))
    with pytest.raises(UserError, match=rf"saved row {len(ROWS) + 1}: longer than"):
        prepare(tmp_path / "saved")


def test_a_file_changed_while_it_is_read_leaves_no_rows_in_the_cache(
    prepare, tmp_path, monkeypatch
):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    tokenize = tokenization.tokenize_batch

    def change(*arguments: Any) -> Any:
        write_jsonl(path, ROWS[::-1])
        return tokenize(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tokenization, "tokenize_batch", change)
        with pytest.raises(
            UserError,
            match=r"rows.jsonl was changed while it was read. Start again",
        ):
            prepare(path)
    assert not list((tmp_path / "cache" / "tokenized").glob("*.safetensors"))
    write_jsonl(path, ROWS)
    assert len(prepare(path)[0]) == 3


@pytest.mark.parametrize(
    "name", ["absent.jsonl", "no/such/folder", "folder/", "./owner/dataset", "folder/rows.txt"]
)
def test_missing_file_is_not_taken_for_a_hub_name(name):
    with pytest.raises(UserError, match=r"no such file or folder: .*alpaca_demo.*\.parquet"):
        sources.find_source(name)


def test_files_without_rows_are_refused_before_reading(prepare, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "named").mkdir()
    write_jsonl(tmp_path / "named" / "a\udcff.jsonl", ROWS)  # the byte 0xff
    for dataset, options, message in (
        (tmp_path / "rows.jsonl", {}, "not a regular file"),
        (tmp_path / "empty", {}, "has no file of a known kind"),
        (tmp_path / "named", {}, r"a\\udcff.jsonl' is not UTF-8 text. Rename the file"),
        ("alpaca_dmeo", {}, r"unknown name 'alpaca_dmeo'. Did you mean 'alpaca_demo'\?"),
        (
            "alpaca_demo",
            {"dataset_format": "alpacca"},
            r"unknown format 'alpacca'. Formats: auto, alpaca",
        ),
    ):
        with pytest.raises(UserError, match=message):
            prepare(dataset, **options)


def test_targets_are_counted_without_a_wide_copy_of_the_dataset():
    rows = 30_000
    tokens = 100
    learned = np.arange(rows * tokens) % 3 == 1
    offsets = np.arange(rows + 1, dtype=np.int64) * tokens
    tokenized = TokenizedRows(np.zeros(rows * tokens, np.int32), learned, offsets, np.arange(rows))
    tracemalloc.start()
    found = tokenized.num_targets
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found, learned.reshape(rows, tokens)[:, 1:].sum(axis=1))
    assert peak < 2 * learned.nbytes, f"{peak:,} bytes"


def test_unreachable_hub_fails_at_once_and_names_what_works_offline(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *_, **__: pytest.fail("would retry for long")
    )
    with pytest.raises(
        UserError,
        match=r"yahma/alpaca-cleaned: .*Name or service .*alpaca_demo.*local",
    ):
        sources.find_source("alpaca")
    with pytest.raises(
        UserError,
        match=r"owner/data-v1.5: there is no such file .*Name or service",
    ):
        sources.find_source("owner/data-v1.5")


def test_alpaca_sample_is_the_first_128_rows_of_the_hub_dataset(prepare, monkeypatch):
    import datasets

    table = datasets.Dataset.from_list([{**ROWS[1], "output": f"Row {i}."} for i in range(200)])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: table)
    assert len(prepare("alpaca")[0]) == 200
    assert prepare("alpaca_demo", context_length=4096)[1].rejected == {}
    assert prepare("alpaca_sample")[0].row_numbers.tolist() == list(range(1, 129))
    assert len(prepare("alpaca_sample", dataset_samples=5)[0]) == 5
