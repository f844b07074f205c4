"""Frozen embeddings and heads that several ranks share: rows stay where they are, and hidden states
are exchanged.

FSDP2 would gather the whole matrix on every rank in each micro-batch, 1.2 GB of a Qwen3-8B. But
tokens need few of an embedding's rows, and a head's outputs can be computed where its rows are
(training/head_loss.py).

Shapes: V tokens of the vocabulary, of which a rank keeps the rows that FSDP2 would give it; hidden
size H.
"""

import contextlib
from collections.abc import Iterator, Sequence
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
from fsdp_qlora.model.adapters.token_rows import TokenRows
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.sharding.host_memory import SideStream


def is_shared(
    parts: ModelParts, num_shards: int, param_dtype: torch.dtype | None
) -> tuple[bool, bool]:
    """Whether so many ranks share the embedding and the head: not if it trains or computes
    something of its own.

    Args:
        param_dtype: in which FSDP2 would gather; None for the weights' own.
    """
    embedding = parts.embedding
    head = parts.head
    if num_shards == 1 or not isinstance(head, nn.Linear):
        return False, False
    looks_up = _has_frozen_rows(embedding, num_shards, param_dtype) and parts.looks_up
    multiplies = (
        _has_frozen_rows(head, num_shards, param_dtype) and type(head).forward is nn.Linear.forward
    )
    if parts.is_tied and looks_up != multiplies:
        return False, False
    return looks_up, multiplies


def share_vocabulary(
    parts: ModelParts, mesh: DeviceMesh, param_dtype: torch.dtype | None
) -> set[nn.Parameter]:
    """Have each rank keep its rows of the frozen embedding and head, and use them where they are.

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
    tables += [
        table
        for table in parts.token_tables
        if _has_frozen_rows(table, shard_size(mesh), param_dtype)
    ]
    for table in tables:
        table.weight = _sharded(table.weight, mesh)
        shared.add(table.weight)
    _look_up(parts.model, tables, mesh)
    if multiplies:
        head.weight = embedding.weight if parts.is_tied else _sharded(head.weight, mesh)
        head.vocab_shard = SharedHead(head, mesh, parts.blocks[-1])
        shared.add(head.weight)
    return shared


def look_up_on_host(parts: ModelParts, mesh: DeviceMesh, param_dtype: torch.dtype | None) -> None:
    """Have a rank copy only its tokens' rows of frozen embeddings that it has whole in
    host memory.
    """
    tables = [*([parts.embedding] if parts.looks_up else []), *parts.token_tables]
    _look_up(
        parts.model, [table for table in tables if _has_frozen_rows(table, 1, param_dtype)], mesh
    )


def _look_up(model: PreTrainedModel, tables: Sequence[Any], mesh: DeviceMesh) -> None:
    for table in tables:
        table.vocab_shard = Lookup(table, mesh, model)
    model.lookups = [table.vocab_shard for table in tables]


def _lookups_of(model: PreTrainedModel) -> "list[Lookup]":
    return getattr(model, "lookups", [])


def lookup_of(model: PreTrainedModel) -> "Lookup | None":
    """The model's lookup of tokens on other ranks, if its embedding is shared."""
    return getattr(model.get_input_embeddings(), "vocab_shard", None)


def shared_head_of(model: PreTrainedModel) -> "SharedHead | None":
    """How the ranks share the model's head, if they do."""
    return getattr(model.get_output_embeddings(), "vocab_shard", None)


def sharing_ranks(model: PreTrainedModel) -> list[int]:
    """The ranks with which this one shares an embedding or a head, itself included, in the order of
    their rows.
    """
    shared = next(iter(_lookups_of(model)), None) or shared_head_of(model)
    return dist.get_process_group_ranks(shared.group) if shared else []


@contextlib.contextmanager
def tokens_known(
    model: PreTrainedModel,
    tokens: Sequence[torch.Tensor] | None,
    *,
    first: int | None = None,
    has_images: bool = False,
) -> Iterator[None]:
    """In this block of code the host knows what the ranks look up, so that no device is asked for
    it.

    Args:
        tokens: ids that each of `sharing_ranks` looks up in a forward pass, int64 on the CPU. None:
        not known. first: how many of its own this rank's model uses; None for all. has_images:
        further embeddings of the tokens are asked for others where a rank has images.
    """
    for lookup in _lookups_of(model):
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
    """`tokens_known` where all ranks look up the same ones, on the CPU: no rank is asked, not even
    a fake one.
    """
    return tokens_known(model, [input_ids.flatten()] * len(sharing_ranks(model)) or None)


def _has_frozen_rows(module: nn.Module, num_shards: int, param_dtype: torch.dtype | None) -> bool:
    """Whether a module's only parameter is a frozen weight of which every rank has a row."""
    weight: torch.Tensor | None = getattr(module, "weight", None)
    # not new tokens' rows
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    if weight is None or len(frozen) != 1 or weight.requires_grad:
        return False
    first, last = shard_bounds(weight.shape[0], rank=num_shards - 1, size=num_shards)
    return param_dtype in (None, weight.dtype) and first < last


