"""First tokens that documents of a micro-batch share, which a model computes once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Tokens that are compared of each pair at first.
_FEWEST_COMPARED = 16


class SharedTokens(NamedTuple):
    """First tokens of documents of a micro-batch that the model computes for another one.

    counts: their number, for each document. sources: the place of that other document; where there
    is none, the document's own place.
    """

    counts: Sequence[int] | np.ndarray
    sources: Sequence[int] | np.ndarray


def shared_in_pairs(num_shared: np.ndarray) -> SharedTokens:
    """The shared tokens of pairs of documents.

    num_shared: how many of its first tokens the second document of each pair shares, int64 [pairs].
    """
    counts = np.zeros(2 * len(num_shared), np.int64)
    counts[1::2] = num_shared
    return SharedTokens(counts, np.arange(len(num_shared)).repeat(2) * 2)


def shared_in_groups(groups: np.ndarray, prompts: np.ndarray) -> SharedTokens:
    """The shared tokens of documents that have their prompt in common with others of their group.

    Args:
        groups: the group of each document, int64 [documents].
        prompts: tokens of its prompt, int64 [documents].
    """
    _, firsts, places = np.unique(groups, return_index=True, return_inverse=True)
    sources = firsts[places]
    is_first = sources == np.arange(len(groups))
    return SharedTokens(np.where(is_first, 0, prompts), sources)


def shared_of_prompts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens of prompts that their answers share, int64 [prompts]: all but the last.

    The last one predicts another token in each answer; shared, it would have their gradients in any
    order.

    lengths: tokens of each prompt.
    """
    return np.asarray(lengths, np.int64) - 1


def num_equal(
    ids: np.ndarray, firsts: np.ndarray, seconds: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """The number of tokens that two texts of each pair begin with in common, int64 [pairs].

    Args:
        ids: tokens of all texts, int32 [tokens].
        firsts, seconds: where the two texts of each pair begin.
        lengths: tokens of the shorter text of each pair, which are compared.
    """
    counts = np.zeros(len(lengths), np.int64)
    left = np.flatnonzero(lengths)
    width = _FEWEST_COMPARED
    # As many tokens again as were compared before, of the pairs that do not differ yet.
    while len(left):
        done = counts[left]
        # Behind the last text there are tokens, too, which no pair counts.
        filled = np.concatenate([ids, np.zeros(width, ids.dtype)])
        is_other = _tokens_from(filled, firsts[left] + done, width) != _tokens_from(
            filled, seconds[left] + done, width
        )
        num_same = np.where(is_other.any(axis=1), is_other.argmax(axis=1), width)
        counts[left] = np.minimum(done + num_same, lengths[left])
        left = left[(num_same == width) & (counts[left] < lengths[left])]
        width *= 2
    return counts


def _tokens_from(ids: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
    """Copy `width` tokens from each of these places on, [places, width]."""
    # A run of tokens as one value, which is copied at once.
    run = np.dtype((np.void, width * ids.itemsize))
    runs = np.ndarray(len(ids) - width + 1, run, ids, strides=(ids.itemsize,))
    return runs[places].view(ids.dtype).reshape(len(places), width)


class RowTokens(NamedTuple):
    """Tokens of the rows of a table that a model computes.

    own: of each row by itself, int64 [rows]. groups: the group of each row, int64 [rows]. prompts:
    the tokens of its prompt, int64 [rows], which rows of a group share in a micro-batch; None where
    they share nothing.
    """

    own: np.ndarray
    groups: np.ndarray
    prompts: np.ndarray | None = None

    def of_micro_batch(self, rows: np.ndarray) -> int:
        """The tokens that are computed for a micro-batch without padding."""
        tokens = self.own[rows].sum()
        if self.prompts is not None:
            shared = shared_in_groups(self.groups[rows], self.prompts[rows])
            tokens -= np.sum(shared.counts)
        return int(tokens)
