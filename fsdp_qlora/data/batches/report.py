"""Reports how many of a dataset's rows were used, cut and left out, and why."""

import bisect
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.content import SourceFile
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.text import fit_line

log = logging.getLogger("fsdp_qlora")

# Rows, and unused columns, that a message names.
NUMBERS_SHOWN = 10
_NAMED = 5
# Above this share of the tokens that are cut, a longer context is advised.
CUT_SHARE_TO_WARN = 0.05
# Why a row is left out, besides what a format or template says of it.
NO_ROOM = "no room for a response within context_length"
NO_ROOM_FOR_TURN = "a turn that is a row of its own has no room within context_length"


@dataclass(kw_only=True)
class RowCounts:
    """How many of a dataset's rows were read, used and cut, and their tokens."""

    num_rows: int = 0
    """Rows that were read, malformed ones included."""
    num_used: int = 0
    """Rows to train on, those of `num_apart` included."""
    num_tokens: int = 0
    num_targets: int = 0
    num_truncated: int = 0
    """Rows cut at context_length."""
    num_tokens_cut: int = 0
    num_apart: int = 0
    """Rows besides one for each row that was read: turns of chats and pieces of texts."""

    def count(self, rows: TokenizedRows) -> None:
        """Count the rows that are used, and their tokens."""
        self.num_used = len(rows)
        self.num_tokens = len(rows.input_ids)
        self.num_targets = int(rows.num_targets.sum())


