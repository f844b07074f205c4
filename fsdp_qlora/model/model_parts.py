"""The parts of a built model and its parameters by category, for sharding, plan and self-tests."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.distributed.shards import shard_bounds
from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.architecture.decoder import TOKENS, find_blocks, find_towers, looked_up
from fsdp_qlora.model.architecture.structure import has_tied_embeddings
from fsdp_qlora.model.quantizers.base import QuantizedWeight


class Offload(NamedTuple):
    """The weights in host memory, except adapters.

    blocks: number of decoder blocks. embeddings: all weights, those of the blocks included.
    """

    blocks: int = 0
    embeddings: bool = False


class ModelParts:
    """The modules of a built model that are sharded, offloaded and gathered as units.

    FSDP2 replaces parameters and keeps modules, so this is made once, after the model has been
    built.

    blocks: the decoder blocks, with their `RecomputedBlock` wrappers. head: None if the model has
    none. towers: see `find_towers`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.blocks = find_blocks(model)
        self.towers = find_towers(model)
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module | None = model.get_output_embeddings()
        self.is_tied = has_tied_embeddings(model)
        self._kinds: dict[nn.Module, Counter[Kind]] = {}

    @property
    def in_order(self) -> list[nn.Module]:
        """Embedding, blocks and head, in the order of the forward pass."""
        return [self.embedding, *self.blocks, *([] if self.head is None else [self.head])]

    @property
    def tower_adapters(self) -> list[nn.Module]:
        """The adapters in the towers."""
        return [each for tower in self.towers.values() for each in adapter_modules(tower)]

    def on_host(self, offload: Offload) -> list[nn.Module]:
        """The modules whose weights are in host memory.

        Blocks are spread over the model, so that the computation of several blocks hides the copy
        of one.
        """
        if offload.embeddings:
            return [self.model]
        count = offload.blocks
        # The middles of `count` equal stretches of the model: (index + 0.5) / count of the blocks.
        return [
            self.blocks[(2 * index + 1) * len(self.blocks) // (2 * count)] for index in range(count)
        ]

    def kinds(self, module: nn.Module) -> "Counter[Kind]":
        """The number of parameters of each kind in a part of the model."""
        # Cached, since a plan asks many times.
        if module not in self._kinds:
            self._kinds[module] = kinds_of(module)
        return self._kinds[module]

    @functools.cached_property
    def _lookups(self) -> dict[nn.Module, list[Any]]:
        """`looked_up` of the embeddings outside of blocks and towers."""
        inside: set[nn.Module] = set()
        for part in (*self.towers.values(), self.blocks):
            inside.update(part.modules())
        tables = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.Embedding) and module not in inside
        ]
        return looked_up(self.model, tables)

    @functools.cached_property
    def adds_tokens(self) -> bool:
        """Whether the model looks up more tokens than its batch has, such as prompts of its own."""
        return any(ids.numel() > TOKENS.numel() for ids in self._lookups.get(self.embedding, ()))

    @functools.cached_property
    def looks_up(self) -> bool:
        """Whether the embedding is a plain table of the batch's tokens."""
        # Cached before sharding, since it runs the model.
        lookups = self._lookups.get(self.embedding, ())
        # Ids on the meta device have no values any more; then the shape has to do.
        has_tokens = all(
            ids.shape == TOKENS.shape if ids.is_meta else _are_tokens(ids) for ids in lookups
        )
        return has_tokens and is_plain_lookup(self.embedding)

    @functools.cached_property
    def token_tables(self) -> list[nn.Module]:
        """Further embeddings that the model looks up by the text's tokens, cached as `looks_up`.

        gemma3n has one whose rows go to its blocks. Other tables are for positions or for kinds of
        tokens.
        """
        others = {
            table: all_ids
            for table, all_ids in self._lookups.items()
            if table is not self.embedding
        }
        tables = [table for table, all_ids in others.items() if all(map(_are_tokens, all_ids))]
        return [table for table in tables if is_plain_lookup(table)]

    @functools.cached_property
    def matrices(self) -> list[tuple[int, ...]]:
        """The shapes of the blocks' matrices."""
        return matrix_shapes(self.blocks)


def _are_tokens(ids: Any) -> bool:
    return isinstance(ids, torch.Tensor) and not ids.is_meta and torch.equal(ids, TOKENS)


