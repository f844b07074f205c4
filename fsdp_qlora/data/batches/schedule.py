"""The schedule: which rows an optimizer step takes, and which micro-batches of them a rank takes.

Functions of options, seed and epoch alone, the same on every rank and in every run. A `RowSource`
gives a step's rows: rows in memory, or what else produces them step by step.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from fsdp_qlora.data.batches.graph_lengths import filled_length
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.shared_tokens import RowTokens
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import plural

Round = list[np.ndarray]
"""The rows of the micro-batches that all ranks compute at the same time, one for each rank."""

BEGINNING: Mapping[str, Any] = {}
EVAL_STREAM = 0x6576616C  # keeps the held-out rows independent of the order of any epoch
TOKENS_OF_AN_EMPTY_RANK = 2  # which has no rows in a round, and computes like the others
# Steps whose rounds are computed for an estimate of a whole run.
_STEPS_LOOKED_AT = 100
# keeps the rows that an epoch takes of a dataset independent of their order
MIXTURE_STREAM = 0x6D6978


def num_micro_batches(num_rows: int, batch_size: int, data_size: int) -> int:
    """Micro-batches of each rank for a step of `num_rows` rows, without packing."""
    return -(-num_rows // (data_size * batch_size))


@dataclass(frozen=True)
class Mixture:
    """The rows that an epoch takes of each dataset."""

    ends: tuple[int, ...]
    """The index after the last row of each dataset."""
    rows_per_epoch: tuple[int, ...]
    """Rows of each dataset, in the shares of the weights to within one row."""


def split_rows(rows: np.ndarray, ends: Sequence[int]) -> list[np.ndarray]:
    """Sorted row indices by dataset."""
    return np.split(rows, np.searchsorted(rows, ends[:-1]))


@dataclass(frozen=True)
class Schedule:
    """How rows become optimizer steps."""

    num_rows: int
    """Rows to train on."""
    batch_size: int
    """Rows of a rank in one micro-batch."""
    global_batch_size: int
    """Rows of an optimizer step on all ranks."""
    data_size: int
    """Ranks that get other rows than each other."""
    num_epochs: int
    max_steps: int
    seed: int | None
    """The seed of the order of the rows; None takes them in their own order in every epoch."""
    mixture: Mixture | None = None
    """The datasets' parts in an epoch; without it an epoch takes every row once."""
    batching: str = "padding_free"
    """padded: pad the rows of a micro-batch to the longest of them; padding_free: concatenate them;
    packed: concatenate as many as fit batch_size x context_length tokens.
    """
    context_length: int = 0
    """The maximum tokens per row; used by packing."""
    num_generations: int = 1
    """Rows that are made of each one to train on: answers to a prompt, all in one step."""
    num_iterations: int = 1
    """Steps in a row with the same rows."""

    @property
    def padding(self) -> bool:
        return self.batching == "padded"

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch. The last one takes the rows that are left."""
        return -(-self.num_rows // self.global_batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.steps_per_epoch * self.num_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    def describe(self, warmup_steps: int) -> str:
        """One line: rows, batch and steps."""
        micro_batches = num_micro_batches(self.global_batch_size, self.batch_size, self.data_size)
        ranks = plural(self.data_size, "rank")
        pieces = plural(micro_batches, "micro-batch", ending="es")
        order = ", rows in the dataset's order" if self.seed is None else ""
        return (
            f"Steps: {self.total_steps} of {self.global_batch_size} rows ({ranks} x "
            f"{self.batch_size} rows x {pieces}), {self.steps_per_epoch} per epoch, "
            f"{warmup_steps} of warm-up{order}"
        )

    def rows_of_steps(
        self, train_rows: np.ndarray, *, first: int = 0
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Give (step, its rows) for every step, beginning with step `first`."""
        for step in range(first, self.total_steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            # A function of seed and epoch alone: a run that continues in the middle of an epoch
            # gets the order that the first start had.
            if index == 0 or step == first:
                order = epoch_order(train_rows, seed=self.seed, epoch=epoch, mixture=self.mixture)
            # A row of a prompt becomes `num_generations` rows of the step, beside each other.
            size = self.global_batch_size // self.num_generations
            index = index // self.num_iterations
            yield step, order[index * size : (index + 1) * size].repeat(self.num_generations)

    def why_apart(self, *, in_rows: bool) -> str:
        """The reason why what shares a prompt is not computed together; empty if it is.

        Args:
            in_rows: whether the documents of each row share one. Otherwise answers do, which are
                rows of their own.
        """
        if self.padding:
            return "rows are padded"
        if in_rows:
            return ""
        if self.batching == "packed":
            return "rows are packed"
        if 1 in (self.batch_size, self.num_generations):
            return "a micro-batch has one answer to it"
        if self.global_batch_size % (self.batch_size * self.data_size):
            return "the rows of a step fill no whole micro-batches"
        sizes = sorted([self.batch_size, self.num_generations])
        if sizes[1] % sizes[0]:
            return (
                f"{self.num_generations} answers do not go into micro-batches of {self.batch_size}"
            )
        return ""

    def rounds(
        self, rows: np.ndarray, lengths: np.ndarray, prompts: np.ndarray | None = None
    ) -> list[Round]:
        """Split rows into micro-batches, in the order in which the ranks compute them together.

        Args:
            lengths: tokens of every row of the dataset.
            prompts: tokens that all answers to the prompt of a row share, of every row; with them,
                answers to one prompt stay together, for which there is no reason in `why_apart`.
        """
        sizes = {"data_size": self.data_size, "batch_size": self.batch_size}
        if prompts is not None:
            groups = rows.reshape(-1, self.num_generations)
            return split_by_prompts(groups, lengths, prompts, **sizes)
        if self.padding:
            return split_by_length(rows, lengths, **sizes)
        most_tokens = self.batch_size * self.context_length if self.batching == "packed" else None
        return split_by_tokens(rows, lengths, **sizes, most_tokens=most_tokens)

    def tokens_computed(self, micro_batch: np.ndarray, tokens: RowTokens) -> int:
        """Tokens that are computed for a micro-batch, padding included."""
        if not len(micro_batch):
            return TOKENS_OF_AN_EMPTY_RANK
        if self.padding:
            return len(micro_batch) * int(tokens.own[micro_batch].max())
        return tokens.of_micro_batch(micro_batch)

    def useful_shares(
        self,
        rounds: Sequence[Round],
        lengths: np.ndarray,
        computed: RowTokens | None = None,
        *,
        fills_up: bool = False,
    ) -> tuple[float, float]:
        """Useful tokens as a share of the computed tokens, and of the tokens that the time allows.

        In each round all ranks take as long as the one with the most tokens: the second share is of
        the tokens that all of them could compute in that time.

        Args:
            rounds: a step's micro-batches.
            computed: the tokens that are computed, if they are not all.
            fills_up: micro-batches without padding are filled up to lengths for which graphs are
                made.
        """
        counted = computed or RowTokens(lengths, np.arange(len(lengths)))
        tokens = [
            [self.tokens_computed(piece, counted) for piece in micro_batches]
            for micro_batches in rounds
        ]
        if fills_up and not self.padding:
            tokens = [[filled_length(number) for number in of_ranks] for of_ranks in tokens]
        useful = sum(int(lengths[piece].sum()) for piece in itertools.chain(*rounds))
        num_computed = sum(map(sum, tokens))
        num_possible = sum(self.data_size * max(of_ranks) for of_ranks in tokens)
        return useful / num_computed, useful / num_possible

    def rounds_of_first_steps(
        self, rows: np.ndarray, lengths: np.ndarray, prompts: np.ndarray | None = None
    ) -> list[list[Round]]:
        """The rounds of each of the first steps. Arguments as for `rounds`."""
        steps = itertools.islice(self.rows_of_steps(rows), _STEPS_LOOKED_AT)
        return [self.rounds(of_step, lengths, prompts) for _, of_step in steps]


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one optimizer step on all ranks."""

    step: int
    table: TokenizedRows
    rows: np.ndarray
    """Indices of rows of `table`, int64."""
    position: Mapping[str, Any] = field(default_factory=dict)
    """Where the source continues after them, as JSON for a checkpoint; empty where the step says
    it.
    """
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rows, for the step's record."""


class RowSource(Protocol):
    """Gives the same rows on every rank, and in every run with the same options."""

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, Any] = BEGINNING
    ) -> Iterator[StepRows]:
        """Give the rows of every step from `first` on.

        position: the source's position after the previous step.
        """


