"""The order of rows: pure functions of (seed, epoch), the same in every rank and every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsdp_qlora.errors import UserError

if TYPE_CHECKING:
    from fsdp_qlora.data.rows import TokenizedRows

EVAL_STREAM = 0x6576616C  # keeps the held-out rows independent of the order of any epoch


@dataclass(frozen=True)
class Schedule:
    """How rows become optimizer steps.

    batch_size: rows per rank and micro-batch. total_steps: optimizer steps of the whole run. rows_per_step: where a run
    goes on that was started with another product of the three factors.
    """

    num_rows: int
    batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    num_epochs: int
    max_steps: int
    seed: int
    rows_per_step: int | None = None

    @property
    def global_batch_size(self) -> int:
        return self.rows_per_step or self.batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.num_rows, global_batch_size=self.global_batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.num_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def describe(self, warmup_steps: int) -> str:
        """One line: rows, batch and steps."""
        micro_batches = -(-self.global_batch_size // (self.world_size * self.batch_size))
        return (
            f"Steps: {self.total_steps} of {self.global_batch_size} rows ({self.world_size} rank"
            f"{'s' * (self.world_size > 1)} x {self.batch_size} rows x {micro_batches} "
            f"micro-batch{'es' * (micro_batches > 1)}), {self.steps_per_epoch} per epoch of "
            f"{self.num_rows} rows, {warmup_steps} of warm-up"
        )

    def rows_of_steps(self, train_rows: np.ndarray, *, first: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """(step, its rows) for every step from `first` on: a pure function of (seed, epoch)."""
        for step in range(first, self.total_steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            if index == 0 or step == first:
                order = epoch_order(train_rows, seed=self.seed, epoch=epoch)
            yield step, order[index * self.global_batch_size : (index + 1) * self.global_batch_size]


def epoch_order(rows: int | np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Shuffle the rows of one epoch.

    Args:
        rows: how many there are, or their indices (a subset, such as the training rows).
    Returns:
        Each row once, int64 [rows].
    """
    indices = np.arange(rows) if isinstance(rows, int) else rows
    return indices[_permutation(len(indices), [seed, epoch])].astype(np.int64)


def steps_per_epoch(num_rows: int, *, global_batch_size: int) -> int:
    """Optimizer steps of one epoch; the last one takes what is left."""
    return -(-num_rows // global_batch_size)


def split_step(
    rows: np.ndarray, lengths: np.ndarray, *, world_size: int, rank: int, batch_size: int
) -> list[np.ndarray]:
    """The micro-batches of one rank for the rows of one optimizer step.

    Rows are sorted by length, longest first, cut into equal micro-batches and dealt one per rank in turn:
    what ranks compute at the same time is about equally long, and memory peaks at the start of the step.

    Args:
        rows: indices of the step's rows, int64.
        lengths: tokens of every row of the dataset, so that lengths[rows] are the step's.
        batch_size: most rows of a micro-batch.
    Returns:
        As many micro-batches in every rank, their sizes at most one row apart. Some are empty when a last
        step has fewer rows than micro-batches.
    """
    by_length = rows[np.argsort(-lengths[rows], kind="stable")]
    num_micro_batches = -(-len(rows) // (world_size * batch_size))
    pieces = np.array_split(by_length, num_micro_batches * world_size) if num_micro_batches else []
    return pieces[rank::world_size]


def split_eval(tokenized: TokenizedRows, *, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold out rows for evaluation: (training rows, evaluation rows), both sorted int64 indices.

    A fraction above 0 holds out at least one row.

    Raises:
        UserError: no row would be left for training.
    """
    num_rows = len(tokenized)
    num_eval = max(1, round(num_rows * fraction)) if fraction > 0 else 0
    if num_eval >= num_rows:
        raise UserError(
            f"eval_fraction: {fraction} of {num_rows} rows leaves none to train on. Lower it or use more rows."
        )
    order = _permutation(num_rows, [seed, 0, EVAL_STREAM])
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])


def _permutation(size: int, entropy: list[int]) -> np.ndarray:
    """Sort raw random bits: NumPy promises these to stay the same over versions, a shuffle's order not."""
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(size)
    return np.argsort(bits, kind="stable")
