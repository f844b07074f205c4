"""Activation checkpointing of decoder blocks, and a reference pass beside the policy's."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import BESIDE
from fsdp_qlora.model.adapters.insert import adapted_layers, adapter_modules, as_at_start
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.fused import set_save_inputs_only
from fsdp_qlora.model.architecture.kept_attention import KeptAttention
from fsdp_qlora.model.architecture.towers import blocks_of_towers
from fsdp_qlora.sharding.both_states import BothStates, for_policy, for_reference, have_both
from fsdp_qlora.sharding.graphed import GraphedBlocks
from fsdp_qlora.sharding.host_activations import ActivationStore, is_spread
from fsdp_qlora.sharding.host_memory import InputStore
from fsdp_qlora.sharding.reference_towers import ReferenceTowers


class RecomputedBlock(ActivationWrapper):
    """A decoder block that keeps only its input, and recomputes its activations in backward.

    is_on: if False, all activations are kept and nothing is recomputed. Results are the same to the
    bit. moves: then host memory keeps them, by `activations`, which is None if no block of the
    model does so. keeps_attention: keep what attention's kernels return beside the input, unless
    documents are short or a graph computes the block. store: keeps both on the host; None if they
    stay on the device. follow: computes the output, of this block and its arguments, while its
    weights are gathered (see `ReferencePass`). graphs: computes the block by CUDA graphs where it
    can; None to do without.
    """

    is_on = True
    moves = False
    keeps_attention = False
    activations: ActivationStore | None = None

    def __init__(self, block: nn.Module, store: InputStore | None = None) -> None:
        super().__init__(block)
        self.store = store
        self.graphs: GraphedBlocks | None = None
        self.follow: Callable[[RecomputedBlock, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.follow:
            return self.follow(self, args, kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        if self.activations is None or not torch.is_grad_enabled():
            return self._compute(*args, **kwargs)
        return self.activations.run(self._compute, self, args, kwargs, moves=self.moves)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if not self.is_on or not torch.is_grad_enabled():
            return block(*args, **kwargs)
        if self.store is None:
            return self._without_activations(args, kwargs)
        # Inside, the checkpoint's own hooks apply: the store gets only the block's inputs.
        with saved_tensors_hooks(self.store.pack, self.store.unpack):
            return self._without_activations(args, kwargs)

    def _without_activations(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self._checkpoint_wrapped_module
        if self.graphs is not None:
            return self.graphs.compute(block, args, kwargs)
        contexts = self._attention_contexts if self.keeps_attention else noop_context_fn
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _attention_contexts(self) -> tuple[Any, Any]:
        if self.store is None:
            return KeptAttention().contexts()
        # One call for each run of equal documents would need host memory for the largest of each
        # number of runs, more than is planned. torch's kernel for documents of any lengths is
        # called once.
        kept = KeptAttention(self.store.pack_beside, self.store.unpack, most_calls=1)
        return kept.contexts()


def wrap_blocks(model: nn.Module, *, num_blocks: int | None = None, offload: bool) -> None:
    """Wrap all blocks, and have the first `num_blocks` of them (None for all) recompute.

    offload: whether their inputs are kept on the CPU.
    """
    blocks = find_blocks(model)
    store = InputStore()
    num_blocks = len(blocks) if num_blocks is None else num_blocks
    # Every block gets a wrapper, so that `set_recompute` may choose others between steps.
    for index, block in enumerate(blocks):
        blocks[index] = RecomputedBlock(block, store if offload and index < num_blocks else None)
    set_recompute(model, num_blocks)


class RecomputedTowerBlock(ActivationWrapper):
    """A block of a tower that keeps only its inputs, and computes again in the backward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        return checkpoint(block, *args, use_reentrant=False, **kwargs)


def wrap_towers(model: PreTrainedModel) -> None:
    """Have the blocks of towers with adapters recompute."""
    for blocks in blocks_of_towers(model):
        if adapter_modules(blocks):
            for index, block in enumerate(blocks):
                blocks[index] = RecomputedTowerBlock(block)


