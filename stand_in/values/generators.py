"""Random numbers: those that the CPU's generator would draw from the same seed after the same
draws.

So dropout and sampling on the device equal those of a run on the CPU. The device's generator only
has a seed and an offset, and programs put them back to draw the same again, as recompute does: the
CPU's states are kept by these two.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

STATES_KEPT = 2000  # of 5 KB
OFFSET_OF_A_DRAW = 4  # the device's generator moves on in fours

_states: dict[tuple[int, int], torch.Tensor] = {}
_drawing = threading.RLock()  # the CPU's generator is one for all threads


class Place(NamedTuple):
    """A generator of the device, and where it is before a draw."""

    generator: torch.Generator
    seed: int
    offset: int


def place_of(args: Any, kwargs: Any) -> Place | None:
    """Where the generator is that an operator with these arguments draws from; None if it is one of
    the CPU.
    """
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
    generator = next(given, None) or torch.cuda.default_generators[torch.cuda.current_device()]
    if generator.device.type != "cuda":
        return None
    return Place(generator, generator.initial_seed(), generator.get_offset())


def without_generator(value: Any) -> Any:
    """Arguments for the CPU, whose own generator draws."""
    if isinstance(value, dict):
        return {name: each for name, each in value.items() if name != "generator"}
    return tuple(None if isinstance(each, torch.Generator) else each for each in value)


def seed_of(*numbers: int) -> int:
    """A seed for a place from which no earlier draw has come here."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "little")


@contextlib.contextmanager
def drawing(place: Place | None) -> Iterator[None]:
    """Let the CPU draw as from `place`.

    The device's generator has moved on before, or it does now.
    """
    if place is None:
        yield
        return
    generator, seed, offset = place
    if generator.get_offset() == offset:
        generator.set_offset(offset + OFFSET_OF_A_DRAW)
    with _drawing:
        own = torch.default_generator
        before = own.get_state()
        if (seed, offset) in _states:
            own.set_state(_states[seed, offset])
        else:
            own.manual_seed(seed if offset == 0 else seed_of(seed, offset))
        try:
            yield
            _states[seed, generator.get_offset()] = own.get_state()
            while len(_states) > STATES_KEPT:
                del _states[next(iter(_states))]
        finally:
            own.set_state(before)


@contextlib.contextmanager
def drawing_in_graphs() -> Iterator[None]:
    """Let the graph that is launched meanwhile draw what its operators would draw without it.

    A replay first moves the generator on by all of its draws; here it goes back at the first of
    them, and to there after the last.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    _graph.before = generator.get_offset()
    _graph.after = None
    try:
        yield
    finally:
        after = _graph.after
        if after is not None:
            seed = generator.initial_seed()
            state = _states.get((seed, generator.get_offset()))
            if state is not None:
                _states[seed, after] = state
            generator.set_offset(after)
        _graph.before = None


class _Graph(threading.local):
    """Offsets of the generator before and after the graph that this thread launches."""

    before: int | None = None
    after: int | None = None


_graph = _Graph()


def begin_draws_of_graph() -> None:
    """Put the generator where it was before the launch, at the first operator of a graph."""
    if _graph.before is None or _graph.after is not None:
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    _graph.after = generator.get_offset()
    generator.set_offset(_graph.before)
