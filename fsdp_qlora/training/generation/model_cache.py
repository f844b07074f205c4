"""The cache of a model: how it is passed, and its copy in memory of fixed size.

Passes that run as CUDA graphs need the copy.
"""

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fsdp_qlora.model.architecture.token_mixers import CACHE_ARGUMENTS

# Memory for keys and values has room for a multiple of these tokens: the alignment of attention's
# kernels.
LENGTH_MULTIPLE = 64


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # the library has no types
    """A layer's keys and values, each in memory with room for further tokens.

    The library's own layer copies all of them for each token.
    """

    keys: torch.Tensor
    values: torch.Tensor
    _room: tuple[torch.Tensor, ...] = ()
    _used: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, layer: DynamicLayer) -> "RoomyLayer":
        """A layer that has the keys and values of another one, and continues them."""
        roomy = cls()
        roomy.__dict__.update(layer.__dict__)
        return roomy

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        known = self.keys.shape[-2]
        end = known + key_states.shape[-2]
        # Others may have replaced them: by a choice of rows, or without the last tokens.
        is_ours = self._used and self.keys is self._used[0] and self.values is self._used[1]
        if not is_ours or end > self._room[0].shape[-2]:
            self._room = (_with_room(self.keys, end), _with_room(self.values, end))
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, known:end] = states
        self._used = (self._room[0][:, :, :end], self._room[1][:, :, :end])
        self.keys, self.values = self._used
        return self._used


def _with_room(states: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A copy of keys or values [B, G, T, D] with room for at least `num_tokens` tokens."""
    length = -(-num_tokens // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    room = states.new_empty(*states.shape[:2], length, states.shape[-1])
    room[:, :, : states.shape[2]] = states
    return room


def make_roomy(cache: DynamicCache) -> None:
    """Give the layers of a cache that keep all tokens room for further ones."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = RoomyLayer.of(layer)


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether the model's cache is the library's, whose rows can be copied."""
    return cache_argument(model) is not None and model._supports_default_dynamic_cache()


def cache_argument(model: PreTrainedModel) -> str | None:
    """The name of the argument that takes a model's cache; None if there is none."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def can_be_static(config: PreTrainedConfig, num_blocks: int) -> bool:
    """Whether each block of a model keeps keys and values of its own, and nothing else."""
    layers = StaticCache(config=config, max_cache_len=LENGTH_MULTIPLE).layers
    kinds = {type(layer) for layer in layers}
    return len(layers) >= num_blocks and kinds <= {StaticLayer, StaticSlidingWindowLayer}


def sliding_windows(config: PreTrainedConfig) -> list[int]:
    """The tokens that the layers with a sliding window keep, of each layer."""
    layers = DynamicCache(config=config).layers
    return [
        layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)
    ]


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

    A layer with a sliding window gets the full length, too, which its mask limits to the window.
    The library's own static layer for it counts tokens on the host, which a graph does not.

    Args:
        places: of each answer's prompt among the prompts, int64 [B].
        num_known: tokens of the longest prompt.
        most: tokens of the longest prompt with the longest answer.
    """
    length = -(-most // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
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
        layer.keys = layer.values = None
    return static
