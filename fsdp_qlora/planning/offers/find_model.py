"""Finds the configuration of a model that need not be here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from fsdp_qlora.model.architecture.config import load_config
from fsdp_qlora.planning.known_models import hub_name, known_sizes, names_near
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a well-known model by its name, with or without owner and suffix.

    None for other models.
    """
    sizes = known_sizes(name)
    return None if sizes is None else config_of(sizes)


def config_of(sizes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration for an entry of the table of well-known models.

    Raises:
        UserError: transformers is too old for the model.
    """
    kind = sizes["model_type"]
    if kind not in CONFIG_MAPPING:
        too_old = f"transformers {transformers.__version__} does not know model type {kind!r}"
        raise UserError(f"{too_old}. `pip install --upgrade transformers`.")
    # the usual values, which the table leaves out
    settings = {"tie_word_embeddings": False, "max_position_embeddings": 131072, **sizes}
    settings.pop("hub", None)
    return AutoConfig.for_model(**settings)


def find_model(name: str, *, trust_remote_code: bool) -> tuple[PretrainedConfig, Path | None]:
    """Find a model's configuration, and its folder if it has one here.

    name: a folder, a config.json, a well-known model, or a name on the hub. A well-known model has
    a folder if it is in the hub's cache.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if path.name.endswith(".json") and path.is_file():
        return load_config(path, name, trust_remote_code=trust_remote_code), path.parent
    # A folder of the same name is meant before the table's entry. The table needs no network; the
    # cache is asked first, since a tokenizer may be there as well.
    config = None if path.is_dir() else known_config(name)
    if config is not None:
        cached = try_to_load_from_cache(hub_name(name), "config.json")
        if not isinstance(cached, str):
            return config, None
        path = Path(cached).parent
    try:
        if not path.is_dir():
            path = hub.find_model_folder(
                name, with_weights=False, with_code=trust_remote_code, is_preview=True
            )
    except UserError as error:
        near = ", ".join(names_near(name))
        hint = f" Known models with similar names: {near}." if near else ""
        raise UserError(f"{error}{hint}") from error
    return load_config(path, name, trust_remote_code=trust_remote_code), path
