"""The sizes of each decoder block, from the configuration of its layer: blocks may differ."""

from typing import Any, NamedTuple

from transformers import PretrainedConfig

# how configurations name `chosen`
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


class BlockShape(NamedTuple):
    """The sizes of a decoder block.

    hidden: of a token between blocks. heads: of queries. groups: heads of keys and values.
    head_dim: size of a head of queries. inner: of the MLP. window: tokens that a token sees, itself
    included, None for all before it. has_keys: whether the block computes keys and values;
    otherwise it uses those of an earlier one. chosen: experts per token.
    """

    hidden: int
    heads: int
    groups: int
    head_dim: int
    inner: int = 0
    window: int | None = None
    has_keys: bool = True
    chosen: int = 0

    @property
    def attended(self) -> int:
        """Size of the queries of a token."""
        return self.heads * self.head_dim


def layer_configs(config: PretrainedConfig) -> list[Any]:
    """The text model's configuration as each of its layers has it."""
    # The global configuration raises for a setting that differs by layer.
    text = config.get_text_config()
    return [*text.per_layer_config] if getattr(text, "num_hidden_layers", 0) else [text]


def any_layer_has(config: PretrainedConfig, *settings: str) -> bool:
    """Whether a layer of the text model has a value but 0 for one of these settings."""
    return any(
        getattr(layer, setting, None) for layer in layer_configs(config) for setting in settings
    )


def has_silu(config: PretrainedConfig) -> bool:
    """Whether the text model's MLPs have SiLU as their activation."""
    text = config.get_text_config()
    named = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    return named in ("silu", "swish")


def block_shapes(config: PretrainedConfig) -> tuple[BlockShape, ...]:
    """The shapes of the text model's blocks. A model without attention counts as one head."""
    layers = layer_configs(config)
    # The last blocks of gemma3n and gemma4 use keys and values of earlier ones.
    with_keys = len(layers) - (getattr(layers[0], "num_kv_shared_layers", None) or 0)
    return tuple(
        _shape(layer, index, has_keys=index < with_keys) for index, layer in enumerate(layers)
    )


def _shape(layer: Any, index: int, *, has_keys: bool) -> BlockShape:
    heads = _value(layer, "num_attention_heads", index) or 1
    groups = _value(layer, "num_key_value_heads", index) or heads
    head_dim = _value(layer, "head_dim", index) or layer.hidden_size // heads
    # The sizes that transformers' models take where a configuration leaves them out.
    inner = _value(layer, "intermediate_size", index) or 4 * layer.hidden_size
    kinds = getattr(layer, "layer_types", None)
    window = None
    # Without kinds of layers a window is that of all of them (mistral).
    if not kinds or "sliding" in kinds[index]:
        window = _value(layer, "sliding_window", index)
    chosen = 0
    for name in _CHOSEN:
        chosen = chosen or _value(layer, name, index) or 0
    return BlockShape(
        hidden=layer.hidden_size,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        inner=inner,
        window=window or None,
        has_keys=has_keys,
        chosen=chosen,
    )


def _value(layer: Any, name: str, index: int) -> Any:
    """A layer's value, which some configurations give as a list of all layers."""
    value = getattr(layer, name, None)
    return value[min(index, len(value) - 1)] if isinstance(value, list | tuple) else value
