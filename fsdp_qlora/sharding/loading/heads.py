"""Decides by the weight files whether embeddings and head share one tensor, as transformers does.

A configuration that ties the two may be wrong, or say nothing: merged models keep it beside a head
that was trained, and Mistral publishes its models for images without the setting. transformers ties
only what is missing or equal.
"""

import copy
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from fsdp_qlora.model.architecture.meta_model import build_meta_model
from fsdp_qlora.model.architecture.names import ModelNames, shared_names
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.safetensors_files import INDEX

log = logging.getLogger("fsdp_qlora")

SETTING = "tie_word_embeddings"
# Elements compared at a time: two whole matrices of a large vocabulary would be gigabytes.
_PIECE = 2**24


def ties(config: PretrainedConfig) -> bool:
    """Whether a configuration ties embeddings and head.

    transformers asks the outer one of a model of several parts.
    """
    return bool(getattr(config, SETTING, False))


def settle_head(
    config: PretrainedConfig,
    folder: Path,
    stored: PublishedFormat | None = None,
    *,
    packed: PublishedFormat | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Untie embeddings and head in a configuration if the model in the folder has them apart.

    Args:
        folder: where weights are not there yet, config.json decides, which a line says. A model
            that has no folder is known by name alone, with the right setting.
        stored, packed: as for `WeightFiles`.
    Returns:
        Whether the configuration has changed: the model has a head of its own.
    Raises:
        UserError: a weight file cannot be read.
    """
    if not ties(config) or not folder.exists():
        return False
    index = _index(folder)
    if not _are_here(folder, index):
        # An index that names only one of the two settles it: what is missing is tied.
        may_differ = _may_differ(config, index, trust_remote_code=trust_remote_code)
        return may_differ and _assume(config, folder)
    files = WeightFiles(folder, stored, packed=packed)
    pairs = _pairs(config, files.files, trust_remote_code=trust_remote_code)
    own_heads = [
        head for head, embedding in pairs.items() if not _are_equal(files, head, embedding)
    ]
    if own_heads:
        _untie(config)
        log.info(
            "The weight files have a separate head, %s, which is used as in transformers, although "
            "the configuration ties embeddings and head.",
            own_heads[0],
        )
    return bool(own_heads)


def needs_weights(
    config: PretrainedConfig, folder: Path, *, trust_remote_code: bool = False
) -> bool:
    """Whether `settle_head` needs weights that are not in the folder: an index may name no head."""
    if not ties(config):
        return False
    index = _index(folder)
    return not _are_here(folder, index) and _may_differ(
        config, index, trust_remote_code=trust_remote_code
    )


def _may_differ(
    config: PretrainedConfig, index: Mapping[str, Any], *, trust_remote_code: bool
) -> bool:
    """Whether an index may name embeddings and head, so that their values would tell."""
    return not index or bool(_pairs(config, index, trust_remote_code=trust_remote_code))


def _are_here(folder: Path, index: Mapping[str, Any]) -> bool:
    """Whether the folder has all weight files that its index names; without one, any file."""
    names = {str(file) for file in index.values()}
    if not names:
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in names)


def with_own_head(content: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """The content of a config.json that ties embeddings and head only if `config` does."""
    result = copy.deepcopy(dict(content))
    # As the class reads it, with its defaults: a file without the setting may tie, too.
    if ties(config) or not ties(type(config).from_dict(copy.deepcopy(result))):
        return result
    result[SETTING] = False
    text = result.get("text_config")
    if isinstance(text, dict):
        text[SETTING] = False
    return result


def _untie(config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        if ties(part):
            setattr(part, SETTING, False)


def _index(folder: Path) -> dict[str, Any]:
    """Tensor -> the name of its file; empty without an index."""
    index = read_json(folder / INDEX).get("weight_map")
    return index if isinstance(index, dict) else {}


def _pairs(
    config: PretrainedConfig, tensors: Iterable[str], *, trust_remote_code: bool
) -> dict[str, str]:
    """Tensor of the files that the configuration ties to another one there -> that one."""
    # On the meta device, in no memory: the class knows which of its parameters it ties.
    model = build_meta_model(
        config,
        attn_implementation="auto",
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        trust_remote_code=trust_remote_code,
    )
    shared_by = shared_names(model)
    if not shared_by:
        return {}
    names = ModelNames(model, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    sources = {names.find(source)[0]: source for source in tensors}
    return {
        sources[name]: sources[shared]
        for name, shared in shared_by.items()
        if name in sources and shared in sources
    }


def _are_equal(files: WeightFiles, one: str, other: str) -> bool:
    """Whether two tensors have the same values."""
    if files.shape(one) != files.shape(other):
        return False
    count = files.shape(one).numel()
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        a = files.read_flat(one, start, stop)
        b = files.read_flat(other, start, stop)
        # As torch.equal asks for: bf16 and fp16 are exact in float32.
        if a.dtype != b.dtype:
            a = a.float()
            b = b.float()
        if not torch.equal(a, b):
            return False
    return True


def _assume(config: PretrainedConfig, folder: Path) -> bool:
    """Take what is likely for a model whose weights are not there, and log it.

    A config.json without the setting leaves it to two defaults, of which the text model's is the
    better one.
    """
    content = read_json(folder if folder.is_file() else folder / "config.json")
    is_own = bool(content) and SETTING not in content and not ties(config.get_text_config())
    if is_own:
        _untie(config)
    form = "a head of its own" if is_own else "one tensor for embeddings and head"
    log.info("The configuration decides, because no weights are here: %s.", form)
    return is_own
