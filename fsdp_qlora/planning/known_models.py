"""Sizes of well-known models, so that a plan needs no network. From the config.json of each on the Hugging Face hub."""

import difflib
from typing import Any

from transformers import AutoConfig, PretrainedConfig

# name -> type, vocabulary, hidden, inner, blocks, heads, groups, size of a head, and what else is its own.
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_SIZES: dict[str, tuple[Any, ...]] = {
    "llama-2-7b": ("llama", 32000, 4096, 11008, 32, 32, 32, 128),
    "llama-2-13b": ("llama", 32000, 5120, 13824, 40, 40, 40, 128),
    "llama-2-70b": ("llama", 32000, 8192, 28672, 80, 64, 8, 128),
    "llama-3.2-1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, _TIED),
    "llama-3.2-3b": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, _TIED),
    "llama-3.1-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128),
    "llama-3.3-70b": ("llama", 128256, 8192, 28672, 80, 64, 8, 128),
    "llama-3.1-405b": ("llama", 128256, 16384, 53248, 126, 128, 8, 128),
    "yi-34b": ("llama", 64000, 7168, 20480, 60, 56, 8, 128),
    "mistral-7b": ("mistral", 32768, 4096, 14336, 32, 32, 8, 128),
    "mistral-nemo-12b": ("mistral", 131072, 5120, 14336, 40, 32, 8, 128),
    "mistral-small-24b": ("mistral", 131072, 5120, 32768, 40, 32, 8, 128),
    "mixtral-8x7b": ("mixtral", 32000, 4096, 14336, 32, 32, 8, 128, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128),
    "qwen2.5-14b": ("qwen2", 152064, 5120, 13824, 48, 40, 8, 128),
    "qwen2.5-32b": ("qwen2", 152064, 5120, 27648, 64, 40, 8, 128),
    "qwen2.5-72b": ("qwen2", 152064, 8192, 29568, 80, 64, 8, 128),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, _TIED),
    "qwen3-4b": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, _TIED),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3-14b": ("qwen3", 151936, 5120, 17408, 40, 40, 8, 128),
    "qwen3-32b": ("qwen3", 151936, 5120, 25600, 64, 64, 8, 128),
    "qwen3-30b-a3b": (
        "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128,
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "gemma-2-9b": ("gemma2", 256000, 3584, 14336, 42, 16, 8, 256, _TIED),
    "gemma-2-27b": ("gemma2", 256000, 4608, 36864, 46, 32, 16, 128, _TIED),
    "phi-4": ("phi3", 100352, 5120, 17920, 40, 40, 10, 128, {"pad_token_id": None}),
}  # fmt: skip


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix; None of another."""
    plain = name.lower().rpartition("/")[2].replace("meta-", "")
    for suffix in ("-instruct", "-base", "-hf", "-chat", "-it", "-pt", "-v0.1", "-v0.3"):
        plain = plain.removesuffix(suffix)
    if plain not in _SIZES:
        return None
    kind, vocabulary, hidden, inner, blocks, heads, groups, head, *more = _SIZES[plain]
    sizes = {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head, "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **(sizes | (more[0] if more else {})))


def close_names(name: str) -> list[str]:
    """Well-known models with names like this."""
    return difflib.get_close_matches(name.lower().rpartition("/")[2], _SIZES, n=3, cutoff=0.4)
