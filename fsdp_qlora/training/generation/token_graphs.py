"""A token's pass through the decoder blocks as CUDA graphs, one for each block.

All that differs between the tokens of a batch is in tensors, the length of the cache too. So what a
block launches for a token is captured once, and launched at once for all later tokens. Embedding,
masks, rotary tables and head stay as they are, and so do FSDP2's hooks around the blocks.

Without a GPU the captured functions are called again each time, on the same tensors: values,
aliasing and what is copied when are the same.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import Cache, PreTrainedModel

from fsdp_qlora.model.architecture.attention import REPEATED
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.sharding.graphed import (
    CONSTANTS,
    reason_of_failure,
    why_not,
    why_not_written,
)
from fsdp_qlora.sharding.recompute import RecomputedBlock, recomputed_blocks, unwrapped
from fsdp_qlora.sharding.replayed import GraphPool, Replayed, tensors_of
from fsdp_qlora.training.generation.model_cache import (
    can_be_static,
    shares_prompts,
    sliding_windows,
)

log = logging.getLogger("fsdp_qlora")

# Models of which a block could not be captured, and why: another batch would fail, too.
_failures: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
# Implementations of attention that take a mask for each pair of tokens.
_MASKED = ("sdpa", REPEATED, "eager")


class TokenGraphs:
    """The graphs of a model's blocks, for the tokens of one batch.

    The weights must stay where they are, and the cache must be static.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._blocks = recomputed_blocks(model)
        self._arguments = _StaticArguments()
        self._graphs: dict[RecomputedBlock, _BlockGraph] = {}
        self.failure = ""
        """Why a block could not be captured; empty while none was refused."""
        self._capture = partial(Replayed, device=device, pool=GraphPool(device))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the model's blocks by graphs for one token, which is captured at the first time.

        The pass before must have been of one token, too: libraries allocate and choose kernels in
        their first calls.
        """
        self._arguments.begin_pass()
        for block in self._blocks:
            block.follow = self._run
        try:
            yield
        finally:
            for block in self._blocks:
                block.follow = None

    def _run(self, block: RecomputedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not the block's __call__: FSDP2's hooks have run for the first tokens, and its weights
        # stay gathered.
        forward = unwrapped(block).forward
        graph = self._graphs.get(block)
        if graph is None and not self.failure:
            graph = self._captured(block, forward, args, kwargs)
        return graph.run(args, kwargs) if graph else forward(*args, **kwargs)

    def _captured(
        self,
        block: RecomputedBlock,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "_BlockGraph | None":
        # A capture computes nothing: where one fails, the block runs without, and so do later ones.
        reason = why_not_written((*args, *kwargs.values()))
        if reason:
            self._fail(reason)
            return None
        try:
            graph = _BlockGraph(forward, args, kwargs, self._arguments, self._capture)
        except Exception as error:  # of a driver or a library
            self._fail(reason_of_failure(error))
            return None
        self._graphs[block] = graph
        return graph

    def _fail(self, reason: str) -> None:
        self.failure = _failures[self._model] = reason
        say_no_graphs(reason)


def _flat(arguments: Any) -> tuple[list[Any], Any]:
    return tree_flatten(arguments, is_leaf=lambda value: isinstance(value, Cache))


class _StaticArguments:
    """Static tensors in the place of what blocks are called with.

    Most arguments are the same for all blocks of a pass, and are copied once.
    """

    def __init__(self) -> None:
        # The tensors of the pass that were copied, by the ids of their static tensors.
        self._copied: dict[int, torch.Tensor] = {}
        # static tensors that were made in the pass, by the ids of the tensors for which
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._results: set[int] = set()

    def begin_pass(self) -> None:
        """Forget the tensors of the last token."""
        self._copied.clear()
        self._twins.clear()

    def add_result(self, result: Any) -> None:
        """Mark the static tensors of a graph's result: blocks read them in place."""
        self._results.update(map(id, tensors_of(result)))

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The static tensor for an argument of a block that is captured now."""
        if id(tensor) in self._results:
            return tensor
        if id(tensor) not in self._twins:
            self._twins[id(tensor)] = (tensor, torch.empty_like(tensor))
        return self._twins[id(tensor)][1]

    def stage(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        """Copy an argument to its static tensor, unless it is there."""
        if tensor is twin or self._copied.get(id(twin)) is tensor:
            return
        twin.copy_(tensor)
        self._copied[id(twin)] = tensor


class _BlockGraph:
    """A block's graph for one token of each answer."""

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: _StaticArguments,
        capture: Callable[[Callable[[], Any]], Replayed],
    ) -> None:
        self._forward = forward
        self._arguments = arguments
        leaves, form = _flat((args, kwargs))
        self._form = form
        self._leaves = [
            arguments.twin(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        self._stage(leaves)
        static_args, static_kwargs = tree_unflatten(self._leaves, form)
        kind = self._leaves[0].device.type
        autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

        def compute() -> Any:
            # A cast that autocast keeps would not outlive the pass.
            with torch.autocast(*autocast, cache_enabled=False):
                return forward(*static_args, **static_kwargs)

        self._captured = capture(compute)
        self._is_known = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's output for these arguments, in the same tensors each time."""
        leaves, form = _flat((args, kwargs))
        if form != self._form or not all(map(_fits, leaves, self._leaves)):
            return self._forward(*args, **kwargs)
        self._stage(leaves)
        result = self._captured.replay()
        if not self._is_known:
            self._arguments.add_result(result)
            self._is_known = True
        return result

    def _stage(self, leaves: list[Any]) -> None:
        for leaf, twin in zip(leaves, self._leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                self._arguments.stage(leaf, twin)


def _fits(leaf: Any, known: Any) -> bool:
    """Whether an argument may take the place of the one that was captured."""
    if isinstance(leaf, torch.Tensor):
        return (
            isinstance(known, torch.Tensor)
            and leaf.shape == known.shape
            and leaf.dtype == known.dtype
        )
    return leaf is known or (isinstance(leaf, CONSTANTS) and leaf == known)


@functools.cache
def say_no_graphs(reason: str) -> None:
    """Log why tokens are not computed by graphs, each reason once."""
    log.info("Answers: no graphs (%s)", reason)


def why_not_graphed(model: PreTrainedModel, longest: int) -> str:
    """The reason why a model's tokens are not computed by graphs; empty if they can be.

    longest: tokens of a prompt with its answer.
    """
    if model in _failures:
        return _failures[model]
    config = model.config.get_text_config(decoder=True)
    blocks = recomputed_blocks(model)
    if not shares_prompts(model) or not can_be_static(config, len(blocks)):
        return "its cache is not of a block's keys and values alone"
    # A cache of fixed size has them all, and a plan those in the window.
    if any(window < longest for window in sliding_windows(config)):
        return "a sliding window is shorter than prompt and answer"
    # Others have no mask for a cache that is not full.
    if config._attn_implementation not in _MASKED:
        return f"attention by {config._attn_implementation}"
    if blocks != [*find_blocks(model)]:
        return "its blocks are not wrapped"
    reasons = [why_not(unwrapped(block), trains=False) for block in blocks]
    return next(filter(None, reasons), "")
