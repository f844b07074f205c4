"""Finds the largest micro-batch of a run, to be tried before the first step."""

from typing import NamedTuple

import numpy as np

from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.largest import longest_micro_batch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import RowsInMemory
from fsdp_qlora.data.batches.shared_tokens import RowTokens, shared_of_prompts
from fsdp_qlora.data.prompts import rows_of_answers
from fsdp_qlora.data.run_data import RunData


class LongestRows(NamedTuple):
    """The rows of a run's largest micro-batch by tokens.

    rows: indices of rows of `table`, int64. num_rounds: the maximum rounds of a step.
    """

    table: TokenizedRows
    rows: np.ndarray
    num_rounds: int


def longest_rows(data: RunData, collator: Collator) -> LongestRows:
    """Go through the schedule of the whole run.

    An answer that the run samples has as many tokens as it may have.
    """
    known = data.known_rows
    if not data.prompts:
        return longest_of_table(RowsInMemory(known, data.train_rows), collator)
    prompts = shared_of_prompts(known.lengths) if collator.shares_prompts else None
    computed = RowTokens(data.lengths, known.row_numbers, prompts)
    rows, num_rounds = longest_micro_batch(
        collator.schedule, data.train_rows, data.lengths, computed
    )
    table = rows_of_answers(
        [data.prompts[row] for row in rows],
        data.completion_length,
        has_teacher=collator.has_teacher,
    )
    return LongestRows(table, np.arange(len(rows)), num_rounds)


def longest_of_table(rows: RowsInMemory, collator: Collator) -> LongestRows:
    """The largest micro-batch of rows that are known."""
    table = rows.table
    computed = table.learned_from(shares_prompts=collator.shares_prompts)
    longest, num_rounds = longest_micro_batch(collator.schedule, rows.rows, table.lengths, computed)
    return LongestRows(table, longest, num_rounds)
