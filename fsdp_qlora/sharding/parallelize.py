"""Distributes a model over the ranks: FSDP2 groups, and memory for the shards."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
from fsdp_qlora.distributed.shards import own_rows, padded_rows, shard_bounds, shard_size
from fsdp_qlora.model.adapters.insert import adapter_modules, magnitudes
from fsdp_qlora.model.adapters.token_rows import attach_token_rows
from fsdp_qlora.model.adapters.weight_copies import WeightCopies
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.host_memory import split_arena
from fsdp_qlora.sharding.recompute import adapter_owners
from fsdp_qlora.sharding.tower_outputs import keep_hidden_states
from fsdp_qlora.sharding.towers import TowerAdapters
from fsdp_qlora.sharding.vocabulary import (
    look_up_on_host,
    lookup_of,
    share_vocabulary,
    shared_head_of,
)
from fsdp_qlora.sharding.weight_stream import is_streamed, stream_weights

log = logging.getLogger("fsdp_qlora")

# Bytes that each rank's part of a gather is a multiple of: the width of NCCL's widest copy.
_ALIGNMENT = 16
# Gathers weights in their own dtype.
_AS_STORED = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_model(
    parts: ModelParts,
    mesh: DeviceMesh,
    *,
    sharding_strategy: str,
    precision: Precision,
    on_host: Sequence[nn.Module] = (),
) -> None:
    """Apply FSDP2 to blocks (adapters and the rest apart), towers, embeddings, head and root.

    Frozen embeddings and heads that ranks share are never gathered in training (vocabulary.py).
    Frozen weights are gathered as they are stored: only groups that train are cast to param_dtype.

    Adapters stay gathered until a step's last backward pass: they are small, and CPU offload and
    the second gather then move frozen bytes only. DoRA's magnitudes are a separate group, gathered
    in fp32, as adapters are that are rounded with their base. If each rank has the whole model,
    frozen weights stay plain tensors: FSDP2 would only copy them. On one rank adapters stay plain
    tensors, too.

    Args:
        on_host: from `ModelParts.on_host`.
    """
    attach_token_rows(parts.model)
    _, reshard_after_forward = SHARDING_STRATEGIES[sharding_strategy]
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    ignored = _parameters_fsdp_ignores(
        parts, mesh, precision.param_dtype, offloads_all=parts.model in on_host
    )
    if mesh.size() == 1:
        ignored = ignored | _keep_adapters_plain(parts, precision.param_dtype)
    cast = dataclasses.replace(_AS_STORED, param_dtype=precision.param_dtype)
    groups = _Groups(mesh, cast, ignored, offload, on_host, parts.model in on_host)
    # From the inside out: a group takes the parameters that no group before it has, but for
    # `besides`. All ranks build the same groups, so their gathers come in the same order.
    for block in parts.blocks:
        _shard_block(block, groups, reshard_after_forward=reshard_after_forward)
    _shard_towers(parts, groups)
    model = parts.model
    if parts.head is not None and not parts.is_tied:
        if lookup_of(model) is None:
            groups.shard(parts.embedding, reshard=reshard_after_forward)
        if shared_head_of(model) is None:
            # Its backward pass directly follows its forward pass: a second gather would be waste.
            groups.shard(parts.head, reshard=False)
    # None: FSDP2 keeps the root gathered after its forward pass, since its backward pass follows.
    groups.shard(model, reshard=None if reshard_after_forward else False)
    # Before the first gather, which would change bits on a GPU without a message.
    check_gathered_as_bytes(parts)
    _skip_backward_gathers(parts)
    # One rank gathers nothing. Offloaded weights need FSDP2's own stream (see `set_prefetch`).
    if shard_size(mesh) > 1 and not on_host:
        set_prefetch(parts)


class _Groups(NamedTuple):
    """How the groups of a model are made.

    cast: the policy of groups that train. ignored: parameters of no group. offload: the policy of
    modules whose shards are in host memory: those in `on_host`, or all if `offloads_all`.
    """

    mesh: DeviceMesh
    cast: MixedPrecisionPolicy
    ignored: set[nn.Parameter]
    offload: OffloadPolicy
    on_host: Sequence[nn.Module]
    offloads_all: bool

    def shard(
        self,
        module: nn.Module,
        *,
        reshard: bool | None,
        besides: Iterable[nn.Parameter] = (),
        policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        """Make one group of a module, without the parameters `besides`."""
        is_offloaded = self.offloads_all or module in self.on_host
        shard_aligned(
            [module],
            self.mesh,
            policy or self.cast,
            self.ignored.union(besides),
            reshard_after_forward=reshard,
            offload_policy=self.offload if is_offloaded else OffloadPolicy(),
        )


def _keep_adapters_plain(parts: ModelParts, param_dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Have adapters compute with copies in param_dtype; returns their parameters."""
    # Others compute with their own values.
    adapters = [each for each in adapter_modules(parts.blocks) if not each.in_fp32]
    if adapters and param_dtype not in (None, torch.float32):
        # However the model is called, its first block comes before all adapters, once a pass.
        parts.blocks[0].register_forward_pre_hook(WeightCopies(adapters, param_dtype).refresh)
    every = adapter_modules(parts.model)
    return {parameter for adapter in every for parameter in adapter.parameters()}


