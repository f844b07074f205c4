"""Bounds on what a config.json may say, before anything is built from it: a size may take hours or all memory."""

import re
from collections.abc import Iterator
from typing import Any

# A pattern of names -> the least and most that makes a model. The first that matches counts; far above any model known.
_BOUNDS = {
    r"num_(hidden_|decoder_)?layers|n_layers?": (1, 1000),
    r"hidden_size|n_embd|d_model|embed_dim": (1, 2**20),
    r"num_attention_heads|num_key_value_heads|n_heads?": (1, 2**16),
    r"head_dim": (1, 2**16),
    r"intermediate_size|ffn_dim|n_inner": (0, 2**24),
    r"vocab_size": (1, 2**27),
    r".*(layers|heads|experts|groups)": (-1, 2**16),
    r".*(size|dim|positions|position_embeddings|window|rank|length)": (-(2**20), 2**30),
}
_DEEPEST = 32
_LARGEST = 2**63


def find_wrong_size(content: Any) -> str | None:
    """What of a config.json's content makes no model, in words that follow its name; None where nothing does."""
    return next(filter(None, (_wrong(name, value) for name, value in _numbers(content, depth=0))), None) or (
        _wrong_padding(content)
    )


def _numbers(value: Any, depth: int, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, number) of every number in a nest of objects and arrays; (name, None) where it is too deep."""
    if depth > _DEEPEST:
        yield name, None
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, depth + 1, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, depth + 1, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value


def _wrong(name: str, value: int | None) -> str | None:
    if value is None:
        return "is nested too deeply"
    bounds = (limits for pattern, limits in _BOUNDS.items() if re.fullmatch(pattern, name))
    least, most = next(bounds, (-_LARGEST, _LARGEST))
    if least <= value <= most:
        return None
    shown = str(value) if abs(value) < _LARGEST else f"a number of {value.bit_length()} bits"
    return f"says {name[:80]!r} is {shown}, but it must be between {least} and {most}"


def _wrong_padding(content: Any) -> str | None:
    """torch's embedding takes no padding id outside of it. Negative ones count from the end."""
    pad, vocab = (content.get(key) if isinstance(content, dict) else None for key in ("pad_token_id", "vocab_size"))
    if not isinstance(pad, int) or not isinstance(vocab, int) or -vocab <= pad < vocab:
        return None
    return f"says pad_token_id is {pad}, outside of the {vocab} tokens of vocab_size; make it null"
