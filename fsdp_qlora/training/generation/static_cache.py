"""Keys and values of answers in memory of fixed size, for passes that run as CUDA graphs."""

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

# Lengths of caches are multiples of it, so that few different ones are allocated.
_MULTIPLE = 256


def can_be_static(config: PreTrainedConfig) -> bool:
    """Whether all layers of a model keep keys and values, and nothing else."""
    cache = StaticCache(config=config, max_cache_len=_MULTIPLE)
    return all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers)


def is_filled(cache: DynamicCache) -> bool:
    """Whether all layers of a cache have keys and values that `static_cache` can copy."""
    return all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized
        for layer in cache.layers
    )


def static_cache(
    cache: DynamicCache, config: PreTrainedConfig, places: torch.Tensor, num_known: int, most: int
) -> StaticCache:
    """Copy a cache of prompts to one of fixed size, once for each answer.

    A layer with a sliding window gets the full length, too: its mask leaves out what is behind the
    window. The library's own static layer for it counts tokens on the host, which a graph does not.

    Args:
        places: of each answer's prompt among the prompts, int64 [B].
        num_known: tokens of the longest prompt.
        most: tokens of the longest prompt with the longest answer.
    """
    length = -(-most // _MULTIPLE) * _MULTIPLE
    static = StaticCache(config=config, max_cache_len=length)
    for index, layer in enumerate(cache.layers):
        keys = layer.keys
        values = layer.values
        copy = StaticLayer(max_cache_len=length)
        copy.lazy_initialization(keys[places, :, :1], values[places, :, :1])
        # A sliding window has kept the last tokens alone.
        known = slice(num_known - keys.shape[-2], num_known)
        copy.keys[:, :, known] = keys[places]
        copy.values[:, :, known] = values[places]
        copy.cumulative_length.fill_(num_known)
        static.layers[index] = copy
        # The two are in memory for one layer only.
        layer.reset()
    return static