def _shard_block(block: nn.Module, groups: _Groups, *, reshard_after_forward: bool) -> None:
    """Make the groups of a decoder block: magnitudes, the block's own weights, and adapters.

    Its own weights are frozen, but for train type full and for new blocks.
    """
    is_alone = groups.mesh.size() == 1
    in_fp32 = magnitudes(block)
    if in_fp32 and not is_alone:
        shard_aligned(in_fp32, groups.mesh, _AS_STORED, reshard_after_forward=False)
    adapters: set[nn.Parameter] = set()
    for adapter in adapter_modules(block):
        adapters.update(adapter.parameters())
    trains = any(parameter.requires_grad for parameter in {*block.parameters()} - adapters)
    groups.shard(
        block,
        reshard=reshard_after_forward,
        besides=adapters,
        policy=groups.cast if trains else _AS_STORED,
    )
    owners = adapter_owners(block)
    if owners and not is_alone:
        # By now the base's parameters are DTensors, other objects than before.
        base = {*block.parameters()} - adapters
        as_trained = any(adapter.in_fp32 for adapter in adapter_modules(block))
        policy = _AS_STORED if as_trained else groups.cast
        shard_aligned(owners, groups.mesh, policy, base, reshard_after_forward=False)


def _shard_towers(parts: ModelParts, groups: _Groups) -> None:
    """Make a group of each tower's frozen weights, and one of all towers' adapters."""
    adapters = parts.tower_adapters
    trained = {parameter for adapter in adapters for parameter in adapter.parameters()}
    # Frozen. With a reduce_dtype, FSDP2 asks for gradients, and fails at what was never gathered.
    policy = dataclasses.replace(groups.cast, reduce_dtype=None)
    for tower in parts.towers.values():
        groups.shard(tower, reshard=not adapters, besides=trained, policy=policy)
        keep_hidden_states(tower)
    if not adapters:
        return
    group = TowerAdapters(adapters)
    if groups.mesh.size() > 1:
        shard_aligned([group], groups.mesh, groups.cast, reshard_after_forward=False)
    elif groups.cast.param_dtype not in (None, torch.float32):
        group.copies = WeightCopies(adapters, groups.cast.param_dtype)
    group.hide()
    # FSDP2 finds its groups in the model, and reduces at the end of a backward pass in their order.
    parts.model.tower_adapters = group