class RowsInMemory(NamedTuple):
    """Some rows of a table, in the order that the schedule gives an epoch."""

    table: TokenizedRows
    rows: np.ndarray

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, Any] = BEGINNING
    ) -> Iterator[StepRows]:
        for step, rows in schedule.rows_of_steps(self.rows, first=first):
            yield StepRows(step, self.table, rows)


def epoch_order(
    rows: np.ndarray, *, seed: int | None, epoch: int, mixture: Mixture | None = None
) -> np.ndarray:
    """The indices of an epoch's rows in its order, int64 [rows].

    Each row once, or the rows that the mixture takes. Without a seed, which a mixture needs, `rows`
    as they are.

    Of each dataset of a mixture, whose `rows` are sorted, an epoch takes the next ones, each at
    most once.
    """
    if seed is None:
        return rows.astype(np.int64)
    if mixture is not None:
        groups = split_rows(rows, mixture.ends)
        chosen = []
        for i, (group, count) in enumerate(zip(groups, mixture.rows_per_epoch, strict=True)):
            # One order for the whole run, of which each epoch takes the next `count` rows, from
            # the beginning again at the end: no row comes twice before all came once.
            order = _permutation(len(group), seed, i, MIXTURE_STREAM)
            places = np.arange(epoch * count, (epoch + 1) * count) % len(group)
            chosen.append(group[order[places]])
        rows = np.concatenate(chosen)
    return rows[_permutation(len(rows), seed, epoch)].astype(np.int64, copy=False)


