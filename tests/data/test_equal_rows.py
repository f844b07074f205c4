"""Rows that equal each other: counted, named by their places, and left out if that is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.rows import NO_ROWS, Column, TokenizedRows
from fsdp_qlora.data.duplicates import find_duplicates
from fsdp_qlora.utils.errors import UserError
from tests.data.rows import write_jsonl

pytestmark = pytest.mark.quick


def table_of(kind: str, count: int, generator: np.random.Generator) -> TokenizedRows:
    """Random rows of few different tokens, so that many are equal and others nearly are."""
    lengths = generator.integers(2, 5, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.integers(0, 3, offsets[-1]).astype(np.int32)
    learned = generator.random(offsets[-1]) < 0.5
    splits = np.zeros(0, np.int64)
    columns = {}
    images = NO_ROWS.images
    if kind in ("pairs", "labels"):
        splits = generator.integers(1, lengths)
    if kind == "labels":
        columns["desired"] = Column("row", generator.random(count) < 0.5)
    if kind == "images":
        sizes = np.stack([generator.integers(0, 2, count)] * 2, axis=1)
        names = generator.integers(0, 2, (sizes[:, 0].sum(), 16)).astype(np.uint8) // 2
        images = RowImages(names, sizes)
    if kind == "weights":
        learned = learned * np.float32(0.5)
    numbers = np.arange(1, count + 1)
    return TokenizedRows(tokens, learned, offsets, numbers, splits, "all", columns, images)


def content(table: TokenizedRows, row: int) -> tuple[Any, ...]:
    own = table[row]
    end = int(own.splits[0]) if "desired" in own.columns else len(own.input_ids)
    values = {name: column.values.tolist() for name, column in own.columns.items()}
    parts = (own.input_ids[:end], own.learned[:end], own.splits, own.images.names)
    return (*(tuple(part.ravel().tolist()) for part in parts), str(values))


@pytest.mark.parametrize("kind", ["texts", "weights", "pairs", "labels", "images"])
def test_rows_found_equal_are_those_of_a_plain_loop(kind):
    generator = np.random.default_rng(0)
    table = table_of(kind, 1500, generator)  # more than are summed up at a time
    other = table_of(kind, 60, generator)
    rows = np.sort(generator.permutation(1500)[:1200])
    for held_out, chosen in (
        (table, np.setdiff1d(np.arange(1500), rows)[:20]),
        (other, np.arange(60)),
        (NO_ROWS, np.arange(0)),
    ):
        of_held_out = {content(held_out, row) for row in chosen}
        seen = set[Any]()
        expected: tuple[list[int], list[int]] = ([], [])
        for row in rows.tolist():
            own = content(table, row)
            if own in of_held_out or own in seen:
                expected[own in of_held_out].append(row)
            seen.add(own)
        found = find_duplicates(table, rows, (held_out, chosen))
        assert found.of_earlier.tolist() == expected[0] != []
        assert found.of_held_out.tolist() == expected[1]


TEXTS = [{"text": text} for text in ("a b", "b a", "a b", "c", "a b")]


def test_equal_rows_of_several_datasets_are_named_and_dropped(read, tmp_path, caplog):
    first = write_jsonl(tmp_path / "first.jsonl", TEXTS)
    second = write_jsonl(tmp_path / "second.jsonl", [{"text": "d"}, {"text": "c"}])
    _, data = read(first, second)
    assert data.train_rows.tolist() == list(range(7))
    assert f"{first}:3, 5: equal to an earlier row; --drop_duplicates true" in caplog.text
    assert f"{second}:2: equal to an earlier row;" in caplog.text and "held-out" not in caplog.text
    _, without = read(first, second, drop_duplicates=True)
    assert without.train_rows.tolist() == [0, 1, 3, 5]
    assert without.train.digest == data.train.digest  # the cached rows are the same
    # Shares are those of the rows that are left: two of three, and one of two.
    _, mixed = read(f"{first}:2", f"{second}:1", drop_duplicates=True)
    assert mixed.mixture is not None and mixed.mixture.rows_per_epoch == (2, 1)


def test_a_weighted_dataset_of_which_no_row_is_left_is_named(read, tmp_path):
    first = write_jsonl(tmp_path / "first.jsonl", TEXTS)
    second = write_jsonl(tmp_path / "second.jsonl", TEXTS[:2])
    with pytest.raises(UserError, match=r"second.jsonl:1: none of its rows is left .*duplicates"):
        read(f"{first}:2", f"{second}:1", drop_duplicates=True)


def test_rows_equal_to_held_out_ones_are_a_leak(read, tmp_path, caplog):
    texts = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"text": "c"}, {"text": "a b"}])
    read(texts, eval_dataset=(str(held_out),))
    assert f"{texts}:1, 3, 4, 5: equal to a held-out row" in caplog.text
    _, data = read(texts, eval_dataset=(str(held_out),), drop_duplicates=True)
    assert data.train_rows.tolist() == [1] and len(data.eval_rows) == 2
    with pytest.raises(UserError, match="all rows to train on equal held-out ones"):
        read(texts, eval_dataset=(str(texts),), drop_duplicates=True)


def test_equal_prompts_are_dropped_and_a_held_out_one_stays(read, tmp_path, caplog):
    rows = [{"prompt": text, "answer": 1} for text in ("sort", "count", "sort", "name")]
    rows += [{"prompt": "sort", "answer": answer} for answer in (2, 1)]
    asked = write_jsonl(tmp_path / "asked.jsonl", rows)
    held_out: Path = write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "name", "answer": 1}])
    options: dict[str, Any] = {"objective": "grpo", "rewards": ("number",), "context_length": 64}
    options |= {"max_completion_length": 8, "eval_dataset": (str(held_out),)}
    options["eval_rewards"] = ("number",)
    _, data = read(asked, **options, drop_duplicates=True)
    # Another answer is another task.
    assert data.train_rows.tolist() == [0, 1, 4] and data.eval_rows.tolist() == [6]
    assert f"{asked}:3, 6: equal to an earlier row" in caplog.text
