"""Which way each part of a model is computed in this process.

A part has a plain way, which is torch's or the library's, and other ways. A run chooses among them
at its start (run/ways.py); until then, and everywhere else, all parts take the plain way.

The choice is the process's own: autograd's threads, quantized layers and attention functions that
transformers calls by name all read it.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

PLAIN = "plain"
TRITON = "triton"
LEAN = "lean"  # linear layers with adapters, computed together
GRAPHS = "graphs"  # decoder blocks as CUDA graphs


class Ways(NamedTuple):
    """The name of the way of each part."""

    rotary: str = PLAIN
    gate: str = PLAIN
    norm: str = PLAIN
    decoding: str = PLAIN
    rounding: str = PLAIN
    loss: str = PLAIN
    attention: str = PLAIN
    experts: str = PLAIN
    linears: str = PLAIN
    blocks: str = PLAIN
    answers: str = PLAIN


def ways_of_option(kernels: str) -> Ways:
    """The ways that --kernels stands for by itself, whatever the device is."""
    return Ways() if kernels == PLAIN else Ways(linears=LEAN)


class _State:
    ways = Ways()


def ways_in_use() -> Ways:
    """The ways of this process."""
    return _State.ways


def use_ways(ways: Ways) -> None:
    """Compute by these ways from now on."""
    _State.ways = ways


@contextlib.contextmanager
def using_ways(ways: Ways) -> Iterator[None]:
    """Compute by these ways for the duration of the block."""
    before = _State.ways
    use_ways(ways)
    try:
        yield
    finally:
        use_ways(before)