def shard_aligned(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: Collection[nn.Parameter] = frozenset(),
    **options: Any,
) -> None:
    """`fully_shard` modules as one group, whose part on each rank is a multiple of 16 bytes.

    NCCL copies 16 bytes at a time if the parts of all ranks begin at a multiple of that, else a
    single byte, which was measured to be 3.5 times slower. FSDP2 does not pad, so a group that
    needs it gets a frozen parameter more: remove this when it does (pytorch#195450). FSDP2 keeps
    the parameter where it was found, and `with_fillers` finds it; loading, saving, the byte account
    and whatever else walks the model do not.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    for module in modules:
        for owner in module.modules():
            for parameter in owner.parameters(recurse=False):
                # A DTensor belongs to a group inside this one.
                if parameter not in ignored and not isinstance(parameter, DTensor):
                    owners[parameter] = owner
    size = shard_size(mesh)
    dtypes = [policy.param_dtype or parameter.dtype for parameter in owners]
    bytes_of_rank = 0
    for parameter, dtype in zip(owners, dtypes, strict=True):
        # FSDP2 pads the rows of all ranks to those of the first.
        _, num_rows = shard_bounds(len(parameter), rank=0, size=size)
        bytes_of_rank += num_rows * math.prod(parameter.shape[1:]) * dtype.itemsize
    owner = next(iter(owners.values()), modules[0])
    filler = nn.Module()
    missing = -bytes_of_rank % _ALIGNMENT
    if size > 1 and missing:
        # A dtype that the group has, so that it is gathered as before; the smallest, which fills
        # any gap.
        dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
        device = next(iter(owners)).device  # meta, but where a model has its weights already
        # One row for each rank, so that every rank's part grows by the missing bytes.
        filling = torch.zeros(size, missing // dtype.itemsize, dtype=dtype, device=device)
        filler.weight = nn.Parameter(filling, requires_grad=False)
    # A submodule while FSDP2 looks for parameters, and none afterwards: FSDP2 keeps the module and
    # the name, so that it still finds the parameter to gather.
    owner.gather_filler = filler
    fully_shard([*modules], mesh=mesh, mp_policy=policy, ignored_params={*ignored}, **options)
    del owner.gather_filler
    state = state_of(owner)
    set_state(owner, dataclasses.replace(state, gather_fillers=(*state.gather_fillers, filler)))


def with_fillers(module: nn.Module) -> list[nn.Module]:
    """A module, and what fills the groups whose first parameter it has."""
    return [module, *state_of(module).gather_fillers]


def _parameters_fsdp_ignores(
    parts: ModelParts, mesh: DeviceMesh, param_dtype: torch.dtype | None, *, offloads_all: bool
) -> set[nn.Parameter]:
    """The parameters that FSDP2 does not manage: a shared vocabulary, or what a rank has whole."""
    if shard_size(mesh) > 1:
        return share_vocabulary(parts, mesh, param_dtype)
    in_blocks = {*parts.blocks.parameters()}
    # Their gather would only be a copy, held in addition to the shards.
    frozen = {
        parameter
        for parameter in parts.model.parameters()
        if not parameter.requires_grad
        and (parameter in in_blocks or param_dtype in (None, parameter.dtype))
    }
    if not offloads_all:
        return frozen
    look_up_on_host(parts, mesh, param_dtype)
    # weight_stream.py copies these from the host, or they stay on the device. FSDP2 copies the
    # others.
    streamed = {
        parameter
        for module in (*parts.in_order, *parts.token_tables)
        for parameter in module.parameters()
    }
    return {parameter for parameter in frozen if parameter in streamed or parameter.dim() < 2}


def _skip_backward_gathers(parts: ModelParts) -> None:
    """Do not gather modules before the first trainable one in backward: no gradient reaches them.

    FSDP2 would prefetch them without use, such as the embeddings: 11% of an 8B model's bytes.
    """
    # FSDP2 would gather a table earlier on ranks without images, and a gradient needs no weights.
    skipped: list[nn.Module] = [*parts.towers.values(), parts.embedding] if parts.towers else []
    # Adapters in towers give all blocks a gradient.
    if not parts.tower_adapters:
        skipped += itertools.takewhile(
            lambda module: not any(each.requires_grad for each in module.parameters()),
            (parts.embedding, *parts.blocks),
        )
    for module in skipped:
        if isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)


def set_prefetch(parts: ModelParts) -> None:
    """Gather the weights of the next module when a module starts: its adapters, then its base.

    FSDP2 alone gathers a block's adapters when the first of them is called, behind the block's
    base. In backward it begins with the next block when a gradient has reached an adapter, late if
    only some layers have one.

    What is gathered is allocated on the compute stream. FSDP2 alone does it on a stream of its own,
    whose freed memory serves gathers only: an 8B's head takes 1.2 GiB. Weights in host memory need
    that stream for their copies, and without the compute stream these lists reserve 0.2 GiB more
    for a 70B, so they are not for offloaded models.
    """
    root: Any = parts.model
    blocks: list[Any] = list(parts.blocks)
    first: list[Any] = [parts.embedding] if isinstance(parts.embedding, FSDPModule) else []
    last: list[Any] = [parts.head] if isinstance(parts.head, FSDPModule) else []
    forward: list[Any] = [root, *first, *blocks, *last]
    # One module ahead hides a gather behind the products of the module before; two would hold one
    # more's weights.
    for module, following in itertools.pairwise(forward):
        # The first of its magnitudes and of its adapters stand for these groups.
        groups = [*magnitudes(following)[:1], *adapter_owners(following)[:1], following]
        module.set_modules_to_forward_prefetch(groups)
    # Adapters stay gathered from forward to backward.
    backward: list[Any] = [*(last or [root]), *reversed(blocks)]
    for module, following in itertools.pairwise(backward):
        module.set_modules_to_backward_prefetch([following])
    for block in blocks:
        for owner in adapter_owners(block):
            assert isinstance(owner, FSDPModule)
            # Its backward pass begins before its base's, which is needed first.
            owner.set_modules_to_backward_prefetch([block])
    # Allocates on the compute stream. FSDP2 then overlaps nothing by itself: the lists above do.
    root._set_unshard_async_op(True)


def materialize(
    parts: ModelParts, device: torch.device, *, on_host: Sequence[nn.Module] = ()
) -> None:
    """Allocate memory for the sharded meta parameters: in one arena on the CPU, or on `device`.

    Buffers have held real values since construction and are moved. Shards keep this memory: padded
    if the split is uneven, pinned if they are offloaded.

    Args:
        on_host: as for `shard_model`.
    """
    model = parts.model
    offloaded = _offloaded(parts, on_host)
    places = _offloaded_places(offloaded, pinned=device.type == "cuda") if offloaded else {}

    def place(parameter: torch.Tensor) -> torch.Tensor:
        if parameter in places:
            return places[parameter]
        return torch.empty_like(parameter, device=device)

    # Children first: _apply on an FSDP2 module sets up its group's shards, all of which must have
    # memory by then.
    modules = sorted(reversed([*model.modules()]), key=lambda each: isinstance(each, TowerAdapters))
    for module in modules:
        buffers = {name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)}
        for part in reversed(with_fillers(module)):
            part._apply(place, recurse=False)
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    # `_apply` may have replaced parameters, each use of a tied one by its own.
    model.tie_weights()
    for parameter in offloaded:
        _leave_out_padding(parameter)
    # A lookup copies the rows of its tokens alone; FSDP2 copies what it manages.
    looked_up = parts.embedding if lookup_of(model) else None
    candidates = parts.in_order if model in on_host else on_host
    streamed = [
        module
        for module in candidates
        if module is not looked_up and any(map(is_streamed, module.parameters()))
    ]
    if streamed:
        stream_weights(model, streamed, device)


def _offloaded(parts: ModelParts, on_host: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The parameters that belong into host memory, those of a module side by side."""
    on_device = {module for adapter in adapter_modules(parts.model) for module in adapter.modules()}
    frozen_parts = (*parts.in_order, *parts.token_tables)
    may_be_plain = {parameter for module in frozen_parts for parameter in module.parameters()}
    # A dict and not a list: tied parameters appear once, in the order of their first module, which
    # the stream of weights relies on to copy a module in one piece.
    parameters: dict[torch.Tensor, None] = {}
    for part in on_host:
        for module in part.modules():
            if module in on_device:
                continue
            for owner in with_fillers(module):
                for parameter in owner.parameters(recurse=False):
                    if isinstance(parameter, DTensor) or parameter in may_be_plain:
                        parameters[parameter] = None
    return list(parameters)


