"""Mixtures: several datasets in one run, one after the other or in given shares."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_qlora.data.dataset_names import DatasetName
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.errors import UserError


@dataclass(frozen=True)
class Mixture:
    """How many rows of each dataset an epoch takes."""

    ends: tuple[int, ...]
    """Where each dataset ends among all rows."""
    rows_per_epoch: tuple[int, ...]
    """Of each dataset, together in the shares of the weights to within one row."""

    def rows_of_epoch(self, rows: np.ndarray, epoch: int, shuffled: Sequence[np.ndarray]) -> np.ndarray:
        """The rows of one epoch, each at most once: the next ones of each dataset, which begins anew at its end.

        Args:
            rows: indices of the rows to train on, sorted.
            shuffled: for each dataset the order in which its rows are taken.
        """
        chosen = []
        for group, order, count in zip(split_rows(rows, self.ends), shuffled, self.rows_per_epoch, strict=True):
            chosen.append(group[order[np.arange(epoch * count, (epoch + 1) * count) % len(group)]])
        return np.concatenate(chosen)


def split_rows(rows: np.ndarray, ends: Sequence[int]) -> list[np.ndarray]:
    """Sorted row indices by dataset."""
    return np.split(rows, np.searchsorted(rows, ends[:-1]))


def check_weights(names: Sequence[DatasetName]) -> list[float] | None:
    """The shares of the datasets, which add up to 1; None where no weights are given, so that all rows are taken.

    Raises:
        UserError: some have a weight and some have none.
    """
    weights = [name.weight for name in names if name.weight is not None]
    if len(weights) not in (0, len(names)):
        without = ", ".join(name.name for name in names if name.weight is None)
        raise UserError(f"dataset: give each dataset a weight, or none of them. Without one: {without}.")
    return [weight / sum(weights) for weight in weights] if len(weights) > 1 else None


def mix(shares: Sequence[float], sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows of each dataset in an epoch: as many as there can be in these shares before one would repeat a row.

    Args:
        sizes: rows of each dataset.
    Raises:
        UserError: a dataset would give no row.
    """
    total = max(1, int(min(size / share for size, share in zip(sizes, shares, strict=True)) + 1e-9))
    counts = [int(total * share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: counts[i] - total * shares[i])
    for i in itertools.islice(by_rest, total - sum(counts)):
        counts[i] += 1
    counts = [min(count, size) for count, size in zip(counts, sizes, strict=True)]
    if 0 in counts:
        raise UserError(
            f"dataset: with the shares {', '.join(f'{share:.1%}' for share in shares)} of {total:,} rows an epoch "
            f"has no row of dataset number {counts.index(0) + 1}. Raise its weight or use more rows."
        )
    return tuple(counts)


def continue_numbers(parts: Sequence[TokenizedRows]) -> list[TokenizedRows]:
    """The rows of several datasets, whose numbers continue from dataset to dataset."""
    last = np.cumsum([0, *(int(part.row_numbers.max(initial=0)) for part in parts)])
    return [
        dataclasses.replace(part, row_numbers=part.row_numbers + first)
        for part, first in zip(parts, last, strict=False)
    ]
