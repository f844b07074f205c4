"""Finds rows that equal each other, and says where they are.

Rows are equal if their tokens, what is learned of them, their labels and images are; prompts if
their tokens and other columns are. Sums over the tokens of each row, in numpy, find the few rows
that may be equal. Only these are hashed.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fsdp_qlora.data.batches.report import DataReport
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.prompts import BesideTable
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# Tokens among which equal rows are looked for without being asked: about a second's work.
_MOST_COMPARED = 2**27
# Any odd numbers: a product with one loses no bit.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_OTHER_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
# Rows whose sums are computed at a time.
_AT_A_TIME = 1024


def without_duplicates(
    table: TokenizedRows,
    rows: np.ndarray,
    held_out: tuple[TokenizedRows, np.ndarray],
    reports: Sequence[DataReport],
    *,
    drop: bool,
    beside: BesideTable | None = None,
) -> np.ndarray:
    """Log which rows to train on equal others; returns the rows that are left.

    Args:
        table: the rows of all datasets, one dataset after the other.
        rows: to train on, sorted indices of `table`.
        held_out: a table, which may be the same, with the indices of its held-out rows.
        reports: of the datasets.
        drop: leave out rows that equal an earlier or a held-out one. Otherwise all are left, and
            those among many tokens are not looked for.
        beside: of a table of prompts, which then has the held-out rows, too: all else of its rows.
    Raises:
        UserError: none is left.
    """
    num_tokens = sum(len(each.input_ids) for each in {table, held_out[0]})
    if num_tokens > _MOST_COMPARED and not drop:
        log.info(
            "Equal rows are not looked for among %s tokens; --drop_duplicates true does.",
            f"{num_tokens:,}",
        )
        return rows
    found = find_duplicates(table, rows, held_out, beside)
    end = "left out of training" if drop else "--drop_duplicates true leaves such rows out"
    for some, what in (
        (found.of_earlier, "an earlier row"),
        (found.of_held_out, "a held-out row, whose loss says less then"),
    ):
        for line in describe_places(table, some, reports, f"equal to {what}; {end}"):
            log.warning("Equal rows, %s", line)
    if not drop:
        return rows
    left = np.setdiff1d(rows, np.concatenate(found), assume_unique=True)
    if not len(left):
        raise UserError("--drop_duplicates: all rows to train on equal held-out ones.")
    return left


class Duplicates(NamedTuple):
    """Indices of rows to train on that equal another one, int64, in their order.

    of_earlier: that equal an earlier row to train on. of_held_out: that equal a held-out row.
    """

    of_earlier: np.ndarray
    of_held_out: np.ndarray


def find_duplicates(
    table: TokenizedRows,
    rows: np.ndarray,
    held_out: tuple[TokenizedRows, np.ndarray],
    beside: BesideTable | None = None,
) -> Duplicates:
    """Find the rows of a table that equal an earlier or a held-out one.

    Takes about 32 bytes of memory for each row.

    Args:
        rows: to train on, sorted indices of `table`.
        held_out, beside: as for `without_duplicates`.
    """
    # Held-out rows come first, so that the first of equal rows is one of them if there is one.
    parts = [held_out, (table, rows)]
    sums_of = {part: _sums(part) for part, _ in parts}
    sums = np.concatenate([sums_of[part][chosen] for part, chosen in parts])
    found = _with_equals(sums)
    of_part = np.repeat(np.arange(len(parts)), [len(chosen) for _, chosen in parts])[found]
    indices = np.concatenate([chosen for _, chosen in parts])[found]
    hashes = np.empty(len(found), "S16")
    for place, (part, row) in enumerate(zip(of_part, indices, strict=True)):
        hashes[place] = _hash(parts[part][0], int(row), beside)
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = firsts[inverse.reshape(-1)]
    is_repeated = (of_part == 1) & (first_of != np.arange(len(found)))
    is_held_out = of_part[first_of] == 0
    return Duplicates(
        indices[is_repeated & ~is_held_out].astype(np.int64),
        indices[is_repeated & is_held_out].astype(np.int64),
    )


def describe_places(
    table: TokenizedRows, rows: np.ndarray, reports: Sequence[DataReport], what: str
) -> list[str]:
    """A line for each dataset that has some of these rows: the first places, and their number.

    what: is said of the rows. The other arguments are those of `without_duplicates`.
    """
    ends = np.cumsum([report.num_used for report in reports])
    lines: list[str] = []
    for report, end in zip(reports, ends, strict=True):
        first = end - report.num_used
        inside = rows[(rows >= first) & (rows < end)]
        if len(inside) and report.parts:  # dummy rows have no place
            # The numbers of several datasets continue after the highest one before.
            offset = int(table.row_numbers[:first].max(initial=0))
            numbers = (table.row_numbers[inside] - offset).tolist()
            said = DataReport(report.origin, parts=report.parts, notes={what: numbers})
            lines += said.describe_notes()
    return lines


def _sums(table: TokenizedRows) -> np.ndarray:
    """A number of each row that equal rows have in common, uint64 [rows]."""
    bounds = table.document_offsets
    sums = np.empty(len(bounds) - 1, np.uint64)
    for first in range(0, len(sums), _AT_A_TIME):
        offsets = bounds[first : first + _AT_A_TIME + 1]
        tokens = table.input_ids[offsets[0] : offsets[-1]].astype(np.uint64)
        values = tokens + _FACTOR
        values *= tokens
        values *= tokens
        starts = offsets[:-1] - offsets[0]
        sums[first : first + len(starts)] = np.add.reduceat(values, starts)
    sums += np.diff(bounds).astype(np.uint64) * _OTHER_FACTOR
    if not len(table.splits):
        return sums
    own, others = sums.reshape(-1, 2).T
    return own if _has_labels(table) else own * _FACTOR + others


def _has_labels(table: TokenizedRows) -> bool:
    """Whether a row's second document is another row's answer, by which it is not known."""
    return "desired" in table.columns


def _with_equals(values: np.ndarray) -> np.ndarray:
    """The indices of all values that are there more than once, sorted."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_next = ordered[1:] == ordered[:-1]
    is_equal = np.zeros(len(values), np.bool_)
    is_equal[1:] = is_next
    is_equal[:-1] |= is_next
    return np.sort(order[is_equal])


def _hash(table: TokenizedRows, row: int, beside: BesideTable | None) -> bytes:
    """A hash of the row's content."""
    start, end = table.offsets[row : row + 2]
    content = hashlib.blake2b(digest_size=16)
    if len(table.splits):
        split = int(table.splits[row])
        content.update(split.to_bytes(8, "little"))
        if _has_labels(table):
            end = start + split
            content.update(table.columns["desired"].values[row : row + 1].tobytes())
    # The number of tokens says where the parts begin.
    content.update(int(end - start).to_bytes(8, "little"))
    content.update(np.ascontiguousarray(table.input_ids[start:end]).tobytes())
    content.update(np.asarray(table.learned[start:end], np.float32).tobytes())
    content.update(table.images.of_row(row).names.tobytes())
    if beside is not None:
        # As text, which also values have that the cache cannot keep.
        content.update(repr(beside[row]).encode(errors="surrogatepass"))
    return content.digest()
