"""A decoder block's passes as two CUDA graphs: forward; and forward again with backward.

They compute with static tensors alone: the block's input, its other arguments and its weights,
which are copied there before a graph runs. So one pair of graphs serves all blocks of a structure,
and their memory is one block's. The second graph has torch's own activation checkpointing in it,
which ends with the last tensor that is needed.

Without a GPU the captured functions are called again each time, on the same static tensors: values,
aliasing and what is copied when are the same.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.sharding.replayed import GraphPool, Replayed, capture_stream, pass_through
from fsdp_qlora.sharding.static_memory import (
    BlockTensors,
    Staging,
    StaticGradients,
    StaticTensors,
)

# Calls before a capture: libraries allocate and choose kernels in their first ones.
_WARM_UP = 2


class Arguments(NamedTuple):
    """A block's arguments besides its input, in the order of `form`.

    names, values: those that the caller passed, to be known again. key: equal for arguments that
    may take each other's place in a graph.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    leaves: list[Any]
    form: TreeSpec
    key: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        computed: dict[str, Any] | None = None,
    ) -> "Arguments":
        """The arguments of a call. computed: what its graph gets in the place of `kwargs`."""
        leaves, form = tree_flatten((args, kwargs if computed is None else computed))
        facts = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        ]
        names = tuple(kwargs)
        values = (*args, *kwargs.values())
        return cls(names, values, leaves, form, (str(form), *facts))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def are_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the very same objects."""
        values = (*args, *kwargs.values())
        if len(values) != len(self.values) or tuple(kwargs) != self.names:
            return False
        return all(value is own for value, own in zip(values, self.values, strict=True))


class SharedMemory:
    """Static memory that all graphs share, since one runs at a time: inputs, results and a pool.

    Inputs and results lie at the beginning of memory for the longest of them.

    Args:
        x: an input.
        most: numbers in the longest one.
    """

    def __init__(self, x: torch.Tensor, most: int) -> None:
        self.x, self.grad_y, self.result = (x.new_zeros(most) for _ in range(3))
        self.pool = GraphPool(x.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the static tensors."""
        return self.x.nbytes + self.grad_y.nbytes + self.result.nbytes


class StructureMemory:
    """The static weights that all graphs of a structure share, and what they share with others."""

    def __init__(self, tensors: BlockTensors, shared: SharedMemory) -> None:
        self.shared = shared
        self.weights = StaticTensors(tensors.tensors)
        self.trained = [self.weights.tensors[index] for index in tensors.trained]
        self.gradients = StaticGradients(self.trained)

    @property
    def nbytes(self) -> int:
        """Bytes of the static weights and of their gradients."""
        return self.weights.memory.nbytes + self.gradients.nbytes


class StagedBlock:
    """A block whose tensors can be copied to its structure's static ones.

    Raises:
        ValueError: the tensors have other forms than the static ones.
    """

    def __init__(self, block: nn.Module, tensors: BlockTensors, memory: StructureMemory) -> None:
        twins = memory.weights.tensors
        if [_form(tensor) for tensor in tensors.tensors] != [_form(twin) for twin in twins]:
            raise ValueError("its weights have other forms than those of a block like it")
        self.block = block
        self.tensors = tensors
        self.trained = [tensors.tensors[index] for index in tensors.trained]
        self.stage = Staging(tensors.tensors, twins).copy


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


