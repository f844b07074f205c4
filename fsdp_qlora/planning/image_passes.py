"""Counts the storages of images' forward and backward passes on the meta device."""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.architecture.decoder import OnMeta, tensors_of
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.model.architecture.towers import encoder_blocks
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.planning.known_integers import KnownIntegers
from fsdp_qlora.planning.storages import CountedStorages, EmptyLoss
from fsdp_qlora.sharding.both_states import for_policy
from fsdp_qlora.sharding.recompute import RecomputedTowerBlock
from fsdp_qlora.sharding.reference_towers import ReferenceTowers


class PassBytes(NamedTuple):
    """Bytes of activations."""

    forward: int
    """The peak of the forward pass."""
    kept: int
    """Kept between the passes; 0 without adapters."""
    backward: int
    """The peak of the backward pass, with what is kept."""


def count_passes(
    parts: ModelParts,
    precision: Precision,
    images: Mapping[str, torch.Tensor],
    *,
    keeps_inputs_only: bool,
    has_reference: bool = False,
) -> PassBytes:
    """Run the model's own function of images' features.

    Args:
        images: a processor's outputs.
        keeps_inputs_only: whether blocks with adapters keep nothing besides their inputs.
        has_reference: whether towers with adapters compute features for a reference, too.
    Raises:
        AttributeError: the model has no such function.
        Exception: its code fails without values.
    """
    model = _towers_alone(parts, precision, keeps_inputs_only=keeps_inputs_only)
    taken = inspect.signature(model.get_image_features).parameters
    # Sizes of images stay real.
    inputs = {
        name: value.to("meta") if value.is_floating_point() else value
        for name, value in images.items()
        if name in taken
    }
    trained = [each for adapter in adapter_modules(model) for each in adapter.parameters()]
    uncounted = [*model.parameters(), *model.buffers(), *tensors_of(inputs)]
    if has_reference:
        ReferenceTowers(model.children()).attach()
    with (
        CountedStorages(uncounted, everywhere=True) as count,
        OnMeta(),
        KnownIntegers(),
        _Kernels(),
        precision.autocasting(torch.device("cpu")),
        torch.set_grad_enabled(bool(trained)),
    ):
        features = _features(for_policy(model.get_image_features(**inputs)))
        forward = count.most
        if not trained:
            return PassBytes(forward, 0, 0)
        loss = torch.stack([EmptyLoss.apply(each) for each in features]).sum()
        # The decoder's input takes them up.
        del features
        kept = count.now
        count.most = count.now
        loss.backward()
    return PassBytes(forward, kept, count.most)


class _Kernels(TorchFunctionMode):
    """Attention by the kernels that a GPU has: on the meta device torch takes none."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _by_kernels(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Kernels():
        return forward(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **others: Any,
) -> torch.Tensor:
    """Attention of [B, H, L, D] by flash attention; by the memory-efficient kernel with a mask."""
    is_causal = others.get("is_causal", False)
    scale = others.get("scale")
    operators = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        attend = operators._scaled_dot_product_flash_attention
        return attend(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        # It adds the mask to scores.
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype, device="meta")
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    attend = operators._scaled_dot_product_efficient_attention
    keeps = torch.is_grad_enabled()
    return attend(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]


def _towers_alone(parts: ModelParts, precision: Precision, *, keeps_inputs_only: bool) -> Any:
    """A copy of a model that has its towers alone, with adapters as they are gathered."""
    model: Any = parts.model
    if hasattr(model.base_model, "get_image_features"):
        model = model.base_model
    towers = {*parts.towers.values()}
    alone = copy.copy(model)
    alone._modules = {}
    for name, child in model.named_children():
        if child in towers:
            alone._modules[name] = _as_gathered(child, precision, keeps_inputs_only)
    return alone


def _as_gathered(tower: nn.Module, precision: Precision, keeps_inputs_only: bool) -> nn.Module:
    result = copy.deepcopy(tower).train()
    adapters = adapter_modules(result)
    for adapter in adapters:
        adapter.to(precision.param_dtype or torch.float32)
    blocks = encoder_blocks(result)
    if keeps_inputs_only and blocks is not None and adapter_modules(blocks):
        for index, block in enumerate(blocks):
            # In a backward pass torch leaves modes for functions.
            block.forward = partial(_by_kernels, block.forward)
            blocks[index] = RecomputedTowerBlock(block)
    return result


def _features(output: Any) -> list[torch.Tensor]:
    """The tensors of images' features that a decoder takes: those with a gradient, if any have."""
    shown = getattr(output, "pooler_output", output)
    beside = getattr(output, "deepstack_features", None)
    return [each for each in _tensors((shown, beside)) if each.requires_grad]


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, values)
    return found