@dataclass
class DataReport(RowCounts):
    """A dataset's rows that were used, cut or left out, and why. The cache keeps it with them."""

    origin: str
    """The path or name of the dataset."""
    dataset_format: str = ""
    parts: list[SourceFile] = field(default_factory=list)
    """The files of the dataset, in the order in which they were read."""
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """The reason -> the numbers of the rows that were left out for it."""
    notes: dict[str, list[int]] = field(default_factory=dict)
    """An oddity -> the numbers of the rows that have it, which are used."""
    unused_columns: list[str] = field(default_factory=list)
    length_of_99_percent: int = 0
    """The tokens that 99% of the rows have at most, before any is cut."""
    is_chat: bool = False
    """Whether rows were filled into a chat template."""
    is_filled: bool = False
    """Whether rows were filled into a prompt template."""

    def reject(self, row_number: int, reason: str) -> None:
        self.rejected.setdefault(reason, []).append(row_number)

    def note(self, row_number: int, what: str) -> None:
        self.notes.setdefault(what, []).append(row_number)

    def add(self, later: "DataReport") -> None:
        """Add the report on the rows that follow, whose columns are those of all until there."""
        for count in fields(RowCounts):
            setattr(self, count.name, getattr(self, count.name) + getattr(later, count.name))
        for reason, numbers in later.rejected.items():
            self.rejected.setdefault(reason, []).extend(numbers)
        for what, numbers in later.notes.items():
            self.notes.setdefault(what, []).extend(numbers)
        # A file may go on where the earlier rows end.
        known = self.parts[-1:]
        self.parts += later.parts[1:] if later.parts[:1] == known else later.parts
        self.dataset_format = later.dataset_format
        self.unused_columns = later.unused_columns
        self.is_chat |= later.is_chat
        self.is_filled |= later.is_filled

    def set_length_of_99_percent(self, lengths: Mapping[int, int]) -> None:
        """Set it from the number of rows of each length.

        It is a length that some row has: as numpy's quantile by `inverted_cdf`, of all rows.
        """
        place = 0.99 * sum(lengths.values()) - 1
        left = max(0, math.ceil(place))
        for length in sorted(lengths):
            left -= lengths[length]
            if left < 0:
                self.length_of_99_percent = length
                break

    @property
    def num_rejected(self) -> int:
        return sum(map(len, self.rejected.values()))

    @property
    def num_too_long(self) -> int:
        """Rows that are left out because the prompt alone fills the context."""
        return len(self.rejected.get(NO_ROOM, []))

    def places(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out, in the order of the dataset."""
        reasons = sorted(
            (row_number, reason)
            for reason, numbers in self.rejected.items()
            for row_number in numbers
        )
        return [(self._locate([row_number]), reason) for row_number, reason in reasons]

    def describe(self) -> str:
        """One line: rows, tokens and truncation."""
        apart = f" and {self.num_apart:,} pieces of them" if self.num_apart else ""
        cut = f" in {self.num_truncated:,} rows" if self.num_truncated else ""
        text = (
            f"Rows: {self.num_used - self.num_apart:,} of {self.num_rows:,} rows{apart}, "
            f"{self.num_tokens:,} tokens "
            f"({self.num_targets:,} learned), {self.num_tokens_cut:,} tokens cut{cut}: "
        )
        return fit_line(text, self.origin)

    def describe_rejected(self) -> list[str]:
        """A line for each reason, with the first rows that were left out for it."""
        return self._lines(self.rejected)

    def describe_notes(self) -> list[str]:
        """One line for each oddity of rows that are used, and for columns that are not."""
        names = [fit_line(name) for name in self.unused_columns[:_NAMED]]
        more = len(self.unused_columns) - _NAMED
        lines = self._lines(self.notes)
        if not names:
            return lines
        unused = (
            f"{self.origin}: columns that the format {self.dataset_format} does not use: "
            f"{', '.join(names)}"
        )
        if more > 0:
            unused += f" and {more:,} more"
        return [unused, *lines]

    def describe_cut(self, context_length: int) -> list[str]:
        """A line of advice where many tokens are cut or prompts fill the context."""
        share = self.num_tokens_cut / max(1, self.num_tokens + self.num_tokens_cut)
        problems = []
        if share > CUT_SHARE_TO_WARN:
            problems.append(f"{share:.0%} of the tokens are cut off")
        if self.num_too_long:
            problems.append(f"{self.num_too_long:,} rows have no room for a response")
        if not problems:
            return []
        needed = self.length_of_99_percent
        advice = ""
        if needed > context_length:
            advice = f"--context_length {needed} would keep 99% of the rows whole."
        line = (
            f"{self.origin}: with --context_length {context_length} {' and '.join(problems)}. "
            f"{advice}"
        )
        return [line.rstrip()]

    def _locate(self, numbers: Iterable[int]) -> str:
        """The places of ascending row numbers, in a compiler's form.

        Such as "data/a.jsonl:3, 17; data/b.parquet row 1".
        """

        def file_of(row_number: int) -> SourceFile:
            # The last file whose offset is below the number: within a file they count from 1.
            index = bisect.bisect_left(self.parts, row_number, key=lambda file: file.offset)
            return self.parts[index - 1]

        places = []
        for file, group in itertools.groupby(numbers, key=file_of):
            path = self.origin if self.origin.endswith(file.name) else f"{self.origin}/{file.name}"
            rows = ", ".join(str(row_number - file.offset) for row_number in group)
            places.append(f"{path}:{rows}" if file.unit == "line" else f"{path} {file.unit} {rows}")
        return "; ".join(places)

    def _lines(self, rows: Mapping[str, list[int]]) -> list[str]:
        # A batch is read before it is rendered, and either may refuse a row for the same reason.
        ascending = {what: sorted(numbers) for what, numbers in rows.items()}
        lines = []
        for what, numbers in sorted(ascending.items(), key=lambda item: item[1]):
            line = self._locate(numbers[:NUMBERS_SHOWN])
            if len(numbers) > NUMBERS_SHOWN:
                line += ", ..."
            line += f": {what}"
            if len(numbers) > 1:
                line += f" ({len(numbers):,} rows)"
            lines.append(line)
        return lines


def report_as_json(report: DataReport) -> str:
    """The report for a file, without secrets."""
    return json.dumps(redact_values(dataclasses.asdict(report)))


def report_of_json(text: str | bytes) -> DataReport:
    """The reverse of `report_as_json`. Raises LookupError, TypeError or ValueError for others."""
    values = json.loads(text)
    values["parts"] = [SourceFile(**part) for part in values["parts"]]
    return DataReport(**values)


def check_report(report: DataReport, *, allowed: float, context_length: int) -> None:
    """Log what became of the rows. Raises UserError if none is left or too many were rejected.

    Args:
        allowed: the share of rows that may be left out.
    """
    num_bad = report.num_rejected
    advice = report.describe_cut(context_length)
    if report.num_used == 0 or num_bad > allowed * report.num_rows:
        lines = report.describe_rejected()
        if len(lines) > NUMBERS_SHOWN:
            lines[NUMBERS_SHOWN:] = [f"... and {len(lines) - NUMBERS_SHOWN:,} other reasons"]
        cure = f"raise {'--context_length or ' if report.num_too_long else ''}--max_bad_rows"
        raise UserError(
            f"{report.origin}: {num_bad:,} of {report.num_rows:,} rows cannot be used, and "
            f"{allowed:.1%} are allowed. Repair them or {cure}."
            + "".join(f"\n  {line}" for line in [*lines, *advice])
        )
    log.info("%s", report.describe())
    for line in report.describe_rejected():
        log.warning("Rows left out, %s", line)
    for line in [*report.describe_notes(), *advice]:
        log.warning("%s", line)
