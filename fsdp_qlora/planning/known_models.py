"""Sizes of well-known models (known_models.yaml), so that a plan needs no network."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, PretrainedConfig

# name -> what its config.json has
_MODELS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix; None of another."""
    plain = name.lower().rpartition("/")[2].replace("meta-", "")
    for suffix in ("-instruct", "-base", "-hf", "-chat", "-it", "-pt", "-v0.1", "-v0.3"):
        plain = plain.removesuffix(suffix)
    if plain not in _MODELS:
        return None
    return AutoConfig.for_model(**{"tie_word_embeddings": False, "max_position_embeddings": 131072, **_MODELS[plain]})


def close_names(name: str) -> list[str]:
    """Well-known models with names like this."""
    return difflib.get_close_matches(name.lower().rpartition("/")[2], _MODELS, n=3, cutoff=0.4)
