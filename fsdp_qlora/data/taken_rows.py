"""Which rows of a large dataset a run takes whose steps end before an epoch."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.schedule import split_rows
from fsdp_qlora.data.options import DataOptions
from fsdp_qlora.data.sources.dataset_name import parse_name
from fsdp_qlora.data.sources.places import NUM_PLACES, about_rows, at_places, is_from_beginning
from fsdp_qlora.data.sources.source import DEFAULT_SAMPLES, Source

log = logging.getLogger("fsdp_qlora")

TAKEN = "taken"
"""The key of what a run takes of each dataset, in its provenance."""
# All rows of a smaller dataset are read: they take a minute.
_LEAST_ROWS = 131_072
# A dataset has at least so many times the rows that are taken of it.
_WORTH = 2
# Rows that are read for each that is needed, and besides: rows differ in length, some cannot be
# used, and others equal each other.
_MARGIN = 1.25
_BESIDES = 1000


@dataclass(frozen=True)
class NeededRows:
    """The rows that the steps of a run take."""

    count: int
    """Rows to train on, or prompts."""
    taken: Sequence[Mapping[str, Any]] | None = None
    """The part of each dataset that the run has taken at its beginning, if this start may continue
    it.
    """


@dataclass(frozen=True)
class Taken:
    """The rows of a dataset that a run takes; all of them without a share and a number."""

    share: float | None = None
    """Share of the dataset that is read, at places spread evenly over it."""
    first: int | None = None
    """The number of first rows, for a run that takes rows in their own order."""

    @property
    def is_part(self) -> bool:
        """Whether it is not all rows."""
        return self != ALL

    def of(self, source: Source) -> Source:
        """The rows of a source."""
        if self.share is not None:
            return at_places(source, self.share)
        return source if self.first is None else source.slice(0, self.first)

    def describe(self, dataset: str) -> str:
        """One line: how many rows, and from where."""
        if self.first is not None:
            return f"Rows taken: the first {self.first:,} of {dataset}"
        return (
            f"Rows taken: {self.share:.2%} of {dataset}, from {NUM_PLACES:,} places spread over it"
        )


ALL = Taken()


def choose_taken(
    needed: NeededRows | None,
    options: DataOptions,
    sources: Mapping[str, Source],
    shares: Sequence[float] | None,
) -> list[Taken]:
    """Choose the part that is taken of each dataset, and say so where it is not all.

    It depends on the options and the datasets alone, so it is the same on all ranks, and in a dry
    run.

    Args:
        needed: of the run; None for one that takes all rows.
        sources: of the datasets that have one, by their names.
        shares: of the datasets in the rows of a step, if they have weights.
    """
    datasets = options.dataset
    if needed is None:
        return [ALL for _ in datasets]
    if needed.taken is not None and len(needed.taken) in (0, len(datasets)):
        taken = taken_of_json(needed.taken, len(datasets))
    else:
        taken = _choose(needed.count, options, sources, shares)
    if not all(map(_can_give, map(sources.get, datasets), taken)):
        # The datasets of the run that continues had another form: as other rows they are refused.
        taken = _choose(needed.count, options, sources, shares)
    for dataset, each in zip(datasets, taken, strict=True):
        if each.is_part:
            log.info("%s, for --max_steps (%s rows)", each.describe(dataset), f"{needed.count:,}")
    return taken


def _can_give(source: Source | None, taken: Taken) -> bool:
    """Whether a source is one of which this can be taken."""
    if not taken.is_part:
        return True
    return source is not None and (taken.share is None or _can_be_divided(source))


def _can_be_divided(source: Source) -> bool:
    """Whether the source is a whole dataset of which a part can be read."""
    is_whole = source.start == 0 and source.stop is None
    return is_whole and not source.varies and not is_from_beginning(source)


def _choose(
    count: int,
    options: DataOptions,
    sources: Mapping[str, Source],
    shares: Sequence[float] | None,
) -> list[Taken]:
    usable = (1 - options.eval_fraction) * (1 - options.max_bad_rows)
    wanted = math.ceil(_MARGIN * count / usable) if usable > 0 else math.inf
    in_all = [_about_rows(dataset, options, sources) for dataset in options.dataset]
    if shares:
        return [
            _part(share * wanted, total, options)
            for share, total in zip(shares, in_all, strict=True)
        ]
    if None in in_all or (len(in_all) > 1 and not options.shuffle):
        return [ALL for _ in in_all]
    # Of each dataset the same part, so that they stay in the shares that an epoch has.
    return [_part(wanted, sum(total or 0 for total in in_all), options)] * len(in_all)


def _part(wanted: float, in_all: int | None, options: DataOptions) -> Taken:
    """The part that is taken of rows. in_all: their number; None if all have to be read."""
    count = wanted + _BESIDES
    if in_all is None or in_all < _LEAST_ROWS or in_all < _WORTH * count:
        return ALL
    return Taken(share=count / in_all) if options.shuffle else Taken(first=math.ceil(count))


def _about_rows(dataset: str, options: DataOptions, sources: Mapping[str, Source]) -> int | None:
    """About the number of rows of a dataset; None if a part of it cannot be taken."""
    source = sources.get(dataset)
    if source is None or options.dataset_samples or parse_name(dataset).name in DEFAULT_SAMPLES:
        return None
    return about_rows(source, _LEAST_ROWS) if _can_be_divided(source) else None


def are_enough(
    needed: int,
    taken: Sequence[Taken],
    train_rows: np.ndarray,
    ends: Sequence[int],
    shares: Sequence[float] | None,
) -> bool:
    """Whether the rows that were taken are enough for all steps.

    Args:
        needed: rows to train on.
        train_rows: sorted indices of the rows to train on.
        ends: the index after the last row of each dataset.
        shares: as for `choose_taken`.
    """
    if not any(each.is_part for each in taken):
        return True
    if not shares:
        return len(train_rows) >= needed
    groups = split_rows(train_rows, ends)
    return all(
        len(group) > share * needed  # an epoch may have one more, by rounding
        for each, group, share in zip(taken, groups, shares, strict=True)
        if each.is_part
    )


def taken_as_json(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """The part of each dataset, for a run's record; empty if it is all rows of all."""
    if not any(each.is_part for each in taken):
        return []
    return [dataclasses.asdict(each) for each in taken]


def taken_of_json(taken: Sequence[Mapping[str, Any]] | None, num_datasets: int) -> list[Taken]:
    """The reverse of `taken_as_json`."""
    return [Taken(**each) for each in taken or ()] or [ALL] * num_datasets