def set_recompute(model: nn.Module, num_blocks: int, *, on_host: int = 0) -> None:
    """Choose the blocks that recompute: the first `num_blocks`. Others keep their activations.

    The last blocks keep theirs, since the backward pass frees these first, before another block
    needs memory for its recomputation. Any other choice of as many blocks has the same or a higher
    peak.

    Args:
        on_host: of the first blocks, the number that does not recompute, but keeps its activations
            in host memory.
    """
    blocks = recomputed_blocks(model)
    store = None
    if on_host:
        before = (block.activations for block in blocks if block.activations)
        store = next(before, None) or ActivationStore()
        store.lag = num_blocks // on_host
    for index, block in enumerate(blocks):
        # Spread evenly, so that the copies of a slow link have the time of the blocks between.
        block.moves = index < num_blocks and is_spread(index, on_host, num_blocks)
        block.is_on = index < num_blocks and not block.moves
        block.activations = store
        # A block that keeps its activations computes norms and gated products again, which is cheap
        # beside their memory. One that recomputes keeps nothing of them anyway.
        set_save_inputs_only(block, not block.is_on)


def set_keeps_attention(model: nn.Module, enabled: bool) -> None:
    """Choose whether blocks that recompute keep what attention gives for long documents."""
    for block in recomputed_blocks(model):
        block.keeps_attention = enabled


def keeps_attention(model: nn.Module) -> bool:
    """Whether blocks that recompute keep what attention gives for long documents."""
    return any(block.keeps_attention for block in recomputed_blocks(model))


def set_graphs(model: nn.Module, graphs: GraphedBlocks | None) -> None:
    """Have the blocks that recompute do it by CUDA graphs, or do without."""
    for block in recomputed_blocks(model):
        block.graphs = graphs


def has_graphs(model: nn.Module) -> bool:
    """Whether blocks of the model recompute by CUDA graphs where they can."""
    return any(block.graphs is not None for block in recomputed_blocks(model))


def reserve_host_memory(model: nn.Module, size: int, device: torch.device) -> None:
    """Allocate `size` bytes of host memory for the activations that blocks move there.

    Raises:
        MemoryError: it cannot be allocated or pinned.
    """
    for block in recomputed_blocks(model)[:1]:
        if block.activations is not None:
            block.activations.reserve(size, device)


def recomputed_blocks(model: nn.Module) -> list[RecomputedBlock]:
    """The blocks that can recompute, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, RecomputedBlock)]


def unwrapped(block: nn.Module) -> nn.Module:
    """The model's own block, without the wrapper from `wrap_blocks`."""
    return block._checkpoint_wrapped_module if isinstance(block, RecomputedBlock) else block


def adapter_owners(block: nn.Module) -> list[nn.Module]:
    """The modules at whose calls FSDP2 gathers a block's adapters: its own block, or the adapters.

    FSDP2's hooks take the host 50 us, and on the adapters they would run again when the block is
    recomputed. The wrapper has the hooks of the base weights.
    """
    adapters = adapter_modules(block)
    inner = unwrapped(block)
    if adapters and inner is not block:
        return [inner]
    return adapters


