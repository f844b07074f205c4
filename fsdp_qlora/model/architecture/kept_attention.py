"""Keeps what attention's kernels return where a block computes its activations again.

Over a long document attention takes more time than the rest of a block, and its output much less
memory than the rest of the activations. The backward pass needs queries, keys and values, which are
computed again, and the output with the logarithms of the sums, which the first pass has computed.
So results are the same to the bit.

Only the operators of a call of attention are looked at. Autograd is above them, so the functions
that compute the gradients, and what they save, are the same with kept results.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Those of kernels that compute their gradients from their results.
_OPERATORS = frozenset(
    {
        "torch_attn::_varlen_attn",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)
# Twice the mean number of tokens that a token sees, above which results are kept. In 16 bits it is
# also the number of operations that a kept byte saves; other activations save 5,000 (8B) to 9,000
# (70B). Below it, a link of 17 GB/s takes longer than an RTX 4090's kernel.
LONG = 8192

_mode: ContextVar[TorchDispatchMode | None] = ContextVar("mode", default=None)


class KeptAttention:
    """Results of the kernels in a block's forward pass, until a second pass takes them.

    Args:
        pack: called with each tensor; returns what is kept of it.
        unpack: makes the tensor of that.
        most_calls: calls of kernels whose results are kept; None for all. The others are computed
            again.
    """

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
        unpack: Callable[[Any], torch.Tensor] = lambda packed: packed,
        *,
        most_calls: int | None = None,
    ) -> None:
        self._pack = pack
        self._unpack = unpack
        self._most_calls = most_calls
        # of each operator its name, and its results
        self._kept: deque[tuple[str, list[Callable[[], Any]]]] = deque()

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the first and the second pass, as `context_fn` of a checkpoint."""
        return _Pass(_Keeping(self)), _Pass(_Taking(self), at_end=self._kept.clear)

    def put(self, name: str, results: Sequence[Any]) -> None:
        """Keep the results of an operator. Some are numbers."""
        if len(self._kept) == self._most_calls:
            return
        kept: list[Callable[[], Any]] = []
        for result in results:
            if isinstance(result, torch.Tensor):
                # The result itself becomes a part of autograd's graph.
                kept.append(partial(self._unpack, self._pack(result.detach())))
            else:
                kept.append(partial(_same, result))
        self._kept.append((name, kept))

    def take(self, name: str) -> tuple[Any, ...] | None:
        """The results of the next operator, once; None if they are not kept, or taken before."""
        if not self._kept:
            return None
        kept_name, kept = self._kept.popleft()
        assert name == kept_name, f"the first pass called {kept_name}, and this one {name}"
        return tuple(unpack() for unpack in kept)


@contextlib.contextmanager
def attending_to(lengths: Sequence[int], window: int | None, dropout: float) -> Iterator[None]:
    """Call a kernel of attention in this block, so that its results may be kept.

    Args:
        lengths: of the documents.
        window: tokens that a token sees.
    """
    mode = _mode.get()
    # Dropout draws numbers, and a second pass has to draw as many.
    if mode is None or dropout or not are_long(lengths, window):
        yield
        return
    with mode:
        yield


def are_long(lengths: Sequence[int], window: int | None = None) -> bool:
    """Whether attention of documents takes so much time that its results are worth keeping.

    Args:
        lengths: of the documents.
        window: the maximum of tokens that a token sees.
    """
    pairs = sum(length * min(length, 2 * (window or length)) for length in lengths)
    return pairs > LONG * sum(lengths)


class _Pass:
    """A context for a block's pass, which may be entered several times, one after the other."""

    def __init__(
        self, mode: TorchDispatchMode, at_end: Callable[[], object] = lambda: None
    ) -> None:
        self._mode = mode
        self._at_end = at_end
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = _mode.set(self._mode)

    def __exit__(self, *_: object) -> None:
        _mode.reset(self._before)
        self._at_end()


class _Keeping(TorchDispatchMode):
    """Computes each operator, and keeps the results of kernels."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func._schema.name in _OPERATORS:
            self._kept.put(func._schema.name, results)
        return results


class _Taking(TorchDispatchMode):
    """Computes all operators but those of kernels whose results are kept."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        results = self._kept.take(name) if name in _OPERATORS else None
        return func(*args, **(kwargs or {})) if results is None else results


def _same(result: Any) -> Any:
    return result
