"""Tries ways of computing a part beside the plain one: is each right, and how long does it take?

A way is right if it gives the plain way's bits. Where its sums may have another order, it is right
if it is as near to the result in float64 as the plain way is.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN

Way = Callable[..., Sequence[torch.Tensor]]

# Of the plain way's own distance from float64.
_SLACK = 1.1
_TIMES = 5
_LONGEST_REASON = 60  # characters
OTHER_NUMBERS = "other numbers"


class Trial(NamedTuple):
    """A part's ways on one set of inputs.

    ways: by name, the plain one among them. Each returns its results, and may overwrite the inputs.
    inputs: copied for each call. exact: the same in float64, where other bits may be right.
    """

    ways: Mapping[str, Way]
    inputs: tuple[torch.Tensor, ...] = ()
    exact: Way | None = None

    @classmethod
    def of(
        cls,
        ways: Mapping[str, object],
        compute: Callable[..., list[torch.Tensor]],
        *inputs: torch.Tensor,
        exact: Way | None = None,
    ) -> "Trial":
        """A trial of `compute`, whose first argument is a way's functions, then the inputs."""
        return cls({name: partial(compute, way) for name, way in ways.items()}, inputs, exact)

    def results(self, way: str) -> list[torch.Tensor]:
        """The results of a way."""
        return [*self.ways[way](*self.copies())]

    def copies(self) -> list[torch.Tensor]:
        """The inputs in memory of their own, in the layout that they have."""
        return [each.clone(memory_format=torch.preserve_format) for each in self.inputs]


class PartTrials(NamedTuple):
    """How a part's ways are tried.

    part: its name in `Ways`. ways: the names of those beside the plain one. proofs: make trials of
    sizes at which a way must be right. timed: makes one of the run's longest micro-batch. apart:
    ways whose first call compiles code or loads a compiler, which may crash or hang. missing: why
    other ways are not here.
    """

    part: str
    ways: Sequence[str]
    proofs: Sequence[Callable[[], Trial]]
    timed: Callable[[], Trial]
    apart: Sequence[str] = ()
    missing: Mapping[str, str] = {}


def why_wrong(make: Callable[[], Trial], ways: Sequence[str]) -> dict[str, str]:
    """For each way a reason not to take it, empty if it is right."""
    reasons: dict[str, str] = {}
    try:
        trial = make()
        expected = trial.results(PLAIN)
        exact = [*trial.exact(*trial.copies())] if trial.exact else None
    except Exception as error:
        return dict.fromkeys(ways, reason_of(error))
    for way in ways:
        try:
            found = trial.results(way)
            is_right = _are_equal(found, expected)
            if not is_right and exact is not None:
                is_right = _are_as_near(found, expected, exact)
            reasons[way] = "" if is_right else OTHER_NUMBERS
        # Of a compiler, a driver or a library: the plain way is always there.
        except Exception as error:
            reasons[way] = reason_of(error)
    return reasons


def milliseconds(trial: Trial, way: str, device: torch.device) -> float:
    """The median time of a way, after one call that is not measured."""
    times = []
    for _ in range(_TIMES + 1):
        inputs = trial.copies()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            start.record()
            trial.ways[way](*inputs)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            trial.ways[way](*inputs)
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def reason_of(error: Exception) -> str:
    """An error in a few words."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST_REASON].rstrip(". ") if lines else type(error).__name__


def _are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _are_as_near(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> bool:
    # A result that is not finite is not near: no comparison with NaN holds.
    return all(
        (a.double() - e).norm().item() <= _SLACK * (b.double() - e).norm().item()
        for a, b, e in zip(found, expected, exact, strict=True)
    )