class ReferencePass:
    """Computes the reference's hidden states in the policy's forward pass.

    The reference is the model that training started from.

    A block's weights are gathered (or copied from the host) once for both. The reference has no
    autograd graph, and holds the hidden states of one block at a time. After the last block they
    are appended to the policy's in the batch dim, so that the model's own code computes the rest,
    which has no adapters.

    A teacher has tokens of its own: they follow the student's in one row
    (data/batches/micro_batch.py). Its hidden states do so before the first and after the last
    block.

    Where images are shown, the model's own code may add features of images to all tokens between
    blocks, too. It does so to both (`BothStates`), and to a teacher's behind the student's. If
    towers have adapters, they compute features for each (`ReferenceTowers`).

    Args:
        towers: the parts of the model that compute images.
    """

    def __init__(self, model: nn.Module, towers: Iterable[nn.Module] = ()) -> None:
        self._adapted = {block: adapted_layers(block) for block in recomputed_blocks(model)}
        self._towers = ReferenceTowers(towers)
        self._hidden: torch.Tensor | None = None
        # the reference's arguments of a block that is at work for the policy, if they differ
        self._arguments: Arguments | None = None
        self._shows_images = False
        # id of the policy's mapping -> the reference's copy of it, for one pass
        self._mappings: dict[int, Any] = {}

    @contextlib.contextmanager
    def beside_policy(self, *, shows_images: bool = False) -> Iterator[None]:
        """Make the model return [2 * B, T, H] in the block: the policy, then the reference.

        shows_images: whether the micro-batch has images.
        """
        self._shows_images = shows_images
        handles = []
        for block in self._adapted:
            block.follow = self._follow
            if shows_images:
                # Before FSDP2's hook, whose own function for gradients takes plain tensors.
                handles.append(
                    block.register_forward_pre_hook(self._part, prepend=True, with_kwargs=True)
                )
        if shows_images:
            handles += self._towers.attach()
        try:
            yield
        finally:
            self._hidden = None
            self._arguments = None
            self._mappings = {}
            for block in self._adapted:
                block.follow = None
            for handle in handles:
                handle.remove()

    def _part(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "Arguments | None":
        """Give a block the policy's hidden states, and keep the reference's for `_follow`."""
        plain = {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}
        # Mappings stay the same objects, in which blocks hand on keys and values.
        named = {name: value for name, value in kwargs.items() if name not in plain}
        if not have_both((args, named)):
            return None
        args_of_reference, of_reference = for_reference((args, named))
        self._arguments = (args_of_reference, of_reference | plain)
        args_of_policy, of_policy = for_policy((args, named))
        return args_of_policy, of_policy | plain

    def _follow(self, block: RecomputedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the policy's block and, after it, the reference's."""
        has_both = self._hidden is None
        of_policy, of_reference = take_apart(args, kwargs, has_both=has_both)
        has_teacher = of_policy is not of_reference
        if self._arguments is not None:
            _, of_reference = take_apart(*self._arguments, has_both=has_both)
            self._hidden = of_reference[0][0]
            self._arguments = None
        output = block.compute(*of_policy[0], **of_policy[1])
        args, kwargs = of_reference
        # The first block gets what the embedding gives, which has no adapters: the same for both.
        hidden = args[0].detach() if self._hidden is None else self._hidden
        # Where blocks hand keys and values to later ones in a mapping, the reference has its own:
        # it would read the policy's.
        mappings = {}
        for name, value in kwargs.items():
            if isinstance(value, MutableMapping):
                mappings[name] = self._mappings.setdefault(id(value), copy.copy(value))
        # Not the block's __call__: hooks, such as FSDP2's, have run for this pass already.
        with torch.no_grad(), as_at_start(self._adapted[block]):
            reference = unwrapped(block).forward(hidden, *args[1:], **(kwargs | mappings))
        reference = reference if isinstance(reference, torch.Tensor) else reference[0]
        states = output if isinstance(output, torch.Tensor) else output[0]
        if block is next(reversed(self._adapted)):
            self._hidden = None
            self._mappings = {}
            # A teacher's tokens are in the same row as the student's, behind them.
            states = torch.cat([states, reference], 1 if has_teacher else 0)
        elif has_teacher and self._shows_images:
            self._hidden = None
            states = torch.cat([states, reference], 1)
            if self._towers.have_adapters:
                # The next block takes the student's tokens from the one, the teacher's from the
                # other.
                states = BothStates.of(states, states.detach().clone())
        else:
            self._hidden = reference
            if self._shows_images:
                states = BothStates.of(states, reference)
        return states if isinstance(output, torch.Tensor) else (states, *output[1:])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def take_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, has_both: bool
) -> tuple[Arguments, Arguments]:
    """A block's arguments for the student's tokens and the teacher's; twice the same without any.

    A tensor with a dim of as many values as tokens is divided along it; what describes the
    documents is there twice.

    Args:
        has_both: whether the hidden states, which come first, are of both.
    """
    of_student: dict[str, Any] = {}
    of_teacher: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name.startswith(BESIDE):
            of_teacher[name.removeprefix(BESIDE)] = value
        else:
            of_student[name] = value
    if not of_teacher:
        # One tuple twice, by whose identity `_follow` knows that there is no teacher.
        arguments = (args, kwargs)
        return arguments, arguments
    sizes = [sum(described["document_lengths"]) for described in (of_student, of_teacher)]

    def part(index: int, value: Any) -> Any:
        """The student's (0) or the teacher's (1) part of a value."""
        if not isinstance(value, torch.Tensor) or sum(sizes) not in value.shape:
            return value
        return value.split(sizes, dim=value.shape.index(sum(sizes)))[index]

    hidden = args[0].split(sizes, dim=1) if has_both else args[:1] * 2
    others = (args[1:], of_student)
    student_args, student_kwargs = tree_map(partial(part, 0), others)
    teacher_args, teacher_kwargs = tree_map(partial(part, 1), others)
    student = ((hidden[0], *student_args), student_kwargs)
    return student, ((hidden[1], *teacher_args), teacher_kwargs | of_teacher)
