"""The prompts of a run that learns from its own completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsIndex, overload

import numpy as np

from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.data.batches.rows import (
    NO_ROWS,
    TokenizedRows,
    beside_teacher,
    join_completions,
)
from fsdp_qlora.data.batches.shared_tokens import shared_of_prompts
from fsdp_qlora.data.columns import ANSWERS
from fsdp_qlora.data.content import Chat, Row


@dataclass(frozen=True)
class Prompt:
    """A row of a run that learns from its own completions."""

    row_number: int
    """The row's number in the dataset; among several datasets numbers continue."""
    ids: list[int]
    """The tokens before a completion."""
    content: Any
    """Text or messages, as reward functions get it."""
    columns: Row
    """All other columns."""
    answer: object = None
    """The right answer, where it is in no column of its own."""
    teacher_ids: list[int] | None = None
    """The tokens before a completion that a teacher sees, if they are others."""
    chat: Chat | None = None
    """The conversation with the tools of its environment, if it has one."""
    environment: str = ""
    """The name of its environment, if there are several."""
    images: RowImages = NO_IMAGES
    """The images that it shows, as those of a table with this row alone."""

    @property
    def for_rewards(self) -> Row:
        """The columns, with the answer in one that functions read."""
        if self.answer is None or any(self.columns.get(name) is not None for name in ANSWERS):
            return self.columns
        return dict(self.columns) | {ANSWERS[0]: self.answer}


class Beside(NamedTuple):
    """Everything of a prompt besides its tokens, images and row's number; see `Prompt`."""

    content: Any
    columns: Row
    answer: object = None
    teacher_ids: list[int] | None = None
    chat: Chat | None = None
    environment: str = ""

    @classmethod
    def of(cls, prompt: Prompt) -> "Beside":
        return cls(*(getattr(prompt, name) for name in cls._fields))


class BesideTable(Protocol):
    """Everything besides its tokens for each row of a table."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Beside: ...


@dataclass(frozen=True, eq=False)
class Prompts(Sequence[Prompt]):
    """Prompts that are made when they are asked for, such as from memory that ranks share."""

    rows: TokenizedRows
    """Rows of the prompts alone with their images, of which nothing is learned."""
    beside: BesideTable
    """Everything else of these rows."""
    places: np.ndarray
    """The rows that are meant, int64 [prompts]."""
    digest: str = ""
    """A hash of all; empty where they are of this process alone."""

    @classmethod
    def whole(cls, rows: TokenizedRows, beside: BesideTable, digest: str = "") -> "Prompts":
        """All prompts of a table."""
        return cls(rows, beside, np.arange(len(rows)), digest)

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> "Prompts":
        """Prompts that are in memory."""
        rows = join_completions(
            [prompt.ids for prompt in prompts],
            [()] * len(prompts),
            [prompt.row_number for prompt in prompts],
            [prompt.images for prompt in prompts],
        )
        return cls.whole(rows, [*map(Beside.of, prompts)])

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, place: SupportsIndex) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> "Prompts": ...
    def __getitem__(self, place: SupportsIndex | slice) -> "Prompt | Prompts":
        if isinstance(place, slice):
            return self.chosen(np.arange(len(self))[place])
        row = int(self.places[place])
        number = int(self.rows.row_numbers[row])
        return Prompt(number, self._ids(row), *self.beside[row], self.images(place))

    def chosen(self, places: np.ndarray) -> "Prompts":
        """Some of the prompts, in the same memory. places: int64 [prompts]."""
        return Prompts(self.rows, self.beside, self.places[places])

    def ids(self, place: SupportsIndex) -> list[int]:
        """The tokens of a prompt."""
        return self._ids(int(self.places[place]))

    def images(self, place: SupportsIndex) -> RowImages:
        """The images of a prompt."""
        return self.rows.images.of_row(int(self.places[place]))

    def _ids(self, row: int) -> list[int]:
        tokens = slice(*self.rows.offsets[row : row + 2])
        ids: list[int] = self.rows.input_ids[tokens].tolist()
        return ids

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int64 [prompts]."""
        return self.rows.lengths[self.places]

    def columns(self) -> Iterator[Row]:
        """Give the columns of each prompt."""
        for row in self.places.tolist():
            yield self.beside[row].columns


NO_PROMPTS = Prompts.whole(NO_ROWS, ())


class JoinedTables:
    """Everything besides tokens of several tables, one table after the other."""

    def __init__(self, parts: Sequence[BesideTable]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int, /) -> Beside:
        part = int(np.searchsorted(self._ends, row, side="right"))
        first = int(self._ends[part]) - len(self._parts[part])
        return self._parts[part][row - first]


def rows_of_answers(
    prompts: Sequence[Prompt], num_tokens: int, *, has_teacher: bool
) -> TokenizedRows:
    """Rows as a run samples them: an answer of `num_tokens` tokens behind each prompt.

    has_teacher: whether the same answer follows the teacher's prompt in a second document.
    """
    before: list[list[int]] = []
    numbers: list[int] = []
    for prompt in prompts:
        before.append(prompt.ids)
        if has_teacher:
            before.append(prompt.teacher_ids or prompt.ids)
        numbers += [prompt.row_number] * (2 if has_teacher else 1)
    images = [prompt.images for prompt in prompts]
    answers = [[0] * num_tokens] * len(before)
    if has_teacher:
        return beside_teacher(join_completions(before, answers, numbers), images)
    table = join_completions(before, answers, numbers, images)
    shared = shared_of_prompts([len(ids) for ids in before])
    return table.with_columns("row", prompt_tokens=shared)