def mix(shares: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows of each dataset in an epoch, in these shares.

    There are as many as there can be before a dataset would repeat a row.
    """
    most = min(size / share for size, share in zip(sizes, shares, strict=True))
    # The small addition keeps a whole quotient whole that division rounded down.
    total = max(1, int(most + 1e-9))
    # Largest remainders: rounded down, and then one more for those that lost the most.
    counts = [int(total * share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: counts[i] - total * shares[i])
    for i in itertools.islice(by_rest, total - sum(counts)):
        counts[i] += 1
    counts = [min(count, size) for count, size in zip(counts, sizes, strict=True)]
    if 0 in counts:
        raise UserError(
            f"dataset: with the shares {', '.join(f'{share:.1%}' for share in shares)} of "
            f"{total:,} rows an epoch has no row of dataset number {counts.index(0) + 1}. Raise "
            "its weight or use more rows."
        )
    return tuple(counts)


def split_by_length(
    rows: np.ndarray, lengths: np.ndarray, *, data_size: int, batch_size: int
) -> list[Round]:
    """The micro-batches of one optimizer step, for batches with padding.

    Rows are sorted by length, longest first, and split into equal micro-batches. What ranks compute
    at the same time is then about equally long, and memory peaks at the start of the step.

    Args:
        rows: indices of the step's rows, int64.
        lengths: tokens of every row of the dataset, so that lengths[rows] are the step's.
        batch_size: maximum rows per micro-batch.
    Returns:
        Rounds whose micro-batches are at most one row apart. Some are empty if the last step has
        fewer rows than micro-batches.
    """
    # Stable: rows of equal lengths keep their order, on every rank and with every version of numpy.
    by_length = rows[np.argsort(-lengths[rows], kind="stable")]
    num_pieces = data_size * num_micro_batches(len(rows), batch_size, data_size)
    return _in_rounds(np.array_split(by_length, num_pieces), data_size) if num_pieces else []


def _in_rounds(pieces: list[np.ndarray], data_size: int) -> list[Round]:
    return [pieces[i : i + data_size] for i in range(0, len(pieces), data_size)]


def split_by_tokens(
    rows: np.ndarray,
    lengths: np.ndarray,
    *,
    data_size: int,
    batch_size: int,
    most_tokens: int | None = None,
) -> list[Round]:
    """The micro-batches of one optimizer step, with about equal numbers of tokens.

    For batches without padding.

    Each row, longest first, goes to the micro-batch with the fewest tokens that has room (Graham
    1969). Micro-batches of about equal numbers of tokens are then computed in the same round, the
    largest first, so that ranks hardly wait for each other.

    Args:
        rows, lengths: as for `split_by_length`.
        batch_size: maximum rows per micro-batch.
        most_tokens: replaces it: as few micro-batches are made as hold at most this many tokens
            each.
    Returns:
        Rounds of micro-batches with their longest row first. Some are empty if there are fewer rows
        than micro-batches.
    """
    by_length = rows[np.argsort(-lengths[rows], kind="stable")]
    sizes = lengths[by_length].tolist()
    num_rounds = num_micro_batches(len(rows), batch_size, data_size)
    pieces = _deal(sizes, data_size * num_rounds, batch_size)
    if most_tokens is not None:
        # No fewer rounds have room for all tokens, however well they fit. Between that and what
        # unpacked batches need, bisection finds the least number in which everything fits.
        fewest = -(-sum(sizes) // (data_size * most_tokens))
        while fewest < num_rounds:
            middle = (fewest + num_rounds) // 2
            packed = _deal(sizes, data_size * middle, len(sizes))
            # `_deal` gives the largest piece first: if that fits, all do.
            if sum(sizes[i] for i in packed[0]) <= most_tokens:
                pieces = packed
                num_rounds = middle
            else:
                fewest = middle + 1
    return _in_rounds([by_length[piece] for piece in pieces], data_size)


def split_by_prompts(
    groups: np.ndarray,
    lengths: np.ndarray,
    prompts: np.ndarray,
    *,
    data_size: int,
    batch_size: int,
) -> list[Round]:
    """The micro-batches of one optimizer step in which answers share their prompts.

    A micro-batch has answers to one prompt, or all answers to some prompts. As in
    `split_by_tokens`, answers go to micro-batches so that these have about equal numbers of tokens.

    Args:
        groups: rows of the answers to each prompt, int64 [prompts of the step, answers]. Their
            number is a multiple of `batch_size`, or `batch_size` is a multiple of it.
        lengths: tokens of every row of the dataset.
        prompts: of these, tokens of its prompt.
        batch_size: rows per micro-batch.
    """
    by_length = np.argsort(-lengths[groups], axis=1, kind="stable")
    groups = np.take_along_axis(groups, by_length, axis=1)
    num_answers = groups.shape[1]
    if num_answers > batch_size:
        parts: list[np.ndarray] = []
        for group in groups:
            dealt = _deal(lengths[group].tolist(), num_answers // batch_size, batch_size)
            parts += [group[part] for part in dealt]
        groups = np.stack(parts)
    # The tokens of each part with its prompt once.
    sizes = lengths[groups].sum(axis=1) - (groups.shape[1] - 1) * prompts[groups[:, 0]]
    groups = groups[np.argsort(-sizes, kind="stable")]
    sizes = -np.sort(-sizes)
    dealt = _deal(sizes.tolist(), groups.size // batch_size, batch_size // groups.shape[1])
    return _in_rounds([groups[piece].ravel() for piece in dealt], data_size)


def _deal(sizes: list[int], num_pieces: int, most: int) -> list[list[int]]:
    """Deal what has these sizes, in descending order, into pieces of about equal sums.

    The largest piece comes first.

    Args:
        most: entries of a piece; all pieces together have room for all of them.
    """
    pieces: list[list[int]] = [[] for _ in range(num_pieces)]
    totals = [0] * num_pieces
    # A heap of the pieces that have room. Equal sums go by number: all ranks get the same result.
    smallest = [(0, i) for i in range(num_pieces)]
    for entry, size in enumerate(sizes):
        _, i = smallest[0]
        pieces[i].append(entry)
        totals[i] += size
        if len(pieces[i]) < most:
            heapq.heapreplace(smallest, (totals[i], i))
        else:
            heapq.heappop(smallest)
    return [pieces[i] for i in sorted(range(num_pieces), key=lambda i: -totals[i])]


def split_eval(num_rows: int, *, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a fraction of the rows for evaluation, and at least one row if it is above 0.

    Returns:
        (training rows, evaluation rows), both sorted int64 indices.
    """
    num_eval = max(1, round(num_rows * fraction)) if fraction > 0 else 0
    if num_eval >= num_rows:
        raise UserError(
            f"eval_fraction: {fraction} of {num_rows} rows leaves none to train on. Lower it or "
            "use more rows."
        )
    order = _permutation(num_rows, seed, 0, EVAL_STREAM)
    is_held_out = np.zeros(num_rows, np.bool_)
    is_held_out[order[:num_eval]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


# The last one is kept, eight bytes a row: a plan asks for it again and again, and sorting ten
# million numbers takes more than a second.
@lru_cache(maxsize=1)
def _permutation(size: int, *entropy: int) -> np.ndarray:
    """A random order of numbers, by sorting raw random bits.

    NumPy promises the same bits in every version, but not the same shuffle.
    """
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order
