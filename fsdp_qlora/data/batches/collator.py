"""Lays out an optimizer step or an evaluation.

Both are rounds of micro-batches that all ranks compute at the same time.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.graph_lengths import filled_multiple
from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.micro_batch import MicroBatch, concatenate_rows, pad_rows, with_teacher
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Round, Schedule
from fsdp_qlora.data.batches.target_values import TargetValues

_AHEAD = 2  # micro-batches whose images a thread reads before their use


@dataclass(frozen=True, eq=False)
class Collator:
    """Makes one rank's micro-batches.

    Args:
        context_size: ranks that share each micro-batch.
        sharing_ranks: those that share the vocabulary with this one, and itself.
        shares_prompts: the model computes the common prefix of a pair, or of the answers to a
            prompt, once.
        fills_up: short micro-batches are filled up to a length for which graphs are made.
        has_teacher: a row's second document is its teacher's.
        target_values: gives values of targets that the rows do not have themselves.
        image_inputs: makes the model's arguments for rows with images.
    """

    schedule: Schedule
    pad_token_id: int
    rank: int = 0
    context_size: int = 1
    sharing_ranks: Sequence[int] = ()
    shares_prompts: bool = False
    fills_up: bool = False
    has_teacher: bool = False
    target_values: TargetValues | None = None
    image_inputs: ImageInputs | None = None

    @property
    def data_rank(self) -> int:
        """The place of this rank's micro-batch in a round."""
        return self.rank // self.context_size

    def lay_out_step(self, table: TokenizedRows, rows: np.ndarray) -> "Batches":
        """Lay out the rows of an optimizer step."""
        prompts = table.computed(shares_prompts=self.shares_prompts).prompts
        return Batches(self, table, rows, self.schedule.rounds(rows, table.lengths, prompts))

    def lay_out_evaluation(self, table: TokenizedRows, rows: np.ndarray) -> "Batches":
        """Lay out rows of which nothing is learned."""
        size = self.schedule.batch_size * self.schedule.data_size
        parts = [rows]
        if self.schedule.padding:
            # Padded rows keep the order in which their losses were always added: another order of
            # the sum is another last digit.
            parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        rounds: list[Round] = []
        for part in parts:
            rounds += self.schedule.rounds(part, table.lengths)
        return Batches(self, table, rows, rounds)

    def repeated(self, table: TokenizedRows, micro_batch: np.ndarray, num_rounds: int) -> "Batches":
        """Lay out the same micro-batch for every rank and round."""
        return Batches(
            self, table, micro_batch, [[micro_batch] * self.schedule.data_size] * num_rounds
        )

    def micro_batch(self, rows: Round, table: TokenizedRows) -> MicroBatch:
        """This rank's part of a round, and facts about the ranks that share its vocabulary."""
        # Every rank knows all rows: laid out here, the others' tokens need no collective and no
        # wait for it.
        size = self.context_size
        ranks = {self.rank, *self.sharing_ranks}
        whole = {
            data_rank: self._sequences(rows[data_rank], table)
            for data_rank in {rank // size for rank in ranks}
        }
        if self.target_values:
            # Before `part`, which splits the values with the targets that they are of.
            batch = whole[self.data_rank]
            values = dict(batch.target_values) | self.target_values(table, rows[self.data_rank])
            whole[self.data_rank] = dataclasses.replace(batch, target_values=values)
        batches = {rank: whole[rank // size].part(rank % size, size) for rank in ranks}
        batch = batches[self.rank]
        # One answer for all ranks: if any of them has an image, all call the image tower, since its
        # weights are gathered by all of them.
        if len(table.images) and table.images.counts[np.concatenate(rows)].any():
            batch = self._with_images(batch, rows, table)
        if not self.sharing_ranks:
            return batch
        return batch.beside([batches[rank] for rank in self.sharing_ranks])

    def _sequences(self, rows: np.ndarray, table: TokenizedRows) -> MicroBatch:
        if self.schedule.padding:
            return pad_rows(table, rows, pad_token_id=self.pad_token_id)
        concatenated = partial(concatenate_rows, pad_token_id=self.pad_token_id)
        if self.has_teacher and len(table.splits):
            # Row i is the documents 2 * i, the student's, and 2 * i + 1, its teacher's.
            return with_teacher(
                concatenated(table, rows), concatenated(table.as_documents, 2 * rows + 1)
            )
        num_parts = self.context_size
        if self.fills_up_rows_of(table):
            computed = table.learned_from(shares_prompts=self.shares_prompts)
            num_parts = filled_multiple(computed.of_micro_batch(rows))
        return concatenated(table, rows, shares_prompts=self.shares_prompts, num_parts=num_parts)

    def fills_up_rows_of(self, table: TokenizedRows) -> bool:
        """Whether micro-batches of these rows are filled up, if they have no padding."""
        has_teacher = self.has_teacher and len(table.splits) > 0
        return self.fills_up and self.context_size == 1 and not has_teacher

    def _with_images(self, batch: MicroBatch, rows: Round, table: TokenizedRows) -> MicroBatch:
        assert self.image_inputs is not None
        images, documents = self.image_inputs.of(table, rows[self.data_rank], batch)
        return dataclasses.replace(batch, images=images, documents=documents, calls_towers=True)


@dataclass(frozen=True, eq=False)
class Batches:
    """The micro-batches of a step or an evaluation.

    Iterating gives this rank's, one for each round.
    """

    collator: Collator
    table: TokenizedRows
    rows: np.ndarray
    """Indices of rows of `table`, int64."""
    rounds: Sequence[Round]

    def __len__(self) -> int:
        return len(self.rounds)

    def __iter__(self) -> Iterator[MicroBatch]:
        micro_batches = (self.collator.micro_batch(rows, self.table) for rows in self.rounds)
        # Only images take long enough, to be read and decoded, for a thread to be worth it.
        return _made_ahead(micro_batches) if len(self.table.images) else micro_batches

    @property
    def num_targets(self) -> int:
        """Tokens to predict, of all ranks."""
        return int(self.table.document_targets[self.table.learned_documents(self.rows)].sum())

    def sizes(self) -> dict[str, Any]:
        """Entries of a step's record that follow from its rows."""
        lengths = self.table.lengths
        computed = self.table.computed(shares_prompts=self.collator.shares_prompts)
        of_computed, of_lock_step = self.collator.schedule.useful_shares(
            self.rounds,
            lengths,
            computed,
            fills_up=self.collator.fills_up_rows_of(self.table),
        )
        return {
            "num_tokens": int(lengths[self.rows].sum()),
            "useful_of_computed": round(of_computed, 4),
            "useful_of_lock_step": round(of_lock_step, 4),
        }

    def describe_samples(self, places: Iterable[tuple[int, int]]) -> str:
        """The dataset's numbers of the rows at (round, rank) places, as text; of all rows without a
        place.
        """
        # Ranks that share a micro-batch have the same rows, which are named once.
        shared = {(index, rank // self.collator.context_size) for index, rank in places}
        chosen = [self.rounds[index][data_rank] for index, data_rank in sorted(shared)]
        return self.table.describe_numbers(np.concatenate(chosen) if chosen else self.rows)


def _made_ahead(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The micro-batches, up to `_AHEAD` of which a thread makes ahead.

    Its exceptions are raised here.
    """
    # One thread, since two cannot advance a generator; the order stays that of the rounds.
    thread = ThreadPoolExecutor(1, thread_name_prefix="images")
    # next() with a default: a StopIteration of the thread could not be raised in this generator.
    end: Any = object()
    try:
        ahead = deque(thread.submit(next, micro_batches, end) for _ in range(_AHEAD))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, micro_batches, end))
            yield item
    finally:
        # A caller that stops early, as on a signal, must not wait for images that nobody needs.
        thread.shutdown(wait=False, cancel_futures=True)
