"""Frozen embeddings and heads that ranks share: rows stay, and hidden states are exchanged.

FSDP2 would gather the whole matrix on every rank in each micro-batch, 1.2 GB of a Qwen3-8B. But
tokens need few of an embedding's rows, and a head's outputs can be computed where its rows are
(training/head_loss.py).

Shapes, as suffixes of tensors' names:
    R ranks that share the rows;
    V tokens of the vocabulary, v of them this rank's, the rows that FSDP2 would give it;
    H hidden size;
    B rows of a batch, T their tokens;
    N tokens of all of a rank's rows;
    U rows that are sent or received.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.distributed.shards import (
    all_gather,
    gather_rows,
    local_part,
    own_rows,
    reduce_scatter,
    shard_bounds,
    shard_rank,
    shard_size,
)
from fsdp_qlora.model.adapters.token_rows import TokenRows, head_token_rows
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.sharding.host_memory import SideStream


def is_shared(
    parts: ModelParts, num_shards: int, param_dtype: torch.dtype | None
) -> tuple[bool, bool]:
    """Whether the embedding and the head can be split over `num_shards` ranks: frozen and plain.

    Args:
        param_dtype: in which FSDP2 would gather; None for the weights' own.
    """
    head = parts.head
    if num_shards == 1 or not isinstance(head, nn.Linear):
        return False, False
    looks_up = parts.looks_up and _has_frozen_rows(parts.embedding, num_shards, param_dtype)
    # A subclass may scale or cap its outputs, which `chunked_loss` would leave out.
    is_plain = type(head).forward is nn.Linear.forward
    multiplies = is_plain and _has_frozen_rows(head, num_shards, param_dtype)
    # Tied ones have one weight: FSDP2 cannot gather for one use what the other use keeps apart.
    if parts.is_tied and looks_up != multiplies:
        return False, False
    return looks_up, multiplies


def share_vocabulary(
    parts: ModelParts, mesh: DeviceMesh, param_dtype: torch.dtype | None
) -> set[nn.Parameter]:
    """Split the frozen embedding and head by rows, which each rank keeps and uses where they are.

    Args:
        param_dtype: as for `is_shared`.
    Returns:
        What is shared, for FSDP2 to ignore: DTensors, as FSDP2 would have made them.
    """
    embedding: Any = parts.embedding
    head: Any = parts.head
    looks_up, multiplies = is_shared(parts, shard_size(mesh), param_dtype)
    shared: set[nn.Parameter] = set()
    tables: list[Any] = [embedding] if looks_up else []
    for table in parts.token_tables:
        if _has_frozen_rows(table, shard_size(mesh), param_dtype):
            tables.append(table)
    for table in tables:
        table.weight = _sharded(table.weight, mesh)
        shared.add(table.weight)
    _look_up(parts.model, tables, mesh)
    if multiplies:
        head.weight = embedding.weight if parts.is_tied else _sharded(head.weight, mesh)
        shared_head = SharedHead(head, mesh, parts.blocks[-1], head_token_rows(parts.model))
        set_state(head, replace(state_of(head), shared_head=shared_head))
        shared.add(head.weight)
    return shared


def look_up_on_host(parts: ModelParts, mesh: DeviceMesh, param_dtype: torch.dtype | None) -> None:
    """Copy only the tokens' rows of frozen embeddings that a rank has whole in host memory."""
    tables = [*parts.token_tables]
    if parts.looks_up:
        tables.insert(0, parts.embedding)
    frozen = [table for table in tables if _has_frozen_rows(table, 1, param_dtype)]
    _look_up(parts.model, frozen, mesh)


def _look_up(model: PreTrainedModel, tables: Sequence[Any], mesh: DeviceMesh) -> None:
    lookups = tuple(Lookup(table, mesh, model) for table in tables)
    set_state(model, replace(state_of(model), lookups=lookups))


