"""Has decoder blocks with short inputs run as CUDA graphs, where their structure allows it.

On a fast GPU a step with short micro-batches takes as long as the host needs to launch it. A graph
is launched at once. The gathers of FSDP2 and its reductions stay outside (block_graphs.py).

A block has the same bits as without a graph: each proves it once, for the output of the first form
of inputs that a graph computes for it.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS, with_bounds_alone
from fsdp_qlora.model.adapters.grouped import LinearGroup
from fsdp_qlora.model.adapters.insert import magnitudes
from fsdp_qlora.model.adapters.lora import LoraExperts
from fsdp_qlora.model.experts import loops_over_experts
from fsdp_qlora.model.module_state import state_of
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.block_graphs import (
    Arguments,
    BlockGraphs,
    SharedMemory,
    StagedBlock,
    StructureMemory,
    without_hooks,
)
from fsdp_qlora.sharding.static_memory import BlockTensors

log = logging.getLogger("fsdp_qlora")

# Graphs of a structure. One that was not used in the last passes makes room for another. If all
# were, lengths vary too much, and what is left over runs without a graph.
MOST_GRAPHS = 16
_PASSES = 64
# Passes of a form of inputs before its capture: one that does not come again is not worth it.
_PASSES_BEFORE = 1
# Bytes of a block's arguments besides its input: each form has static memory for them. The plan
# counts those of documents, and no masks.
_MOST_OF_ARGUMENTS = 2**24
# Forms of inputs that are counted.
_MOST_FORMS = 1024
# Arguments of blocks that graphs may have, besides tensors.
CONSTANTS = (bool, int, float, str, torch.dtype)
# The module of hooks on a block itself that may run once for both of its passes: they gather.
_FSDP = "torch.distributed.fsdp"


class _Forms:
    """The graphs of a structure, by the form of input and arguments.

    by_bounds: as in `GraphedBlocks`. arguments, now: of the last call, and its graphs.
    """

    def __init__(self, by_bounds: bool) -> None:
        self.arguments = Arguments.of((), {})
        self._by_bounds = by_bounds
        self._key: object = None
        self._seen: dict[object, int] = {}
        self._graphs: dict[object, BlockGraphs] = {}
        self._used: dict[object, int] = {}
        self._passes = 0
        self.now: BlockGraphs | None = None

    def of_call(
        self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockGraphs | None:
        """The graphs for a call; None if there are none yet."""
        is_known = self.arguments.are_of(args, kwargs)
        if not is_known:
            computed = with_bounds_alone(kwargs, x.shape[-2]) if self._by_bounds else kwargs
            self.arguments = Arguments.of(args, kwargs, computed)
        key = (x.shape, x.dtype, self.arguments.key)
        # Blocks of a pass have the same arguments.
        if not is_known or key != self._key:
            self._begin(key)
        return self.now

    def _begin(self, key: object) -> None:
        self._key = key
        self._passes += 1
        self.now = self._graphs.get(key)
        if self.now is not None:
            self._used[key] = self._passes
            return
        if len(self._seen) >= _MOST_FORMS:
            self._seen.clear()
        self._seen[key] = self._seen.get(key, 0) + 1

    def may_capture(self) -> bool:
        """Whether graphs are to be made for the last call. Forgets others that are not used."""
        if self._seen.get(self._key, 0) <= _PASSES_BEFORE:
            return False
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._used, key=self._used.__getitem__)
        if self._passes - self._used[oldest] < _PASSES:
            return False
        del self._graphs[oldest]
        del self._used[oldest]
        return True

    def add(self, graphs: BlockGraphs) -> None:
        """Keep graphs for calls like the last one."""
        self._graphs[self._key] = graphs
        self._used[self._key] = self._passes
        self.now = graphs


class _Structure:
    """The graphs of blocks with one structure. reason: why they have none; empty if they may."""

    def __init__(self, by_bounds: bool, reason: str = "") -> None:
        self.forms = _Forms(by_bounds)
        self.memory: StructureMemory | None = None
        self.reason = reason


class _Block:
    """A block's structure, and its tensors once it is gathered.

    is_proved: whether a graph has given its own bits.
    """

    def __init__(self, structure: _Structure) -> None:
        self.structure = structure
        self.staged: StagedBlock | None = None
        self.is_proved = False


class GraphedBlocks:
    """Computes blocks by graphs where it can, else by activation checkpointing.

    Args:
        most_tokens: tokens of the run's longest micro-batch, for the memory of inputs; longer ones
            than MOST_TOKENS are computed without graphs.
        by_bounds: attention reads where documents begin from the device, so that a graph is for
            documents of any lengths.
        is_trial: no line of the log says what has no graphs.
    """

    def __init__(
        self, most_tokens: int, *, by_bounds: bool = False, is_trial: bool = False
    ) -> None:
        self._most_tokens = min(most_tokens, MOST_TOKENS)
        self._by_bounds = by_bounds
        self._is_trial = is_trial
        self._structures: dict[object, _Structure] = {}
        self._shared: dict[object, SharedMemory] = {}
        self._blocks: dict[nn.Module, _Block] = {}
        self.reasons: list[str] = []
        """The blocks and micro-batches that are computed without graphs, and why."""

    @property
    def nbytes(self) -> int:
        """Bytes of all static tensors; 0 while there are no graphs."""
        found = [structure.memory for structure in self._structures.values()]
        own = sum(memory.nbytes for memory in found if memory is not None)
        return own + sum(shared.nbytes for shared in self._shared.values()) if own else 0

    def compute(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's output, with its hooks; without its activations."""
        if not self._begin(block, args, kwargs):
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        attributes = vars(block)
        own = attributes.get("forward")
        # Python finds it before the class's own. Hooks, such as FSDP2's, run around it.
        attributes["forward"] = partial(self._forward, block, own)
        try:
            return block(*args, **kwargs)
        finally:
            _put_back(block, own)

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is computed by a graph, or one is to be captured for it."""
        known = self._blocks.get(block)
        if known is None:
            known = self._blocks[block] = _Block(self._structure_of(block))
        structure = known.structure
        if structure.reason:
            return False
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor):
            structure.reason = "their input is no first argument"
        elif x.shape[:-1].numel() > self._most_tokens:
            self._say(f"micro-batches of more than {self._most_tokens:,} tokens")
            return False
        elif structure.forms.of_call(x, args[1:], kwargs) is not None:
            return True
        elif structure.forms.arguments.nbytes > _MOST_OF_ARGUMENTS:
            size = _MOST_OF_ARGUMENTS >> 20
            self._say(f"micro-batches whose masks and other arguments have more than {size} MiB")
            return False
        else:
            structure.reason = why_not_with(structure.forms.arguments)
        if structure.reason:
            self._say_not(block, structure.reason)
            return False
        return structure.forms.may_capture()

    def _forward(
        self, block: nn.Module, own: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace a block's forward, within its hooks. own: the block's own attribute, if any."""
        # The model's own again, for captures and proofs.
        _put_back(block, own)
        known = self._blocks[block]
        structure = known.structure
        try:
            # A capture runs both passes, and a proof the block's own.
            with without_hooks():
                graphs, staged = self._ready(known, block, x, args, kwargs)
        except Exception as error:
            structure.reason = reason_of_failure(error)
        # Not above, where the error's frames keep the static memory.
        if structure.reason:
            self._give_up(structure)
            self._say_not(block, structure.reason)
            return checkpoint(block.forward, x, *args, use_reentrant=False, **kwargs)
        return graphs(staged, x, structure.forms.arguments)

    def _ready(
        self,
        known: _Block,
        block: nn.Module,
        x: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[BlockGraphs, StagedBlock]:
        """The graphs for a call, captured and proved, and the gathered block."""
        structure = known.structure
        arguments = structure.forms.arguments
        staged = self._stage(known, block, x)
        graphs = structure.forms.now
        if graphs is None:
            assert structure.memory is not None
            graphs = BlockGraphs(structure.memory, staged, x, arguments)
            structure.forms.add(graphs)
        if not known.is_proved:
            _prove(graphs, staged, x, args, kwargs, arguments)
            known.is_proved = True
        return graphs, staged

    def _stage(self, known: _Block, block: nn.Module, x: torch.Tensor) -> StagedBlock:
        """The block with its gathered tensors, which usually are the same as in passes before."""
        staged = known.staged
        if staged is not None and staged.tensors.are_current():
            return staged
        tensors = BlockTensors(block)
        structure = known.structure
        if structure.memory is None:
            structure.memory = StructureMemory(tensors, self._shared_memory(x))
        known.staged = StagedBlock(block, tensors, structure.memory)
        return known.staged

    def _shared_memory(self, x: torch.Tensor) -> SharedMemory:
        """The memory for inputs of this width and dtype."""
        kind = (x.shape[-1], x.dtype)
        if kind not in self._shared:
            self._shared[kind] = SharedMemory(x, self._most_tokens * x.shape[-1])
        return self._shared[kind]

    def _give_up(self, structure: _Structure) -> None:
        """Free a structure's graphs. Backward passes under way keep theirs until they end."""
        structure.memory = None
        structure.forms = _Forms(self._by_bounds)
        for known in self._blocks.values():
            if known.structure is structure:
                known.staged = None
        if not any(each.memory for each in self._structures.values()):
            self._shared.clear()

    def _structure_of(self, block: nn.Module) -> _Structure:
        reason = why_not(block)
        if reason:
            self._say_not(block, reason)
            return _Structure(self._by_bounds, reason)
        key = (*structure_facts(block),)
        return self._structures.setdefault(key, _Structure(self._by_bounds))

    def _say_not(self, block: nn.Module, reason: str) -> None:
        self._say(f"blocks {type(block).__name__.removeprefix('FSDP')}: {reason}")

    def _say(self, what: str) -> None:
        if what not in self.reasons:
            self.reasons.append(what)
            log.log(logging.DEBUG if self._is_trial else logging.INFO, "Graphs: not for %s", what)


def _put_back(block: nn.Module, forward: Any) -> None:
    """Give a block its own forward again; None for its class's."""
    if forward is None:
        vars(block).pop("forward", None)
    else:
        vars(block)["forward"] = forward


def _prove(
    graphs: BlockGraphs,
    staged: StagedBlock,
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Arguments,
) -> None:
    """Compare a block's output by a graph with its own. Raises RuntimeError if it is another."""
    with torch.no_grad():
        expected = staged.block.forward(x, *args, **kwargs)
        found = graphs.output(staged, x, arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    # As bytes: NaN is as good as in the block's own output.
    if not torch.equal(_as_bytes(found), _as_bytes(expected)):
        raise RuntimeError("a graph gives other numbers")


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def reason_of_failure(error: BaseException) -> str:
    """The line of code whose operator cannot be captured, and the error, in a few words."""
    # The end of a capture fails, too, and hides what came before.
    while error.__context__ is not None:
        error = error.__context__
    words = (str(error).strip().splitlines() or [type(error).__name__])[0]
    inside = str(Path(torch.__file__).parent)
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not frame.filename.startswith(inside)]
    if not frames or isinstance(error, torch.OutOfMemoryError):
        return words
    place = frames[-1]
    file = place.filename.rpartition("/")[2]
    return f"{words} ({file}:{place.lineno}: {place.line})"


# --- what is not graphed ---


def why_not(block: nn.Module, *, trains: bool = True) -> str:
    """The reason in a block's structure why it gets no graph; empty if there is none.

    trains: whether the block drops what it drops in training.
    """
    modules = [*block.modules()]
    # Each load has other memory, which a graph's pass would keep until its backward pass.
    if state_of(block).load_weights_to_gpu:
        return "weights that are copied from the host"
    if magnitudes(block):
        return "DoRA"
    if any(loops_over_experts(module) or isinstance(module, LoraExperts) for module in modules):
        return "experts, whose tokens the host counts"
    if any(isinstance(module, QuantizedWeight) and module.waits_for_device for module in modules):
        return "outliers of LLM.int8, which the host counts"
    if trains and any(_drops(module) for module in modules):
        return "dropout"
    for module in modules:
        for hook in _hooks_of(module):
            if not _is_harmless(hook, on_block=module is block):
                return f"a hook on {type(module).__name__}"
    return ""


def why_not_with(arguments: Arguments) -> str:
    """The reason in a block's arguments why it gets no graph; empty if there is none."""
    reason = why_not_written(arguments.values)
    if reason:
        return reason
    for leaf in arguments.leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return "an argument besides the input has a gradient"
        elif leaf is not None and not isinstance(leaf, CONSTANTS):
            return f"an argument of type {type(leaf).__name__}"
    return ""


def why_not_written(values: Iterable[object]) -> str:
    """The reason if one of a block's arguments is written to; empty if none is."""
    # Blocks hand tensors to later ones in a mapping.
    if any(isinstance(value, MutableMapping) for value in values):
        return "an argument that blocks write to"
    return ""


def _drops(module: nn.Module) -> bool:
    values = vars(module)
    shares = [value for name, value in values.items() if "dropout" in name]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        shares.append(module.p)
    return any(isinstance(share, float) and share > 0 for share in shares)


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., Any]]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    yield from module._backward_pre_hooks.values()
    yield from module._backward_hooks.values()


def _is_harmless(hook: Callable[..., Any], *, on_block: bool) -> bool:
    """Whether a hook may run once for both passes, on a block, or in a capture alone, inside."""
    if on_block:
        return (hook.__module__ or "").startswith(_FSDP)
    # It drops references.
    return isinstance(getattr(hook, "__self__", None), LinearGroup)


def structure_facts(block: nn.Module) -> Iterator[object]:
    """Facts in which two blocks must be equal to share graphs."""
    for name, module in block.named_modules():
        yield name, type(module)
        for key, value in vars(module).items():
            # The number of a block is for caches; `_prove` finds out if it is used.
            if key != "layer_idx" and not key.startswith("_") and _is_constant(value):
                yield key, value
    for tensors in (block.named_parameters(), block.named_buffers()):
        for name, tensor in tensors:
            # A trained one may be a shard in fp32, or gathered in 16 bits.
            dtype = None if tensor.requires_grad else tensor.dtype
            yield name, tensor.shape, dtype, tensor.requires_grad


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (*CONSTANTS, FunctionType))
