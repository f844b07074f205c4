"""A .json file is read piece by piece, with the rows and messages of one that is read whole."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.data.content import BadRow
from fsdp_qlora.data.sources import json_file
from fsdp_qlora.data.sources.file_content import decode
from fsdp_qlora.data.sources.json_file import read_json
from fsdp_qlora.data.sources.json_text import held_rows, require_object, values_of
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import counting_memory

pytestmark = pytest.mark.quick

CASES = 1000
LETTERS = ["a", "é", '"', "\\", "\n", "😀", "\u2028", "{", "]", ","]
NUMBERS = [0, -1, 1.5, -2.5e-7, 10**30, float("nan"), float("-inf"), None, True, False]
ODD = b'[]{},:"\\ \n0e.-tnN\xff\x00'


def read_whole(path: Path) -> Iterator[tuple[int, Any]]:
    """The same rows, with all of the file in memory."""
    try:
        values = list(values_of(decode(path.read_bytes())))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg} (column {error.colno}).") from error
    except BadRow as reason:
        raise UserError(f"{path}: {reason}.") from reason
    if len(values) == 1:
        values = values[0] if isinstance(values[0], list) else held_rows(values[0]) or values
    for number, value in enumerate(values, start=1):
        try:
            yield number, require_object(value)
        except BadRow as reason:
            yield number, reason


def told(rows: Iterator[tuple[int, Any]]) -> tuple[list[str], str]:
    """The rows as text, and the refusal. Rows before a refusal do not count."""
    try:
        return [f"{number} {row!r}" for number, row in rows], ""
    except UserError as error:
        return [], str(error)


def a_value(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(5 if depth < 3 else 3)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind in (1, 2):
        return "".join(random.choices(LETTERS, k=random.randrange(30)))
    values = [a_value(random, depth + 1) for _ in range(random.randrange(4))]
    names = ["a", "data", "rows", "é"]
    return values if kind == 3 else dict(zip(names, values, strict=False))


def a_file(random: random.Random) -> bytes:
    """Rows in any shape, half of the time damaged at a place."""
    rows = [a_value(random, random.randrange(2)) for _ in range(random.randrange(6))]
    how = {"ensure_ascii": random.random() < 0.5, "indent": random.choice([None, 1])}
    between = random.choice([",", ",\n", "\n", ""])
    text = between.join(json.dumps(row, **how) for row in rows)
    shape = random.choice(["%s", "[%s]", "\ufeff [\n%s\n]\n", '{"rows": [%s], "more": 1}'])
    content = bytearray((shape % text).encode())
    if content and random.random() < 0.5:
        place = random.randrange(len(content))
        content[place : place + random.randrange(3)] = random.choices(ODD, k=random.randrange(2))
        if random.random() < 0.2:
            del content[place:]
    return bytes(content)


def test_pieces_give_the_rows_and_refusals_of_the_whole_file(tmp_path, monkeypatch):
    source = random.Random(0)
    path = tmp_path / "a.json"
    refusals = 0
    for _ in range(CASES):
        path.write_bytes(a_file(source))
        monkeypatch.setattr(json_file, "_PIECE", source.choice([5, 64, 1000]))
        rows, refusal = told(read_json(path))
        expected, expected_refusal = told(read_whole(path))
        if "another value follows" in refusal:
            continue
        refusals += bool(refusal)
        # Of two faults the first one is said.
        if "UTF-8" not in expected_refusal:
            assert (rows, refusal) == (expected, expected_refusal), path.read_bytes()
    assert CASES / 5 < refusals < CASES


def test_a_large_array_takes_the_memory_of_few_rows(tmp_path, monkeypatch):
    row = {"instruction": "Say it.", "output": "é" * 1000}
    for name, shape in (("array", "[%s]"), ("objects", "%s")):
        path = tmp_path / f"{name}.json"
        path.write_text(shape % ",\n".join([json.dumps(row, indent=1)] * 3000), encoding="utf-8")
        assert path.stat().st_size > 12 << 20
        with counting_memory() as most:
            assert sum(1 for _ in read_json(path)) == 3000
            assert most() < 10 << 20
        monkeypatch.setenv("FSDP_QLORA_MAX_ROW_MIB", "0.001")
        with pytest.raises(UserError, match=rf"{name}.json:\d+: longer than"):
            list(read_json(path))
        monkeypatch.delenv("FSDP_QLORA_MAX_ROW_MIB")


def test_values_behind_an_array_of_rows_are_refused_with_their_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}]\n[{"a": 2}]\n')
    with pytest.raises(UserError, match=r"a.json:2: another value follows the array of rows"):
        list(read_json(path))