def _lookups_of(model: PreTrainedModel) -> "list[Lookup]":
    return [lookup for lookup in state_of(model).lookups if isinstance(lookup, Lookup)]


def lookup_of(model: PreTrainedModel) -> "Lookup | None":
    """The model's lookup of tokens on other ranks, if its embedding is shared."""
    embedding = model.get_input_embeddings()
    lookups = [lookup for lookup in _lookups_of(model) if lookup.module is embedding]
    return lookups[0] if lookups else None


def shared_head_of(model: PreTrainedModel) -> "SharedHead | None":
    """How the ranks share the model's head, if they do."""
    head = model.get_output_embeddings()
    shared = None if head is None else state_of(head).shared_head
    return shared if isinstance(shared, SharedHead) else None


def sharing_ranks(model: PreTrainedModel) -> list[int]:
    """The ranks that share the embedding or the head, in the order of their rows."""
    # All shared modules of a model have the same group, so any of them answers.
    shared = (*_lookups_of(model), shared_head_of(model))[0]
    return dist.get_process_group_ranks(shared.group) if shared else []


@contextlib.contextmanager
def tokens_known(
    model: PreTrainedModel,
    tokens: Sequence[torch.Tensor] | None,
    *,
    first: int | None = None,
    has_images: bool = False,
) -> Iterator[None]:
    """Tell lookups which tokens the ranks look up in this block, so that no device is asked.

    Args:
        tokens: ids that each of `sharing_ranks` looks up in a forward pass, int64 on the CPU. None:
            not known.
        first: how many of its own this rank's model uses; None for all.
        has_images: further embeddings of the tokens are asked for others where a rank has images.
    """
    for lookup in _lookups_of(model):
        # With images, models look up another id in their further tables where a patch is.
        known = None if has_images and lookup is not lookup_of(model) else tokens
        lookup.tokens = known
        lookup.first = first if known is not None else None
    try:
        yield
    finally:
        for lookup in _lookups_of(model):
            lookup.tokens = lookup.first = None


def same_tokens(
    model: PreTrainedModel, input_ids: torch.Tensor
) -> contextlib.AbstractContextManager[None]:
    """`tokens_known` where all ranks look up the same tokens, which are on the CPU.

    No rank is asked, so that a fake process group of one process can run the pass.
    """
    return tokens_known(model, [input_ids.flatten()] * len(sharing_ranks(model)) or None)


def _has_frozen_rows(module: nn.Module, num_shards: int, param_dtype: torch.dtype | None) -> bool:
    """Whether a module's only parameter is a frozen weight of which every rank has a row."""
    weight: torch.Tensor | None = getattr(module, "weight", None)
    # Rows of new tokens, which train, are a parameter of their own and stay whole on every rank.
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    if weight is None or len(frozen) != 1 or weight.requires_grad:
        return False
    # Where rows are few, the last rank is the first to get none.
    first, last = shard_bounds(weight.shape[0], rank=num_shards - 1, size=num_shards)
    # FSDP2 would cast what it gathers to `param_dtype`: rows that stay where they are are not cast.
    return param_dtype in (None, weight.dtype) and first < last