class Kind(NamedTuple):
    """The properties by which parameters are counted.

    category: codes (quantized weights), statistics (of quantization), frozen (other frozen weights)
    or trainable. num_weights: number of the model's weights in the parameter: for codes the layer's
    number, for statistics 0.
    """

    category: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_weights: int
    in_adapter: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def largest_shard(self, num_shards: int) -> int:
        """Bytes on the fullest rank, the first one."""
        # FSDP2 shards dim 0 as torch.chunk does, so no rank has more rows than the first.
        _, rows = shard_bounds(self.shape[0], rank=0, size=num_shards)
        return rows * (self.num_bytes // max(self.shape[0], 1))


class CategoryBytes(NamedTuple):
    """The bytes of one category. largest_shard: bytes on the fullest rank, the first one."""

    total: int
    largest_shard: int


def each_parameter(model: nn.Module) -> dict[nn.Parameter, Kind]:
    """Every parameter of a model, sharded or on the meta device, and its kind.

    Tied parameters are counted once.
    """
    adapters = {
        parameter for adapter in adapter_modules(model) for parameter in adapter.parameters()
    }
    kinds: dict[nn.Parameter, Kind] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in kinds:
                category, num_weights = _classify(module, name, parameter)
                # of a DTensor the shape of the whole parameter, so it does not depend on the ranks
                shape = tuple(parameter.shape)
                in_adapter = parameter in adapters
                kinds[parameter] = Kind(category, shape, parameter.dtype, num_weights, in_adapter)
    return kinds


def _classify(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, int]:
    if parameter.requires_grad:
        return "trainable", parameter.numel()
    if isinstance(module, QuantizedWeight) and name in module.statistics:
        return "statistics", 0
    # Codes are packed: their number is not that of the weights, which the module's shape gives.
    if isinstance(module, QuantizedWeight) and name == "weight":
        return "codes", math.prod(module.shape)
    return "frozen", parameter.numel()


def count_parameters(parts: ModelParts) -> dict[str, int]:
    """The numbers of parameters.

    total: in the base model. in_blocks: frozen ones in the blocks. quantized. trainable.
    """
    in_blocks = {*parts.blocks.parameters()}
    counts = {"total": 0, "in_blocks": 0, "quantized": 0, "trainable": 0}
    for parameter, kind in each_parameter(parts.model).items():
        is_trainable = kind.category == "trainable"
        if is_trainable:
            counts["trainable"] += kind.num_weights
        # Adapters are not part of the base model, whose size people know.
        if kind.in_adapter:
            continue
        counts["total"] += kind.num_weights
        if not is_trainable and parameter in in_blocks:
            counts["in_blocks"] += kind.num_weights
        if kind.category == "codes":
            counts["quantized"] += kind.num_weights
    return counts


def kinds_of(module: nn.Module) -> Counter[Kind]:
    """The number of parameters of each kind in a module."""
    return Counter(each_parameter(module).values())


def count_bytes(kinds: Mapping[Kind, int], num_shards: int) -> dict[str, CategoryBytes]:
    """Bytes by category.

    kinds: number of parameters of each kind. num_shards: ranks that share them.
    """
    counts: dict[str, CategoryBytes] = {}
    for kind, count in kinds.items():
        total, largest = counts.get(kind.category, CategoryBytes(0, 0))
        shard = kind.largest_shard(num_shards)
        counts[kind.category] = CategoryBytes(
            total + count * kind.num_bytes, largest + count * shard
        )
    return counts


def matrix_shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of a module's matrices without adapters, as they are when decoded."""
    base = [kind for kind in each_parameter(module).values() if not kind.in_adapter]
    plain = [kind.shape for kind in base if kind.category in ("frozen", "trainable")]
    quantized = [part.shape for part in module.modules() if isinstance(part, QuantizedWeight)]
    return [shape for shape in (*quantized, *plain) if len(shape) > 1]


@torch.no_grad()
def is_plain_lookup(module: nn.Module) -> bool:
    """Whether a module's output for a token depends only on the token's row.

    It may be the row times a scale. Then the rows may be renumbered (see sharding/vocabulary.py).
    Probed with a few tokens.
    """
    # With max_norm nn.Embedding rescales rows of its weight in place, in the forward pass.
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    vocabulary, hidden = module.weight.shape
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(vocabulary + hidden, generator=generator).to(module.weight.dtype)
    middle = vocabulary // 2
    # Code that treats some tokens differently names the padding, or the vocabulary's ends. At most
    # V - 2, so that ids + 1 are tokens, too.
    padding = min(module.padding_idx or 0, vocabulary - 2)
    ids = torch.tensor([[0, 1, vocabulary - 2, padding, middle, 1]])

    def outputs(ids: torch.Tensor, *, first: int) -> torch.Tensor:
        # Overlapping rows: all different, in the memory of V + H numbers instead of V * H. Row i
        # is values[first + i : first + i + H].
        rows = values[first:].as_strided((vocabulary, hidden), (1, 1))
        result: torch.Tensor = torch.func.functional_call(module, {"weight": rows}, (ids,))
        return result

    try:
        # Row `id` of the one matrix is row `id + 1` of the other: a plain lookup cannot tell them
        # apart.
        return torch.equal(outputs(ids, first=1), outputs(ids + 1, first=0))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
