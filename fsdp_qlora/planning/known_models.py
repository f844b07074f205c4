"""Finds the configuration of a model by its name: in a folder, in the table of well-known models, or on the hub."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig

from fsdp_qlora.model.architecture.models import load_config
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError

# The configs of well-known models by name, so that a plan needs no network.
KNOWN_MODELS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
_SUFFIXES = re.compile(r"(-(instruct|base|hf|chat|it|pt|thinking|fp8|v0\.\d|\d{4}))+$")


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix; None of another."""
    plain = name.lower().rpartition("/")[2].replace("meta-", "")
    found = KNOWN_MODELS.get(_NAMES.get(_letters(_SUFFIXES.sub("", plain)), ""))
    sizes = KNOWN_MODELS[found] if isinstance(found, str) else found
    return None if sizes is None else config_of(sizes)


def config_of(sizes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of an entry of the table of well-known models."""
    usual = {"tie_word_embeddings": False, "max_position_embeddings": 131072}
    return AutoConfig.for_model(**usual | {name: size for name, size in sizes.items() if name != "hub"})


def _letters(name: str) -> str:
    """A name without what stands between its words: llama-3.1-70b is written as llama3.1:70b too."""
    return re.sub(r"[-_: ]", "", name)


_NAMES = {_letters(name): name for name in KNOWN_MODELS}


def find_model(name: str, *, trust_remote_code: bool) -> tuple[PretrainedConfig, Path | None]:
    """The configuration of a model, and its folder: a folder, a config.json, a well-known name, or from the hub.

    A well-known model has a folder if it is in the hub's cache.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        return load_config(path, name, trust_remote_code=trust_remote_code), path.parent
    known = None if path.is_dir() else known_config(name)
    if known is not None:
        cached = try_to_load_from_cache(name, "config.json") if hub.is_hub_name(name) else None
        if not isinstance(cached, str):
            return known, None
        path = Path(cached).parent
    try:
        if not path.is_dir():
            path = hub.find_model_folder(name, with_weights=False, with_code=trust_remote_code, is_preview=True)
    except UserError as error:
        near = difflib.get_close_matches(name.lower().rpartition("/")[2], KNOWN_MODELS, n=3, cutoff=0.4)
        hint = f" Sizes that come along and are named like it: {', '.join(near)}." if near else ""
        raise UserError(f"{error}{hint}") from error
    return load_config(path, name, trust_remote_code=trust_remote_code), path
