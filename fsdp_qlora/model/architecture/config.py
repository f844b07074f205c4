"""Reads config.json: which class builds the model, its context and its new blocks."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.utils import HF_MODULES_CACHE

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named, why_not_writable
from fsdp_qlora.utils.text import shown

log = logging.getLogger("fsdp_qlora")

# Llama 3.1 405B has 126; a damaged configuration may have so many that building would not end.
_MAX_BLOCKS = 1000
MOST_OF_A_WEIGHT = 2**35  # elements; all experts of a layer of Kimi K2 have 2**33
NEW_BLOCKS = "new_blocks"  # in config.json: indices of the decoder blocks that `expand` added


def load_config(folder: Path, name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a decoder-only model's configuration.

    Args:
        folder: the model's folder, or its config.json under any name.
        trust_remote_code: run code from the folder; the log names its files.
    Raises:
        UserError: config.json is missing or unreadable, or the model is not decoder-only or needs
            its own code.
    """
    _check_model_type(
        folder if folder.is_file() else folder / "config.json",
        name,
        trust_remote_code=trust_remote_code,
    )
    if trust_remote_code:
        log.info("The model's own code may run (--trust_remote_code): %s.", _own_code(folder))
    try:
        # trust_remote_code is always given: without it transformers asks at the terminal.
        with one_process_at_a_time(enabled=trust_remote_code):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds here
        raise UserError(f"model_name {name}: its config.json cannot be used: {error}") from error
    if config.is_encoder_decoder or auto_class(config, trust_remote_code=trust_remote_code) is None:
        raise UserError(
            f"model_name {name} is of type {config.model_type!r}, which is not a decoder-only "
            "language model. Give a causal language model (llama, mistral, qwen, gemma, phi, ...)."
        )
    if not _has_decoder(config):
        raise UserError(
            f"model_name {name} is of type {config.model_type!r}, whose config.json gives no "
            "hidden size of a decoder, so it cannot be trained here. Give a causal language model "
            "(llama, mistral, qwen, gemma, phi, ...)."
        )
    blocks = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(blocks, int) and blocks > _MAX_BLOCKS:
        raise UserError(
            f"model_name {name}: its config.json has num_hidden_layers {blocks}, and at most "
            f"{_MAX_BLOCKS} are supported. Download it again."
        )
    return config


def _has_decoder(config: PretrainedConfig) -> bool:
    """Whether a configuration has one text model with one hidden size."""
    # transformers raises for a configuration with several text models, such as blt's, which has
    # models of bytes and of patches.
    try:
        text = config.get_text_config()
    except ValueError:
        return False
    if not isinstance(text, PretrainedConfig):
        return False
    # Some configurations have the size under another name, which attribute_map translates.
    return "hidden_size" in vars(text) or "hidden_size" in text.attribute_map


def auto_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """transformers' class that builds a model with its head; None if there is none.

    It builds the class that the checkpoint names, so that parameters have the same names; otherwise
    a class for text, or for images and text.
    """
    # The model's own code, which is in no table of transformers.
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    # From a model class to the auto class that builds it, text first.
    possible: dict[Any, Any] = {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            possible[auto._model_mapping[type(config)]] = auto
    # A damaged file may have anything there.
    names = config.architectures if isinstance(config.architectures, list) else []
    for model, auto in possible.items():
        if model.__name__ in names:
            return auto
    for auto in possible.values():
        return auto
    return None


def _own_code(folder: Path) -> str:
    files = ", ".join(str(path) for path in sorted(folder.glob("*.py")))
    return files or f"{folder} has none"


def one_process_at_a_time(*, enabled: bool) -> contextlib.AbstractContextManager[object]:
    """A lock for the time in which transformers copies and imports a model's own code."""
    if not enabled:
        return contextlib.nullcontext()
    # All ranks of a machine copy the code to this one folder, and a rank must not import a file
    # that another rank is writing.
    folder = Path(HF_MODULES_CACHE)
    if not folder.is_dir():
        reason = why_not_writable(folder)
        if reason:
            raise UserError(
                f"The model's code cannot be copied to {folder}: {reason}. Set HF_MODULES_CACHE to "
                "another folder."
            )
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "fsdp_qlora.lock")


def needs_own_code(name: str, folder: Path) -> UserError:
    return UserError(
        f"model_name {name} needs its own Python code ({_own_code(folder)}), which is not run by "
        "default. Read that code; if you trust it, --trust_remote_code true runs it with your "
        "permissions."
    )


def _check_model_type(path: Path, name: str, *, trust_remote_code: bool) -> None:
    """Refuse models for which transformers would guess the type, or ask at the terminal.

    It guesses the type from the folder's name if config.json has none that it knows.
    """
    if not path.is_file():
        raise UserError(
            f"model_name {name}: {path.parent} has no config.json, so it is not a model folder. "
            "Give a folder written by `save_pretrained` or downloaded from the hub."
        )
    try:
        content = dict(json.loads(read_named(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"model_name {name}: {path} is not valid JSON ({error}). Download it again."
        ) from error
    settings = content.get("quantization_config")
    if not isinstance(settings, dict | None):  # transformers would fail on it
        raise UserError(
            f"model_name {name}: config.json has quantization_config {shown(settings)}, not an "
            "object. Download it again, or give the model with 16- or 32-bit weights."
        )
    model_type = content.get("model_type")
    has_code = bool(content.get("auto_map"))
    if str(model_type) in CONFIG_MAPPING:
        return
    if has_code and not trust_remote_code:
        raise needs_own_code(name, path.parent)
    if not has_code:
        raise UserError(
            f"model_name {name}: {path} has model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not support. For a newer model `pip install "
            "--upgrade transformers`."
        )


def most_positions(config: PretrainedConfig) -> int | None:
    """The largest number of tokens in a row that the model supports; None without a limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def at_most_positions(config: PretrainedConfig, length: int) -> int:
    """The smaller of `length` and the largest number of tokens that the model supports."""
    return min(length, most_positions(config) or length)


def new_blocks(config: PretrainedConfig, model_name: str) -> list[int]:
    """The indices of the blocks that block expansion added to a model.

    Raises:
        UserError: config.json does not record any.
    """
    indices = getattr(config, NEW_BLOCKS, None)
    count = config.get_text_config().num_hidden_layers
    if isinstance(indices, list) and indices and set(indices) <= set(range(count)):
        return indices
    raise UserError(
        f"{model_name}: its config.json does not list the added blocks ({NEW_BLOCKS}: {indices}). "
        "Create the model with fsdp-qlora expand MODEL --out FOLDER."
    )
