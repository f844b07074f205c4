"""Finds and chooses the kernel of torch's scaled_dot_product_attention on a GPU before a run."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

REPEATED = "sdpa_repeated"  # our name for SDPA with a head of keys and values for each head of queries


def choose_sdpa(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """transformers' name of the SDPA variant that needs the least memory: `sdpa`, or REPEATED if that is better.

    Only the flash kernel (16 bits, Ampere and newer) supports grouped keys and values. Otherwise torch falls back to
    the math kernel, which stores T x T scores per head, unless keys and values are repeated.
    """
    if device.type != "cuda" or find_kernel(config, dtype, device, repeated=False) != "math":
        return "sdpa"
    if find_kernel(config, dtype, device, repeated=True) == "math":
        return "sdpa"
    AttentionInterface.register(REPEATED, _sdpa_of_repeated)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)
    return REPEATED


def find_kernel(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, repeated: bool) -> str:
    """The kernel that torch chooses for causal rows without a mask: flash, memory-efficient or math."""
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    num_groups = num_heads if repeated else getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = head_size(config)
    query = torch.empty(1, num_heads, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    key = torch.empty(1, num_groups, 128, head_dim, dtype=dtype, device=device, requires_grad=True)
    params = SDPAParams(query, key, key, None, 0.0, True, num_groups != num_heads)
    if can_use_flash_attention(params):
        return "flash"
    return "memory-efficient" if can_use_efficient_attention(params) else "math"


def head_size(config: PretrainedConfig) -> int:
    """The dimension of a head of queries."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _sdpa_of_repeated(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, of query [rows, heads, T, head_dim], key and value [rows, groups, T, head_dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    # Replaces the module, whose attributes would make transformers repeat the keys again.
    alone = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(alone, query, key, value, *args, **kwargs)
    return result
