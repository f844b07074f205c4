"""Decodes the weights of quantized linear layers once for many forward passes.

For passes of few tokens each, such as those of answers, which would take longer to decode the
weights than to multiply.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fsdp_qlora.model.quantizers.base import QuantizedLinear


@contextlib.contextmanager
def decoded_once(model: nn.Module, num_tokens: int, device: torch.device) -> Iterator[None]:
    """Keep decoded weights in the compute dtype for the duration of the block.

    Each is decoded at its first use, on the rank that uses it. No weight may change meanwhile, and
    no pass may be differentiated.

    Args:
        num_tokens: of most passes. Weights that are multiplied without being decoded for so few
            stay as they are.
    """
    layers = [layer for layer in _linears(model.modules()) if layer.decodes(num_tokens, device)]
    for layer in layers:
        layer.keeps_decoded = True
    try:
        yield
    finally:
        for layer in layers:
            layer.forget_decoded()


def decoded_bytes(modules: Iterable[nn.Module], num_tokens: int, device: torch.device) -> int:
    """Bytes of the weights that `decoded_once` keeps on a rank."""
    layers = [layer for layer in _linears(modules) if layer.decodes(num_tokens, device)]
    return sum(
        layer.out_features * layer.in_features * layer.compute_dtype.itemsize for layer in layers
    )


def _linears(modules: Iterable[nn.Module]) -> list[QuantizedLinear]:
    return [module for module in modules if isinstance(module, QuantizedLinear)]