def _offloaded_places(
    parameters: Sequence[torch.Tensor], *, pinned: bool
) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter a tensor in a common arena, which a sharded one has as its local tensor.

    Local tensors have FSDP2's padding: without it FSDP2 would make a padded copy.
    """
    shapes: list[tuple[int, ...]] = []
    sizes = []
    for parameter in parameters:
        shape = tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            shape = (padded_rows(parameter), *shape[1:])
        shapes.append(shape)
        sizes.append(math.prod(shape) * parameter.element_size())
    places: dict[torch.Tensor, torch.Tensor] = {}
    for parameter, shape, part in zip(
        parameters, shapes, split_arena(sizes, pinned=pinned), strict=True
    ):
        local = part.view(parameter.dtype).view(shape)
        if isinstance(parameter, DTensor):
            # `DTensor.from_local` would move the part to the mesh's device, a GPU.
            place = torch.empty_like(parameter, device="cpu")
            assert isinstance(place, DTensor)
            place._local_tensor = local
            local = place
        places[parameter] = local
    return places


@torch.no_grad()
def _leave_out_padding(parameter: torch.Tensor) -> None:
    """Cut a shard's local tensor to its own rows; FSDP2 keeps a view with the padding."""
    if not isinstance(parameter, DTensor):
        return
    first, last = own_rows(parameter, parameter.device_mesh)
    parameter._local_tensor = parameter._local_tensor[: last - first]  # as FSDP2 does it


def check_gathered_as_bytes(parts: ModelParts) -> None:
    """Check that FSDP2 gathers quantized weights as bytes.

    FSDP2 copies a group's shards into its gather with `torch._foreach_copy_`. For 16-bit floats its
    CUDA kernel computes in float32, which turns every NaN into 0x7fff (pytorch#159333), and packed
    codes are full of NaN patterns. Where the parameters of a group have several dtypes, FSDP2
    gathers all of them as uint8.

    Raises:
        AssertionError: the parameters of a decoder block with quantized weights have one 16-bit
            dtype.
    """
    for block in parts.blocks:
        quantized = [module for module in block.modules() if isinstance(module, QuantizedWeight)]
        codes = {module.weight.dtype for module in quantized if isinstance(module.weight, DTensor)}
        statistics = {
            getattr(module, name).dtype for module in quantized for name in module.statistics
        }
        # float32 is copied without a change, so codes in that storage may be alone.
        assert codes <= {torch.float32} or len(codes | statistics) > 1, (codes, statistics)
