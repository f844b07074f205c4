"""Reading goes on behind any row, and slices skip rows, without parsing what is left out."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest

from fsdp_qlora.data.sources import files, tables
from fsdp_qlora.data.sources.source import BEGINNING, find_source, place_after
from tests.data.rows import write_csv, write_json, write_jsonl, write_parquet

pytestmark = pytest.mark.quick

ROWS = [{"instruction": f"Say {n},\nplease.", "output": f"{n}" * (1 + n % 5)} for n in range(23)]
BLANKS = "\n \n\u00a0\n\ufeff\n\x1f\n"  # lines that are no rows, and have numbers


def lines_with_blanks(path: Path) -> Path:
    text = BLANKS.join(json.dumps(row) + "\n" for row in ROWS)
    path.write_text(f"{text}{BLANKS}".replace('"Say 7', "\x00"), encoding="utf-8")  # a bad row
    return path


def packed(path: Path) -> Path:
    plain = lines_with_blanks(path.with_suffix(""))
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


def saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "c.csv").write_bytes(write_csv(path.parent / "c.csv", ROWS).read_bytes())
    (path / "empty.jsonl").write_text("\n")
    lines_with_blanks(path / "l.jsonl")
    packed(path / "m.jsonl.gz")
    write_parquet(path / "p.parquet", ROWS, row_group_size=5)
    write_json(path / "q.json", ROWS)
    return path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "a.jsonl": lines_with_blanks,
    "a.jsonl.gz": packed,
    "a.json": lambda path: write_json(path, ROWS),
    "a.csv": lambda path: write_csv(path, ROWS),
    "a.parquet": lambda path: write_parquet(path, ROWS, row_group_size=5),
    "saved": saved,
    "folder": folder,
}


def told(entries: Any) -> list[Any]:
    return [(e.file.name, e.file.offset + e.row_number, str(e.row)) for e in entries]


@pytest.mark.parametrize("name", SOURCES)
def test_reading_goes_on_behind_every_row_of_every_slice(name, tmp_path):
    path = SOURCES[name](tmp_path / name)
    whole = told(find_source(str(path)).entries())
    assert len(whole) >= len(ROWS)
    for start, stop in ((0, None), (3, None), (4, 11), (len(whole) - 2, None), (30, 60)):
        source = find_source(f"{path}[{start}:{'' if stop is None else stop}]")
        expected = whole[start:stop]
        entries = list(source.entries())
        assert told(entries) == expected
        assert told(source.entries(5)) == expected[:5]
        for read, entry in enumerate(entries, start=1):
            place = place_after(entry, read)
            assert told(source.entries(after=place)) == expected[read:]
            assert told(source.entries(9, after=place)) == expected[read:9]


def test_rows_that_are_left_out_are_not_parsed(tmp_path, monkeypatch):
    lines = write_jsonl(tmp_path / "a.jsonl", ROWS)
    table = write_parquet(tmp_path / "a.parquet", ROWS, row_group_size=5)
    parsed = []
    parse = files.parse
    monkeypatch.setattr(files, "parse", lambda text: parsed.append(text) or parse(text))
    assert len(list(find_source(f"{lines}[20:]").entries())) == len(parsed) == 3
    batches = []
    number_rows = tables.number_rows

    def count(batch: Any, *arguments: Any) -> Any:
        batches.append(batch.num_rows)
        return number_rows(batch, *arguments)

    monkeypatch.setattr(tables, "number_rows", count)
    damaged = bytearray(table.read_bytes())
    group = pyarrow.parquet.ParquetFile(table).metadata.row_group(1).column(0)
    damaged[group.dictionary_page_offset or group.data_page_offset] ^= 0xFF
    table.write_bytes(damaged)  # a group that need not be read
    assert len(list(find_source(f"{table}[12:]").entries())) == sum(batches) == 11


@pytest.mark.parametrize("name", SOURCES)
def test_share_that_was_read_grows_to_one_and_tells_the_rows(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_qlora.data.sources.json_file._PIECE", 64)
    path = SOURCES[name](tmp_path / name)
    source = find_source(f"{path}[3:]")
    assert source.share_read() is None
    whole = len(list(source.entries()))
    assert source.share_read() == 1
    for limit, after in ((None, 0), (10, 0), (None, 9), (1000, 0)):
        place = BEGINNING
        if after:
            *_, last = source.entries(after)
            place = place_after(last, after)
        shares = []
        for _ in source.entries(limit, after=place):
            shares.append(source.share_read())
        assert shares == sorted(shares) and source.share_read() == 1
        # Files are read a few KiB at a time, which is all of a small one.
        assert len(shares) == min(whole, limit or whole) - after
        if name in ("a.jsonl", "a.parquet", "saved"):
            middle = len(shares) // 2
            share = (after + middle) / (after + len(shares))
            assert abs(shares[middle - 1] - share) < 0.1
