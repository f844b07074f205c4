"""Files of every kind give the same rows, in order."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from fsdp_qlora.data.sources import source as sources
from fsdp_qlora.data.sources.files import FILE_KINDS, look_into
from fsdp_qlora.data.sources.json_text import unique
from tests.data.rows import (
    ROWS,
    WRITERS,
    counting_memory,
    rows_of,
    write_csv,
    write_json,
    write_jsonl,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(suffix, tmp_path):
    rows = [*ROWS, {"instruction": 'Quote "this",\nplease.', "input": "", "output": "x" * 200_000}]
    path = WRITERS[suffix](tmp_path / f"rows{suffix}", rows)
    assert (rows_of(path), rows_of(path, 2), list(rows_of(path)[0])) == (
        rows,
        rows[:2],
        list(rows[0]),
    )


def lines_of(rows: list[dict[str, Any]], between: str = "\n", **how: Any) -> str:
    return between.join(json.dumps(row, **how) for row in rows)


CONTENTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "an array": json.dumps,
    "an array over several lines": partial(json.dumps, indent=1),
    "an array with an object a line": lambda rows: f"[\n{lines_of(rows, ',' + chr(10))}\n]",
    "an object a line": partial(lines_of, ensure_ascii=False),
    "an object a line behind a mark and blank lines": lambda rows: (
        "\ufeff" + lines_of(rows, "\r\n \r\n")
    ),
    "objects on one line": partial(lines_of, between=""),
    "objects over several lines": partial(lines_of, indent=1),
    "objects over several lines with commas": partial(lines_of, between=",\n", indent=1),
    "objects with commas": partial(lines_of, between=",\n"),
    "an object with the rows": lambda rows: json.dumps({"version": [1], "rows": rows}),
    "an object with the rows over several lines": lambda rows: json.dumps(
        {"rows": rows, "version": 1}, indent=1
    ),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_json_kind_is_detected_from_content_not_from_the_name(content, tmp_path):
    text = CONTENTS[content](ROWS).encode()
    for name in ("a.json", "a.jsonl", "a.JSON.gz"):
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        assert rows_of(tmp_path / name) == ROWS


def test_text_file_is_read_as_json_lines_if_its_first_line_is_json(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(lines_of(ROWS))
    assert rows_of(path) == ROWS
    for text in ("{} begins\n", '{"a": 1} goes on\n', json.dumps(ROWS), "{\n}", "{}\n"):
        path.write_text(text)
        assert rows_of(path) == [{"text": line} for line in text.splitlines()]


CALLED = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1, "n": None, "l": [{"x": None}]}}}
        ],
    },
]
TOOLS = [{"name": "f", "parameters": {"a": {"type": "string", "default": None}}}]
NAMES = {"role": "user", "content": "hi", "name": None}


def json_columns(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    kinds = datasets.Features(
        {"messages": datasets.List(datasets.Json()), "tools": datasets.Json()}
    )
    rows = [{"messages": CALLED, "tools": TOOLS}, {"messages": CALLED[:1], "tools": None}]
    table = datasets.Dataset.from_list(rows, features=kinds)
    if path.suffix:
        table.to_parquet(path)
    else:
        table.save_to_disk(str(path))  # older fsspec takes no Path
    return path, rows


def maps(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    text = pyarrow.string()
    objects = pyarrow.struct({"t": text, "d": text})
    calls = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})
    columns = {
        "messages": pyarrow.array([[list(NAMES.items())]], pyarrow.list_(pyarrow.map_(text, text))),
        "calls": pyarrow.array(
            [[{"name": "f", "arguments": [("a", "x"), ("b", None)]}]], pyarrow.list_(calls)
        ),
        "nested": pyarrow.array([[("k", {"t": "s", "d": None})]], pyarrow.map_(text, objects)),
        "numbered": pyarrow.array([[(1, "x")]], pyarrow.map_(pyarrow.int64(), text)),
        "ids": pyarrow.array([[1, 2]]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    calls_as_json = [{"name": "f", "arguments": {"a": "x", "b": None}}]
    plain = {"nested": {"k": {"t": "s"}}, "numbered": {"1": "x"}, "ids": [1, 2]}
    return path, [{"messages": [NAMES], "calls": calls_as_json, **plain}]


@pytest.mark.parametrize(
    ("name", "write"), [("a.parquet", json_columns), ("saved", json_columns), ("b.parquet", maps)]
)
def test_maps_and_json_in_tables_are_the_objects_that_were_written(name, write, tmp_path):
    path, rows = write(tmp_path / name)
    assert rows_of(path) == rows


def test_a_map_with_a_name_twice_and_damaged_json_are_bad_rows(tmp_path):
    text = pyarrow.string()
    made = pyarrow.array([[("a", "x"), ("a", "y")], [("a", "x")], None], pyarrow.map_(text, text))
    texts = pyarrow.array(["{}", "{", "[1]"], pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"m": made, "j": texts}), tmp_path / "a.parquet")
    twice, damaged, good = rows_of(tmp_path / "a.parquet")
    assert str(twice) == ("'a' occurs twice in an object") and ("Expecting property name") in str(
        damaged
    )
    assert good == {"m": None, "j": [1]}


def test_a_name_that_occurs_twice_among_many_is_found_in_one_pass():
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str(self) == str(other)

    with pytest.raises(ValueError, match="'7' occurs twice"):
        unique([(Name(i), i) for i in (*range(2000), 7)])
    assert len(compared) < 10_000


def test_bad_rows_are_named_by_their_line_number(prepare, tmp_path):
    bad = {"instruction": "Say nothing.", "output": ""}
    for name in ("a.json", "a.txt"):
        write_jsonl(tmp_path / name, [*ROWS, bad])
        assert prepare(tmp_path / name, max_bad_rows=0.5)[1].places() == [
            (f"{tmp_path / name}:4", "empty output")
        ]
    (tmp_path / "b.json").write_text(CONTENTS["objects over several lines"]([*ROWS, bad]))
    assert (
        prepare(tmp_path / "b.json", max_bad_rows=0.5)[1].places()[0][0]
        == f"{tmp_path / 'b.json'} row 4"
    )


def test_a_folder_of_files_with_one_row_each_is_a_dataset(prepare, tmp_path):
    (tmp_path / "rows").mkdir()
    for number, row in enumerate([*ROWS, {"output": "x", "instruction": ""}]):
        (tmp_path / "rows" / f"{number}.json").write_text(
            json.dumps(row, indent=4 * (number % 2) or None)
        )
    tokenized, report = prepare(tmp_path / "rows", max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [1, 2, 3]
    assert report.places() == [(f"{tmp_path}/rows/3.json row 1", "empty instruction")]


def test_format_of_a_large_file_is_detected_from_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "1")
    many = [{**ROWS[0], "output": "x" * 100_000}] * 300
    (tmp_path / "a.jsonl").write_text(json.dumps(many))
    (tmp_path / "b.json").write_text(lines_of(many))
    with counting_memory() as most:
        assert look_into(tmp_path / "a.jsonl") == FILE_KINDS[".json"]
        assert look_into(tmp_path / "b.json") == FILE_KINDS[".jsonl"]
        assert sum(1 for _ in sources.find_source(str(tmp_path / "b.json")).entries()) == 300
        assert most() < 8 << 20


def test_folder_is_read_in_order_of_name_and_its_rows_can_be_located(prepare, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    bad = {"instruction": "Say nothing.", "output": ""}
    write_jsonl(folder / "b.jsonl", [ROWS[0], bad])
    write_json(folder / "a.json", [ROWS[1], ROWS[2], bad])
    write_csv(folder / "c.csv", [{"instruction": "Now?", "output": ""}])
    (folder / "notes.txt").write_text("not data")
    (folder / ".hidden.json").write_text("not data")
    expected = [*ROWS[1:], bad, ROWS[0], bad, {"instruction": "Now?"}]
    assert [row["instruction"] for row in rows_of(folder)] == [
        row["instruction"] for row in expected
    ]
    assert len(rows_of(folder, 4)) == 4  # of both files together
    tokenized, report = prepare(folder, max_bad_rows=0.5)
    assert tokenized.row_numbers.tolist() == [1, 2, 4]
    assert len(report.describe_rejected()) == 1
    places = [f"{folder}/a.json row 3", f"{folder}/b.jsonl:2", f"{folder}/c.csv:2"]
    assert [place for place, _ in report.places()] == places
