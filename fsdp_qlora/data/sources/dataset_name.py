"""Reads the words of --dataset and --eval_dataset: name, configuration, split, slice and weight."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_qlora.utils.errors import UserError

_WEIGHT = re.compile(r":([-+]?(?:\d+\.?\d*|\.\d+|nan|inf))$", re.IGNORECASE)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]$")
_SLICE = re.compile(r"(\d*):(\d*)$")
_SPLIT = re.compile(r"[\w.-]+$")


@dataclass(frozen=True)
class DatasetName:
    """Which rows of which dataset."""

    name: str
    """A name or path, without what follows it."""
    config: str | None = None
    """A configuration of a dataset on the hub."""
    split: str | None = None
    start: int = 0
    stop: int | None = None
    weight: float | None = None
    """Share of a mixture, relative to the weights of the others."""


def parse_name(text: str, *, weighted: bool = True) -> DatasetName:
    """Read `NAME`, `owner/name:config[split][start:stop]` or `rows.jsonl[:1000]`.

    A weight such as `:0.7` may follow.

    Args:
        weighted: whether a weight may follow.
    Raises:
        UserError: what is in brackets is neither a split nor a slice, or the weight is not a number
            above 0.
    """
    name = text.removeprefix("file://")
    weight = None
    if Path(name).expanduser().exists():  # a path may look like anything
        return DatasetName(name)
    if weighted and (match := _WEIGHT.search(name)):
        name = name[: match.start()]
        weight = float(match[1])
        if not 0 < weight < math.inf:
            raise UserError(f"dataset: the weight of {name} is {match[1]}. Give a number above 0.")
        if Path(name).expanduser().exists():
            return DatasetName(name, weight=weight)
    split = None
    start = 0
    stop = None
    # [train[:100]], as `datasets` writes it, becomes [train][:100].
    name = re.sub(r"\[([\w.-]+)(\[\d*:\d*\])\]$", r"[\1]\2", name)
    # From the end on: split and slice may be in any order.
    while match := _BRACKETS.search(name):
        inside = match[1]
        name = name[: match.start()]
        bounds = _SLICE.match(inside)
        if bounds:
            start = int(bounds[1] or 0)
            stop = int(bounds[2]) if bounds[2] else None
        elif split is None and _SPLIT.match(inside):
            split = inside
        else:
            raise UserError(
                f"dataset: [{inside}] in {text} is neither a split such as [train] nor a slice of "
                "rows such as [:1000] or [1000:2000]."
            )
    config = None
    if ":" in name and "://" not in name and not Path(name).expanduser().exists():
        name, _, config = name.partition(":")
    return DatasetName(name, config or None, split, start, stop, weight)


def check_weights(names: Sequence[DatasetName]) -> list[float] | None:
    """The shares of the datasets, which add up to 1; None without weights.

    Raises UserError if only some have a weight.
    """
    weights = [name.weight for name in names if name.weight is not None]
    if len(weights) not in (0, len(names)):
        without = ", ".join(name.name for name in names if name.weight is None)
        raise UserError(
            f"dataset: give each dataset a weight, or none of them. Without one: {without}."
        )
    return [weight / sum(weights) for weight in weights] if len(weights) > 1 else None


def parse_eval_names(words: Sequence[str]) -> dict[str, str]:
    """("chat=a.jsonl", "b.jsonl") -> {"chat": "a.jsonl", "b": "b.jsonl"}.

    Raises UserError if two names are alike.
    """
    named: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", word)
        if match:
            name, dataset = match.groups()
        else:
            # The name of the file or of the hub's dataset, without folders and suffixes.
            dataset = word
            name = Path(parse_name(dataset, weighted=False).name).name.partition(".")[0]
        if name in named:
            raise UserError(
                f"eval_dataset: {named[name]} and {dataset} are both called {name}. Give them "
                f"names: {name}={named[name]} {name}_2={dataset}."
            )
        named[name] = dataset
    return named