def _sharded(weight: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """The parameter as FSDP2 shards it: this rank's rows of it."""
    first, last = own_rows(weight, mesh)
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    local = weight.detach()[first:last].clone()
    shape = weight.shape
    stride = weight.stride()
    sharded = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return nn.Parameter(sharded, requires_grad=False)


class _RowExchange:
    """A module of which a rank has some rows, and that computes with others in its forward pass."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module = module
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh["shard"].get_group()
        self.rank = shard_rank(mesh)
        self.size = shard_size(mesh)
        self._shared: nn.Parameter | None = None
        self.stored: nn.Parameter | None = None
        module.register_forward_hook(self._leave, always_call=True)

    def own_rows(self) -> torch.Tensor:
        """This rank's rows, on the device that stores them."""
        return local_part(self.module.weight if self.stored is None else self.stored)  # type: ignore[arg-type]

    def _replace(self, weight: torch.Tensor) -> None:
        self._shared = self.module._parameters["weight"]
        self.module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def _leave(self, *_: Any) -> None:
        if self._shared is not None:
            self.module._parameters["weight"] = self._shared
            self._shared = None


class _Wanted(NamedTuple):
    """Rows that ranks give each other.

    rows: numbers among this rank's, those for the first rank first. sent, taken: how many to and
    from each rank. places: of this rank's tokens among the rows that it takes.
    """

    rows: torch.Tensor
    sent: list[int]
    taken: list[int]
    places: torch.Tensor


def plan_row_exchange(tokens: Sequence[torch.Tensor], vocabulary: int, rank: int) -> _Wanted:
    """Which embedding rows each rank sends to each other, so that it has every row of its tokens
    once.

    Args:
        tokens: ids of each rank, int64 on the CPU.
    """
    # Every rank knows the tokens of all (data/batches/micro_batch.py), so all find the same plan:
    # rows take one all-to-all, and no exchange of their numbers comes before it, for which the host
    # would wait.
    size = len(tokens)
    starts = [shard_bounds(vocabulary, rank=other, size=size)[0] for other in range(size)]
    distinct = [ids.unique() for ids in tokens]  # sorted, so by rank
    ends = [
        torch.searchsorted(ids, torch.tensor([*starts, vocabulary])).tolist() for ids in distinct
    ]
    wanted_of_rank = [
        ids[end[rank] : end[rank + 1]] for ids, end in zip(distinct, ends, strict=True)
    ]
    return _Wanted(
        rows=torch.cat(wanted_of_rank) - starts[rank],
        sent=[len(ids) for ids in wanted_of_rank],
        taken=[stop - start for start, stop in zip(ends[rank], ends[rank][1:], strict=False)],
        places=torch.searchsorted(distinct[rank], tokens[rank]),
    )


class Lookup(_RowExchange):
    """An embedding that gets from each rank the rows of its tokens, each once, and looks its tokens
    up in these.

    The result is that of the whole matrix to the bit. From weights in host memory only these rows
    are copied.

    Other code of the model finds a matrix of NaN meanwhile, in no memory: gemma4 reads a row that
    it does not use, and a shard, or a tensor of the host, would fail. What uses one would not pass
    unnoticed.

    Attributes:
        stored: the weight, while the model's forward pass runs.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, model: PreTrainedModel) -> None:
        super().__init__(module, mesh)
        model.base_model.register_forward_pre_hook(self._hide)
        model.base_model.register_forward_hook(self._show, always_call=True)
        # It says whose row gets no gradient, which a frozen row never does, and must be the number
        # of a row.
        module.padding_idx = None  # type: ignore[assignment]
        self.tokens: Sequence[torch.Tensor] | None = None
        self.first: int | None = None
        module.register_forward_pre_hook(self._enter)

    def _hide(self, *_: Any) -> None:
        weight: Any = self.module.weight
        nan = torch.full((), torch.nan, dtype=weight.dtype, device=self.mesh.device_type)
        self.stored = self.module._parameters["weight"]
        self.module._parameters["weight"] = nn.Parameter(
            nan.expand(weight.shape), requires_grad=False
        )

    def _show(self, *_: Any) -> None:
        self.module._parameters["weight"] = self.stored
        self.stored = None

    @torch.no_grad()
    def _enter(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids = args[0]
        tokens = self.tokens if self.tokens is not None else self._ask(ids)
        tokens = [each.where(each < len(module.weight), 0) for each in tokens]  # type: ignore[arg-type]  # as gemma3n's
        used = tokens[self.rank][: self.first]
        assert used.numel() == ids.numel(), (
            "the model looks up other tokens than those of its batch"
        )
        wanted = plan_row_exchange(tokens, len(module.weight), self.rank)  # type: ignore[arg-type]
        copied = to_device(
            {"rows": wanted.rows, "places": wanted.places[: self.first].view(ids.shape)}, ids.device
        )
        rows = self._own(wanted.rows, copied["rows"])
        if self.size > 1:
            own_rows = rows
            rows = rows.new_empty(sum(wanted.taken), rows.shape[1])
            dist.all_to_all_single(rows, own_rows, wanted.taken, wanted.sent, group=self.group)
        self._replace(rows)
        return copied["places"], *args[1:]

    def _own(self, on_host: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The rank's rows of these numbers, which are on the host and on the device;
        on the device.
        """
        rows = self.own_rows()
        if rows.device.type == numbers.device.type:
            return rows.index_select(0, numbers)
        pinned = numbers.device.type == "cuda"
        copied = torch.empty(len(on_host), rows.shape[1], dtype=rows.dtype, pin_memory=pinned)
        return torch.index_select(rows, 0, on_host, out=copied).to(
            numbers.device, non_blocking=True
        )

    def _ask(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tokens, from the ranks; the host waits for the device."""
        if self.size == 1:
            return [ids.flatten().cpu()]
        counts = gather_numbers([ids.numel()], ids.device, self.group).flatten().int().tolist()
        padded = F.pad(ids.flatten(), (0, max(counts) - ids.numel()))
        rows = gather_rows(padded, len(counts) * len(padded), self.mesh).view(len(counts), -1).cpu()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]


class SharedHead(_RowExchange):
    """A head of which each rank computes the outputs of its own rows, for the tokens of all ranks.

    In the module's own forward pass, which gives whole logits, it is gathered, unless `counts` says
    how many rows each rank has in its batch: then it gives [B, 1, V], the logits of each row's last
    token.

    Args:
        last_block: from its forward pass on rows in host memory are copied, beside the computation.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, last_block: nn.Module) -> None:
        super().__init__(module, mesh)
        self.vocabulary: int = module.weight.shape[0]  # type: ignore[assignment, index]
        self.first = shard_bounds(self.vocabulary, rank=self.rank, size=self.size)[0]
        self.device = torch.device(mesh.device_type)
        self._side: SideStream | None = None
        self._copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.counts: Sequence[int] | None = None
        self.new_rows: TokenRows | None = getattr(module, "new_rows", None)
        last_block.register_forward_pre_hook(self._bring)
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._exchange)

    def rows(self) -> torch.Tensor:
        """The rank's rows, on the device, with those of new tokens as they are now."""
        self._bring()
        rows = self.own_rows()
        if self._copied is not None:
            (rows, copied) = self._copied
            self._copied = None
            assert self._side is not None
            self._side.compute_waits(copied)
        return self.new_rows.write_into(rows, self.first) if self.new_rows else rows

    @torch.no_grad()
    def _bring(self, *_: Any) -> None:
        rows = self.own_rows()
        is_backward = torch._C._current_graph_task_id() != -1  # a recomputation of the block
        if rows.device.type == self.device.type or self._copied is not None or is_backward:
            return
        self._side = self._side or SideStream(self.device)
        there = torch.empty_like(rows, device=self.device)
        self._copied = there, self._side.copy(there, rows)

    @torch.no_grad()
    def _enter(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self.counts is None:
            self._replace(gather_rows(self.rows(), self.vocabulary, self.mesh))
            return args
        self._replace(self.rows())
        last = args[0][:, -1]
        return (self.all_gather(F.pad(last, (0, 0, 0, max(self.counts) - len(last)))),)

    @torch.no_grad()
    def _exchange(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Give each rank its tokens' outputs of this rank's part of V."""
        if self.counts is None:
            return output
        bounds = [
            shard_bounds(self.vocabulary, rank=rank, size=self.size) for rank in range(self.size)
        ]
        most = max(self.counts)
        taken = [most * (stop - first) for first, stop in bounds]
        received = output.new_empty(most * self.vocabulary)
        dist.all_to_all_single(
            received, output.flatten(), taken, [taken[self.rank]] * self.size, group=self.group
        )
        columns = [part.view(most, -1) for part in received.split(taken)]
        return torch.cat(columns, dim=1)[: self.counts[self.rank], None]

    # The exchanges of `chunked_loss`, for as many tokens of each rank.

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, concatenated."""
        result = own.new_empty(self.size * len(own), *own.shape[1:])
        all_gather(result, own.contiguous(), group=self.group)
        return result

    def local_chunk(self, gathered: torch.Tensor) -> torch.Tensor:
        return gathered.chunk(self.size)[self.rank]

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def reduce_scatter_grad(
        self, grad: torch.Tensor, weight: torch.Tensor, own: torch.Tensor
    ) -> None:
        """Add up, in `own`, the gradients of a rank's hidden states that all ranks
        have computed.
        """
        reduce_scatter(own, grad @ weight, group=self.group)
