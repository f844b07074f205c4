"""Finds the largest micro-batch of a run among millions of steps.

numpy deals the rows of thousands of steps at once. It tells the tokens of each step's largest
micro-batch, or a bound for them; only the steps that may have the largest one are then split into
micro-batches as the run splits them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fsdp_qlora.data.batches.schedule import (
    TOKENS_OF_AN_EMPTY_RANK,
    Schedule,
    epoch_order,
    num_micro_batches,
)
from fsdp_qlora.data.batches.shared_tokens import RowTokens

# Entries that are dealt at once: their sums stay in a processor's cache.
_SUMS_AT_ONCE = 2**18
_ROWS_AT_ONCE = 2**21
# Fewer steps are faster one by one.
_FEWEST_STEPS = 32
_FULL = 2**60  # tokens, more than a micro-batch has: it gets no more rows


def longest_micro_batch(
    schedule: Schedule, train_rows: np.ndarray, lengths: np.ndarray, computed: RowTokens
) -> tuple[np.ndarray, int]:
    """The rows of the run's largest micro-batch by tokens, and the maximum rounds per step.

    Among several of as many tokens it is the first.

    Args:
        lengths: tokens of every row of the dataset.
        computed: tokens that one pass of the model computes.
    """
    longest = train_rows[:0]
    most_rounds = 0
    most_tokens = schedule.tokens_computed(longest, computed)
    for steps in _steps_at_once(schedule, train_rows):
        bounds = _bounds(schedule, steps, lengths, computed)
        most_rounds = max(most_rounds, bounds.num_rounds)
        found = -1  # the place of `longest` among these steps; earlier ones are in front of all
        for place in np.argsort(-bounds.tokens, kind="stable"):
            bound = bounds.tokens[place]
            # Of the steps behind this one none has a higher bound, nor the same one earlier.
            if bound < most_tokens or (bound == most_tokens and place > found):
                break
            rows = steps[place].repeat(schedule.num_generations)
            rounds = schedule.rounds(rows, lengths, computed.prompts)
            most_rounds = max(most_rounds, len(rounds))
            for piece in itertools.chain(*rounds):
                tokens = schedule.tokens_computed(piece, computed)
                is_earlier = tokens == most_tokens and place < found
                if tokens > most_tokens or is_earlier:
                    longest = piece
                    most_tokens = tokens
                    found = int(place)
    return longest, most_rounds


def most_values_packed(
    values: np.ndarray, lengths: np.ndarray, *, most_tokens: int, most_rows: int
) -> int:
    """A bound for the sum of rows' values in a micro-batch that packing fills.

    Rows with the most values per token come first, and of the last one as large a part as fits
    (Dantzig 1957). A step's rows with the most values are a bound, too; the smaller one counts.

    Args:
        values: of each row, int64.
        lengths: tokens of each row.
        most_tokens: of a micro-batch.
        most_rows: of a step.
    """
    per_token = values / lengths
    densest_first = np.argsort(-per_token, kind="stable")
    ends = np.cumsum(lengths[densest_first])
    room = most_tokens - (ends - lengths[densest_first])
    parts = np.clip(room / lengths[densest_first], 0, 1)
    of_tokens = math.ceil((values[densest_first] * parts).sum())
    of_rows = int(-np.sort(-values)[:most_rows].sum())
    return min(of_tokens, of_rows)


def _steps_at_once(schedule: Schedule, train_rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of steps, [steps, rows], in the order of the run, each generation once."""
    size = schedule.global_batch_size // schedule.num_generations
    num_pieces = schedule.data_size * num_micro_batches(
        schedule.global_batch_size, schedule.batch_size, schedule.data_size
    )
    at_once = max(1, min(_SUMS_AT_ONCE // num_pieces, _ROWS_AT_ONCE // schedule.global_batch_size))
    for epoch in range(schedule.num_epochs):
        steps = schedule.total_steps - epoch * schedule.steps_per_epoch
        steps = min(steps, schedule.steps_per_epoch)
        if steps <= 0:
            return
        order = epoch_order(train_rows, seed=schedule.seed, epoch=epoch, mixture=schedule.mixture)
        num_full, num_left = divmod(len(order), size)
        num_needed = -(-steps // schedule.num_iterations)
        full = order[: min(num_needed, num_full) * size].reshape(-1, size)
        yield from (full[first : first + at_once] for first in range(0, len(full), at_once))
        if num_needed > num_full and num_left:
            yield order[-num_left:].reshape(1, -1)


class _Bounds(NamedTuple):
    """Bounds of some steps.

    tokens: at least as many as of each step's largest micro-batch, [steps]. num_rounds: at most
    the maximum rounds of a step, and these where the steps are not split one by one.
    """

    tokens: np.ndarray
    num_rounds: int


def _bounds(
    schedule: Schedule, steps: np.ndarray, lengths: np.ndarray, computed: RowTokens
) -> _Bounds:
    """Look at some steps with equally many rows."""
    if len(steps) < _FEWEST_STEPS:
        return _Bounds(np.full(len(steps), _FULL), 0)
    if computed.prompts is not None:
        return _with_prompts(schedule, steps, lengths, computed)
    rows = steps.repeat(schedule.num_generations, axis=1)
    sizes = _Sizes.longest_first(lengths[rows], computed.own[rows])
    num_rounds = num_micro_batches(rows.shape[1], schedule.batch_size, schedule.data_size)
    num_pieces = num_rounds * schedule.data_size
    if schedule.padding:
        return _Bounds(_largest_padded(sizes.own, num_pieces), num_rounds)
    if schedule.batching == "packed":
        return _packed(schedule, sizes, num_rounds)
    return _Bounds(_largest_dealt(sizes, num_pieces, schedule.batch_size).own, num_rounds)


class _Sizes(NamedTuple):
    """Tokens of what is dealt in each step, the largest first, [entries, steps].

    dealt: by which it is dealt. own: those that a model computes.
    """

    dealt: np.ndarray
    own: np.ndarray

    @classmethod
    def longest_first(cls, dealt: np.ndarray, own: np.ndarray) -> "_Sizes":
        """Sort what is dealt. Both are [steps, entries]."""
        if np.array_equal(dealt, own):
            # By value: it does not matter which of two equal ones is which.
            ordered = np.ascontiguousarray(-np.sort(-dealt, axis=1).T)
            return cls(ordered, ordered)
        order = np.argsort(-dealt, axis=1, kind="stable")
        by_length = [np.take_along_axis(tokens, order, axis=1) for tokens in (dealt, own)]
        return cls(*(np.ascontiguousarray(tokens.T) for tokens in by_length))

    def of_steps(self, places: np.ndarray) -> "_Sizes":
        dealt = self.dealt[:, places]
        return _Sizes(dealt, dealt if self.own is self.dealt else self.own[:, places])


def _largest_padded(own: np.ndarray, num_pieces: int) -> np.ndarray:
    """The tokens of each step's largest micro-batch, split and padded as `split_by_length` does."""
    num_entries, num_steps = own.shape
    largest = np.full(num_steps, TOKENS_OF_AN_EMPTY_RANK)
    ends = np.cumsum([len(piece) for piece in np.array_split(np.arange(num_entries), num_pieces)])
    for first, end in itertools.pairwise([0, *ends]):
        if end > first:
            padded = (end - first) * own[first:end].max(axis=0)
            largest = np.maximum(largest, padded)
    return largest


class _Largest(NamedTuple):
    """Sums of the largest piece of each step, [steps], as in `_Sizes`."""

    dealt: np.ndarray
    own: np.ndarray


def _largest_dealt(sizes: _Sizes, num_pieces: int, most: int) -> _Largest:
    """The sums of each step's largest piece, dealt as `schedule._deal` does.

    Args:
        most: entries of a piece.
    """
    num_entries, num_steps = sizes.dealt.shape
    places = np.arange(num_steps)
    # A piece's sum, and its number in the last bits: the least is the piece that gets an entry.
    num_bits = num_pieces.bit_length()
    keys = np.repeat(np.arange(num_pieces)[:, None], num_steps, axis=1)
    counts = np.zeros_like(keys) if most < num_entries else None
    own = np.zeros_like(keys) if sizes.own is not sizes.dealt else None
    for entry in range(num_entries):
        if entry < num_pieces and sizes.dealt[entry].all():
            piece = np.full(num_steps, entry)  # each has none before
        else:
            piece = keys.min(axis=0) & (2**num_bits - 1)
        keys[piece, places] += sizes.dealt[entry] << num_bits
        if own is not None:
            own[piece, places] += sizes.own[entry]
        if counts is not None:
            counts[piece, places] += 1
            keys[piece, places] += (counts[piece, places] == most) * _FULL
    dealt = (keys % _FULL) >> num_bits
    largest = (dealt if own is None else own).max(axis=0)
    # Some pieces may be empty.
    return _Largest(dealt.max(axis=0), np.maximum(largest, TOKENS_OF_AN_EMPTY_RANK))


def _packed(schedule: Schedule, sizes: _Sizes, num_rounds: int) -> _Bounds:
    """Bounds of packed micro-batches, by the bisection of `split_by_tokens`."""
    data_size = schedule.data_size
    most_tokens = schedule.batch_size * schedule.context_length
    unpacked = _largest_dealt(sizes, data_size * num_rounds, schedule.batch_size)
    tokens = unpacked.own
    fewest = -(-sizes.dealt.sum(axis=0) // (data_size * most_tokens))
    rounds = np.full(len(tokens), num_rounds)
    while (is_open := fewest < rounds).any():
        middles = np.where(is_open, (fewest + rounds) // 2, -1)
        for middle in np.unique(middles[is_open]):
            places = np.flatnonzero(middles == middle)
            of_steps = sizes.of_steps(places)
            packed = _largest_dealt(of_steps, data_size * int(middle), len(sizes.dealt))
            fits = packed.dealt <= most_tokens
            tokens[places[fits]] = packed.own[fits]
            rounds[places[fits]] = middle
            fewest[places[~fits]] = middle + 1
    return _Bounds(tokens, int(rounds.max()))


def _with_prompts(
    schedule: Schedule, steps: np.ndarray, lengths: np.ndarray, computed: RowTokens
) -> _Bounds:
    """Bounds of micro-batches in which answers share their prompts, as of `split_by_prompts`.

    All answers to a prompt are the same row, and equally long.
    """
    assert computed.prompts is not None
    batch_size = schedule.batch_size
    answers = min(schedule.num_generations, batch_size)
    shared = (answers - 1) * computed.prompts[steps]
    own = answers * computed.own[steps] - shared
    num_pieces = steps.shape[1] * schedule.num_generations // batch_size
    num_rounds = -(-num_pieces // schedule.data_size)
    if schedule.num_generations >= batch_size:
        return _Bounds(own.max(axis=1), num_rounds)
    sizes = _Sizes.longest_first(answers * lengths[steps] - shared, own)
    largest = _largest_dealt(sizes, num_pieces, batch_size // answers)
    return _Bounds(largest.own, num_rounds)