class BlockGraphs:
    """The two graphs of a structure's blocks for inputs and arguments of one form.

    Args:
        staged: one of these blocks, gathered, without the wrapper that computes it again.
        x: its input.
    Raises:
        RuntimeError: the block cannot be captured.
    """

    def __init__(
        self, memory: StructureMemory, staged: StagedBlock, x: torch.Tensor, arguments: Arguments
    ) -> None:
        self._memory = memory
        self._block = staged.block
        self._tensors = staged.tensors
        size = x.numel()
        shared = memory.shared
        self._x = shared.x[:size].view(x.shape).requires_grad_()
        self._grad_y = shared.grad_y[:size].view(x.shape)
        self._result = shared.result[:size].view(x.shape)
        self._arguments = [
            torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in arguments.leaves
        ]
        self._form = arguments.form
        # the leaf that a static argument was copied from, as long as it lives, and its version
        self._staged: list[tuple[weakref.ref[torch.Tensor], int] | None]
        self._staged = [None] * len(self._arguments)
        self._autocast = (
            x.device.type,
            torch.get_autocast_dtype(x.device.type),
            torch.is_autocast_enabled(x.device.type),
        )
        self._y: torch.Tensor | None = None
        self._is_tuple = False
        self._has_gradient: list[bool] = []
        self._stage(staged, x, arguments)
        if x.is_cuda:
            self._warm_up(x.device)
        self._forward = Replayed(self._compute, x.device, shared.pool)
        self._backward = Replayed(self._compute_gradients, x.device, shared.pool)
        # A captured graph has no use for them.
        if x.is_cuda:
            self._y = None
            del self._block, self._tensors

    def _warm_up(self, device: torch.device) -> None:
        # Memory that a block has had on the compute stream is of no use to this one.
        torch.cuda.empty_cache()
        # Libraries keep workspaces for each stream.
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._compute()
                self._compute_gradients()
            # The next line frees what no thread holds.
            pass_through(device)
        torch.cuda.current_stream(device).wait_stream(stream)
        # Nor is that of the warm-up to the captures, which have a pool.
        torch.cuda.empty_cache()

    # --- the work that is captured ---

    @contextlib.contextmanager
    def _on_static_tensors(self) -> Iterator[None]:
        device_type, dtype, enabled = self._autocast
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._tensors.replaced_by(self._memory.weights.tensors))
            # A cast that autocast keeps would be of one block's weights.
            cast = torch.autocast(device_type, dtype, enabled, cache_enabled=False)
            stack.enter_context(cast)
            stack.enter_context(without_hooks())
            stack.enter_context(torch.enable_grad())
            yield

    def _compute(self) -> None:
        args, kwargs = tree_unflatten(self._arguments, self._form)
        with self._on_static_tensors():
            output = checkpoint(
                self._block.forward,
                self._x,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                **kwargs,
            )
        self._is_tuple = isinstance(output, tuple)
        self._y = _hidden_states(output, self._x)
        with torch.no_grad():
            self._result.copy_(self._y)

    def _compute_gradients(self) -> None:
        # A graph has it from the first capture.
        if not self._x.is_cuda:
            self._compute()
        assert self._y is not None
        # The pass that is computed again reads the weights.
        with self._tensors.replaced_by(self._memory.weights.tensors):
            grad_x, *others = torch.autograd.grad(
                self._y, [self._x, *self._memory.trained], self._grad_y, allow_unused=True
            )
        self._y = None
        self._has_gradient = [grad is not None for grad in others]
        targets = self._memory.gradients.tensors
        pairs = [pair for pair in zip(targets, others, strict=True) if pair[1] is not None]
        with torch.no_grad():
            self._result.copy_(grad_x)
            if pairs:
                torch._foreach_copy_([target for target, _ in pairs], [grad for _, grad in pairs])

    # --- for each block ---

    @torch.no_grad()
    def _stage(self, staged: StagedBlock, x: torch.Tensor, arguments: Arguments) -> None:
        """Copy a block's input, arguments and weights to the static ones."""
        self._x.copy_(x)
        staged.stage()
        for index, leaf in enumerate(arguments.leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            # All blocks of a pass have the same.
            before = self._staged[index]
            if before is None or before[0]() is not leaf or before[1] != leaf._version:
                self._arguments[index].copy_(leaf)
                self._staged[index] = (weakref.ref(leaf), leaf._version)

    def __call__(self, staged: StagedBlock, x: torch.Tensor, arguments: Arguments) -> Any:
        """A block's output, whose gradients go to its input and to its trained tensors."""
        y = _Replay.apply(self, staged, arguments, x, *staged.trained)
        return (y,) if self._is_tuple else y

    def output(self, staged: StagedBlock, x: torch.Tensor, arguments: Arguments) -> torch.Tensor:
        """A block's output, without a graph for autograd."""
        self._stage(staged, x, arguments)
        self._forward.replay()
        return self._result.clone()

    def input_gradients(
        self, staged: StagedBlock, x: torch.Tensor, arguments: Arguments, grad_y: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The gradients of x and of the trained tensors."""
        self._stage(staged, x, arguments)
        self._grad_y.copy_(grad_y)
        self._backward.replay()
        gradients: list[torch.Tensor | None] = [self._result.clone()]
        copies = self._memory.gradients.copies()
        for has_gradient, copy in zip(self._has_gradient, copies, strict=True):
            gradients.append(copy if has_gradient else None)
        return gradients


def without_hooks() -> saved_tensors_hooks:
    """Have hooks around a block get none of its tensors, which they would move elsewhere."""
    return saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hidden_states(output: Any, x: torch.Tensor) -> torch.Tensor:
    """A block's hidden states. Raises RuntimeError if it returns anything besides."""
    y = output[0] if isinstance(output, tuple) and len(output) == 1 else output
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        raise RuntimeError("the block returns more than hidden states of its input's form")
    return y


class _Replay(torch.autograd.Function):
    """A block's passes by its structure's graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: BlockGraphs,
        staged: StagedBlock,
        arguments: Arguments,
        x: torch.Tensor,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        ctx.of_block = (graphs, staged, arguments)
        # Saved, and no attribute: it may be kept on the host meanwhile (host_memory.py).
        ctx.save_for_backward(x)
        return graphs.output(staged, x, arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graphs, staged, arguments = ctx.of_block
        (x,) = ctx.saved_tensors
        grad_x, *others = graphs.input_gradients(staged, x, arguments, grads[0])
        if not ctx.needs_input_grad[3]:
            grad_x = None
        return None, None, None, grad_x, *others
