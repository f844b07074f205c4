"""Which linear layers with adapters may be computed together with others: the way "lean".

A function for several of them applies the products of `FrozenProduct` and the adapters' matrices
itself, and calls neither layer nor adapter.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_qlora.model.adapters.lora import LoraAdapter, LoraLinear
from fsdp_qlora.model.kernels.in_use import LEAN, ways_in_use
from fsdp_qlora.model.quantizers.base import QuantizedLinear, QuantizedWeight


def can_be_lean(layer: nn.Module) -> bool:
    """Whether a module is a frozen linear layer with LoRA, and its product is a plain one.

    DoRA, int8 and layers without an adapter are not.
    """
    # The classes exactly: a subclass computes something else, and FSDP2 gives an adapter whose
    # calls gather it a class of its own.
    if type(layer) is not LoraLinear or type(layer.lora) is not LoraAdapter:
        return False
    base = layer.base_layer
    if isinstance(base, QuantizedWeight):
        return isinstance(base, QuantizedLinear) and base.is_exact
    return isinstance(base, nn.Linear) and not base.weight.requires_grad


def is_lean_now(layers: Iterable[nn.Module | None], x: torch.Tensor) -> bool:
    """Whether one function may compute all of these layers in this call.

    Not for a reference, with dropout or where a hook waits for a layer's call.

    Args:
        x: [.., tokens, in].
    """
    if ways_in_use().linears != LEAN:
        return False
    # One token of each answer that is generated: the time is the host's for calls, not the GPU's.
    # All other passes without gradients give the bits of a step, such as log-probabilities that a
    # step's are divided by.
    if not torch.is_grad_enabled() and x.shape[-2] == 1:
        return False
    return all(layer is not None and _is_lean_now(layer) for layer in layers)


def _is_lean_now(layer: nn.Module) -> bool:
    if not can_be_lean(layer):
        return False
    assert isinstance(layer, LoraLinear)
    adapter = layer.lora
    drops = adapter.training and adapter.dropout > 0
    return layer.is_adapted and not drops and not _has_hooks(layer) and not _has_hooks(adapter)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)