def _sharded(weight: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as FSDP2 shards it: this rank's rows of it."""
    first, last = own_rows(weight, mesh)
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    # A clone: a view would keep the whole matrix alive.
    local = weight.detach()[first:last].clone()
    shape = weight.shape
    stride = weight.stride()
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return nn.Parameter(sharded, requires_grad=False)


class _RowExchange:
    """A module of which a rank has some rows, and that computes with others in its forward pass.

    Attributes:
        stored: the module's sharded weight while `Lookup` has another one in its place.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module = module
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh["shard"].get_group()
        self.rank = shard_rank(mesh)
        self.size = shard_size(mesh)
        self._shared: nn.Parameter | None = None
        self.stored: nn.Parameter | None = None
        # always_call: after an exception, such as one for memory, a step is tried again.
        module.register_forward_hook(self._put_back, always_call=True)

    def own_rows(self) -> torch.Tensor:
        """This rank's rows, on the device that stores them."""
        weight = self.module.weight if self.stored is None else self.stored
        return local_part(weight)  # type: ignore[arg-type]

    def _replace(self, weight: torch.Tensor) -> None:
        """Put `weight` in the module for one call of its own forward method."""
        self._shared = self.module._parameters["weight"]
        self.module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def _put_back(self, *_: Any) -> None:
        if self._shared is not None:
            self.module._parameters["weight"] = self._shared
            self._shared = None


class _ExchangePlan(NamedTuple):
    """Rows that ranks give each other.

    rows: numbers among this rank's, those for the first rank first. sent, received: how many to and
    from each rank. places: of this rank's tokens among the rows that it receives.
    """

    rows: torch.Tensor  # [U] int64
    sent: list[int]  # [R]
    received: list[int]  # [R]
    places: torch.Tensor  # [N] int64


def plan_row_exchange(tokens: Sequence[torch.Tensor], vocabulary: int, rank: int) -> _ExchangePlan:
    """Which embedding rows ranks send each other, so that each has every row of its tokens once.

    Args:
        tokens: ids of each rank, int64 on the CPU.
    """
    # Every rank knows the tokens of all (data/batches/micro_batch.py), so all find the same plan:
    # rows take one all-to-all, and no exchange of their numbers comes before it, for which the host
    # would wait.
    size = len(tokens)
    starts = [shard_bounds(vocabulary, rank=other, size=size)[0] for other in range(size)]
    # `unique` sorts, and ranks own ascending ranges of rows. So what a rank receives, in the order
    # of ranks, is in the order of its distinct ids.
    distinct = [ids.unique() for ids in tokens]
    # ends[reader][owner]: where the ids of `owner` begin among those of `reader`.
    bounds = torch.tensor([*starts, vocabulary])
    ends = [torch.searchsorted(ids, bounds).tolist() for ids in distinct]
    read_by_rank = [ids[end[rank] : end[rank + 1]] for ids, end in zip(distinct, ends, strict=True)]
    return _ExchangePlan(
        rows=torch.cat(read_by_rank) - starts[rank],
        sent=[len(ids) for ids in read_by_rank],
        received=[stop - start for start, stop in itertools.pairwise(ends[rank])],
        places=torch.searchsorted(distinct[rank], tokens[rank]),
    )


class Lookup(_RowExchange):
    """An embedding that receives the rows of its tokens from the ranks, each once, to look them up.

    The result is the same as from the whole matrix, to the bit. From weights in host memory only
    these rows are copied.

    Other code of the model finds a matrix of NaN meanwhile, in no memory: gemma4 reads a row that
    it does not use, and a shard, or a tensor of the host, would fail. What uses one would not pass
    unnoticed.

    Attributes:
        stored: the weight, while the model's forward pass runs.
        tokens, first: from `tokens_known`.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, model: PreTrainedModel) -> None:
        super().__init__(module, mesh)
        model.base_model.register_forward_pre_hook(self._set_aside_weight)
        model.base_model.register_forward_hook(self._restore_weight, always_call=True)
        # It says whose row gets no gradient, which a frozen row never does, and must be the number
        # of a row.
        module.padding_idx = None  # type: ignore[assignment]
        self.tokens: Sequence[torch.Tensor] | None = None
        self.first: int | None = None
        module.register_forward_pre_hook(self._receive_rows)

    def _set_aside_weight(self, *_: Any) -> None:
        weight: Any = self.module.weight
        # Expanded from one element: the shape of the whole matrix, in no memory.
        nan = torch.full((), torch.nan, dtype=weight.dtype, device=self.mesh.device_type)
        self.stored = self.module._parameters["weight"]
        self.module._parameters["weight"] = nn.Parameter(
            nan.expand(weight.shape), requires_grad=False
        )

    def _restore_weight(self, *_: Any) -> None:
        self.module._parameters["weight"] = self.stored
        self.stored = None

    @torch.no_grad()
    def _receive_rows(
        self, module: nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Replace ids by their places among received rows. args: the ids [B, T], and others."""
        ids_BT = args[0]
        num_rows = len(module.weight)  # type: ignore[arg-type]
        tokens = self.tokens if self.tokens is not None else self._gather_tokens(ids_BT)
        # gemma3n's ids of images lie behind its table of tokens; it reads row 0 for them.
        tokens = [ids.where(ids < num_rows, 0) for ids in tokens]
        used_N = tokens[self.rank][: self.first]
        # Ranks that plan for other tokens would exchange other numbers of rows, and hang.
        assert used_N.numel() == ids_BT.numel(), (
            "the model looks up tokens that are not in its batch"
        )
        plan = plan_row_exchange(tokens, num_rows, self.rank)
        places_BT = plan.places[: self.first].view(ids_BT.shape)
        on_device = to_device({"rows": plan.rows, "places": places_BT}, ids_BT.device)
        rows_UH = self._select_own_rows(plan.rows, on_device["rows"])
        if self.size > 1:
            own_UH = rows_UH
            rows_UH = own_UH.new_empty(sum(plan.received), own_UH.shape[1])
            # All ranks of the group run the same modules in the same order, so each comes here once
            # in a pass, and all plans are of the same tokens: sizes match, and no rank waits alone.
            dist.all_to_all_single(rows_UH, own_UH, plan.received, plan.sent, group=self.group)
        self._replace(rows_UH)
        return on_device["places"], *args[1:]

    def _select_own_rows(self, on_host: torch.Tensor, on_device: torch.Tensor) -> torch.Tensor:
        """This rank's rows of some numbers, given on the host and on the device; on the device."""
        rows_vH = self.own_rows()
        if rows_vH.device.type == on_device.device.type:
            return rows_vH.index_select(0, on_device)
        # Pinned, so that the host does not wait for the copy. torch's allocator of pinned memory
        # hands the buffer out again only after the stream has passed the copy.
        pinned = on_device.device.type == "cuda"
        shape_UH = (len(on_host), rows_vH.shape[1])
        buffer_UH = torch.empty(shape_UH, dtype=rows_vH.dtype, pin_memory=pinned)
        torch.index_select(rows_vH, 0, on_host, out=buffer_UH)
        return buffer_UH.to(on_device.device, non_blocking=True)

    def _gather_tokens(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tokens, from the ranks; the host waits for the device."""
        if self.size == 1:
            return [ids.flatten().cpu()]
        # Two gathers, since an all-gather needs the same size from every rank.
        gathered_counts = gather_numbers([ids.numel()], ids.device, self.group)
        counts = gathered_counts.flatten().int().tolist()
        padded = F.pad(ids.flatten(), (0, max(counts) - ids.numel()))
        gathered = gather_rows(padded, len(counts) * len(padded), self.mesh)
        by_rank = gathered.view(len(counts), -1).cpu()
        return [row[:count] for row, count in zip(by_rank, counts, strict=True)]


class SharedHead(_RowExchange):
    """A head of which each rank computes the outputs of its own rows, for the tokens of all ranks.

    In the module's own forward pass, which gives whole logits, it is gathered, unless `counts` says
    how many rows each rank has in its batch: then it gives [B, 1, V], the logits of each row's last
    token.

    Args:
        last_block: from its forward pass on rows in host memory are copied, beside the computation.
        new_rows: those of new tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        last_block: nn.Module,
        new_rows: TokenRows | None,
    ) -> None:
        super().__init__(module, mesh)
        self.vocabulary: int = module.weight.shape[0]  # type: ignore[assignment, index]
        self.first = shard_bounds(self.vocabulary, rank=self.rank, size=self.size)[0]
        self.device = torch.device(mesh.device_type)
        self._side: SideStream | None = None
        self._copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.counts: Sequence[int] | None = None
        self.new_rows = new_rows
        last_block.register_forward_pre_hook(self._load_to_gpu)
        module.register_forward_pre_hook(self._gather_inputs)
        module.register_forward_hook(self._exchange)

    def rows(self) -> torch.Tensor:
        """The rank's rows [v, H], on the device, with those of new tokens as they are now."""
        self._load_to_gpu()
        rows_vH = self.own_rows()
        if self._copied is not None:
            rows_vH, copied = self._copied
            # Handed over: the caller's use ends the copy's life, so the next pass copies again.
            self._copied = None
            assert self._side is not None
            self._side.compute_waits(copied)
        if self.new_rows is None:
            return rows_vH
        return self.new_rows.write_into(rows_vH, self.first)

    @torch.no_grad()
    def _load_to_gpu(self, *_: Any) -> None:
        """Start to copy rows in host memory to the device, unless that has been done."""
        rows_vH = self.own_rows()
        # A recomputation of the block comes after the loss, which has used the rows: a copy would
        # stay in memory until the next pass.
        is_backward = torch._C._current_graph_task_id() != -1
        if rows_vH.device.type == self.device.type or self._copied is not None or is_backward:
            return
        self._side = self._side or SideStream(self.device)
        on_device_vH = torch.empty_like(rows_vH, device=self.device)
        self._copied = on_device_vH, self._side.copy(on_device_vH, rows_vH)

    @torch.no_grad()
    def _gather_inputs(
        self, module: nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Gather all rows, or the last tokens of all ranks' batches. args: hidden [B, T, H]."""
        rows_vH = self.rows()
        if self.counts is None:
            self._replace(gather_rows(rows_vH, self.vocabulary, self.mesh))
            return args
        self._replace(rows_vH)
        last_BH = args[0][:, -1]
        # To the largest batch of all ranks, which `counts` says to each without an exchange.
        padded_BH = F.pad(last_BH, (0, 0, 0, max(self.counts) - len(last_BH)))
        return (self.all_gather(padded_BH),)  # [R * B, H]

    @torch.no_grad()
    def _exchange(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Give each rank its tokens' logits of this rank's part of V: [R * B, v] -> [B, 1, V]."""
        if self.counts is None:
            return output
        most = max(self.counts)
        received = []  # numbers from each rank: ranks at the end may have fewer rows of the head
        for rank in range(self.size):
            first, stop = shard_bounds(self.vocabulary, rank=rank, size=self.size)
            received.append(most * (stop - first))
        sent = [received[self.rank]] * self.size
        flat = output.new_empty(most * self.vocabulary)
        dist.all_to_all_single(flat, output.flatten(), received, sent, group=self.group)
        logits_BV = torch.cat([part.view(most, -1) for part in flat.split(received)], dim=1)
        # Without the rows that only pad this rank's batch to the largest.
        return logits_BV[: self.counts[self.rank], None]

    # The exchanges of `chunked_loss`. It calls them for chunks of as many tokens on each rank, so
    # that all ranks make the same calls, whatever their own numbers of tokens.

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, concatenated: [N, ..] -> [R * N, ..]."""
        result = local.new_empty(self.size * len(local), *local.shape[1:])
        all_gather(result, local.contiguous(), group=self.group)
        return result

    def local_chunk(self, gathered: torch.Tensor) -> torch.Tensor:
        """This rank's part of what `all_gather` returns."""
        return gathered.chunk(self.size)[self.rank]

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, element by element, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, element by element, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def reduce_scatter_grad(
        self, grad: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add up the gradients of this rank's hidden states that all ranks have computed.

        grad: [R * N, v]. weight: [v, H]. out: filled with the sum, [N, H].
        """
        # Each rank knows the part of a gradient that its own columns of the logits give, for the
        # tokens of all: a sum over ranks is the sum over V.
        reduce_scatter(out, grad @ weight, group=self.group)
