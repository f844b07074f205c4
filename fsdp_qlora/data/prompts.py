"""The prompts of a run that learns from its own completions."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_qlora.data.batches.rows import TokenizedRows, beside_teacher, join_completions
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

    @property
    def for_rewards(self) -> Row:
        """The columns, with the answer in one that functions read."""
        if self.answer is None or any(self.columns.get(name) is not None for name in ANSWERS):
            return self.columns
        return dict(self.columns) | {ANSWERS[0]: self.answer}


def join_prompts(parts: Iterable[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    """The prompts of several datasets. Row numbers continue from one to the next."""
    joined = list[Prompt]()
    first = 0
    for part in parts:
        for prompt in part:
            joined.append(dataclasses.replace(prompt, row_number=first + prompt.row_number))
        # After the highest number, not the count: rows that were left out keep their numbers.
        first += max((prompt.row_number for prompt in part), default=0)
    return tuple(joined)


def rows_of_prompts(prompts: Sequence[Prompt]) -> TokenizedRows:
    """Rows of the prompts alone, of which nothing is learned."""
    return join_completions(
        [prompt.ids for prompt in prompts],
        [()] * len(prompts),
        [prompt.row_number for prompt in prompts],
    )


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
    table = join_completions(before, [[0] * num_tokens] * len(before), numbers)
    if has_teacher:
        return beside_teacher(table)
    shared = shared_of_prompts([len(ids) for ids in before])
    return table.with_columns("row", prompt_tokens=shared)
