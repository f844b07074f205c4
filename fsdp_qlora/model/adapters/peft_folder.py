"""Reads an adapter's folder in PEFT's format.

An adapter of this program has further information in training.json. The file imports neither torch
nor PEFT, so that options are checked quickly.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named, refuse_pipes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RECORD = "training.json"
PREFIX = "base_model.model."  # begins the names of the tensors
# Unsupported settings of LoRA -> their neutral values besides null.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "layer_replication": ([], {}),
    "alora_invocation_tokens": ([], {}),
    "velora_config": ({},),
    "monteclora_config": ({},),
    "kasa_config": ({},),
    "arrow_config": ({},),
    "megatron_config": ({},),
}
# Initial values that change the base: PEFT saves the adapter for the changed base unless it is
# asked to convert it.
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
# Types of the settings that are read here: a damaged file would fail later, without its name.
_TYPES: dict[str, Any] = {
    "r": int,
    "lora_alpha": (int, float),
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "target_modules": (list, str),
}


@dataclass(frozen=True)
class PretrainedAdapter:
    """An adapter that training starts from.

    kind: lora or dora. base_name: the base model in its configuration. options: option -> value
    that the adapter determines. names, shapes: see `read_header`. record: the content of
    training.json, empty without one.
    """

    folder: Path
    kind: str
    base_name: str
    options: Mapping[str, Any]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def lineage(self) -> dict[str, Any]:
        """The adapter's name, run and step, for the record of a run that starts from it."""
        origin = {name: self.record[name] for name in ("run_id", "step") if name in self.record}
        return {"name": self.folder.resolve().name} | origin


def read_adapter(folder: Path) -> PretrainedAdapter:
    """Read an adapter's configuration and its tensors' names and shapes.

    Raises:
        UserError: it cannot be trained.
    """
    config = read_config(folder)
    if config.get("bias") not in (None, "none"):
        raise UserError(
            f"--adapter {folder} has bias {config['bias']!r}, which cannot be trained here."
        )
    names, shapes = read_header(weights_file(folder))
    record = read_record(folder)
    return PretrainedAdapter(
        folder=folder,
        kind="dora" if config.get("use_dora") else "lora",
        base_name=str(config.get("base_model_name_or_path") or ""),
        options=_options(folder, config, shapes, record),
        names=names,
        shapes=shapes,
        record=record,
    )


def token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Read trainable_token_indices.

    Raises:
        UserError: embedding and head have different ones, or they are not in ascending order.
    """
    indices = config.get("trainable_token_indices") or []
    # PEFT takes one list for the embedding, or a list for each module by its name.
    ids, *others = list(indices.values()) if isinstance(indices, dict) else [indices]
    if any(other != ids for other in others) or ids != sorted({*ids}):
        raise UserError(
            f"--adapter {folder} has trainable_token_indices {indices}: not one list in ascending "
            "order."
        )
    return tuple(ids)


def tensor_differences(
    actual: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> list[str]:
    """Compare an adapter's tensors (name -> shape) with those of a model's adapter.

    Returns a line for each kind of difference.
    """
    # PEFT saves the embeddings of a grown vocabulary once more under such names.
    duplicates = re.compile(r"\.(modules_to_save|original_module|token_adapter)\.")
    missing = [name for name in expected if name not in actual]
    unknown = [name for name in actual if name not in expected and not duplicates.search(name)]
    wrong = [
        f"{name} is {list(actual[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    lines: list[str] = []
    if missing:
        lines.append(f"it lacks {_first_names(missing)}")
    if unknown:
        lines.append(f"this model's adapter has no {_first_names(unknown)}")
    if wrong:
        lines.append(_first_names(wrong))
    return lines


def _first_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


def read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        UserError: it is missing, damaged, not for LoRA, or not supported.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"--adapter {folder}: {_explain_folder(folder)}")
    # A pipe under the name of a file would make the reader wait for ever.
    refuse_pipes(folder, "--adapter")
    config = _read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"--adapter {folder} has PEFT's type {config.get('peft_type')}; only LORA is supported."
        )
    for name, neutral in _UNSUPPORTED.items():
        if config.get(name) is not None and config[name] not in neutral:
            raise UserError(
                f"--adapter {folder} has {name} {config[name]!r}, which is not supported here."
            )
    for name, kind in _TYPES.items():
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise UserError(
                f"--adapter {folder}: {CONFIG} has {name} {config[name]!r}. Restore the file."
            )
    # 8 is PEFT's default of both.
    sizes = {name: config.get(name, 8) for name in ("r", "lora_alpha")}
    sizes |= config.get("rank_pattern") or {}
    sizes |= config.get("alpha_pattern") or {}
    for name, value in sizes.items():
        # JSON as Python reads it may hold NaN and Infinity; NaN fails every comparison.
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(
                f"--adapter {folder}: {CONFIG} has {value!r} for {name}. Restore the file."
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGE_BASE):
        raise UserError(
            f"--adapter {folder} was made with init_lora_weights {init}, so it belongs to a base "
            "that was changed. Save it for the original one: PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)."
        )
    return config


def read_record(folder: Path) -> dict[str, Any]:
    """The content of training.json, which this program writes; empty if there is none."""
    return _read_json(folder / RECORD) if (folder / RECORD).is_file() else {}


def weights_file(folder: Path) -> Path:
    """The file with the tensors. Raises UserError if there is none."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        advice = "Restore the file."
        if pickled:
            advice = "Save it with PEFT as safetensors: pickled files can run code."
        raise UserError(f"--adapter {folder} has no {WEIGHTS}. {advice}")
    return path


def _explain_folder(folder: Path) -> str:
    """Describe a folder that is not an adapter, and how to get one from it."""
    if not folder.is_dir():
        return (
            "there is no such folder. Give one with adapter_config.json and "
            "adapter_model.safetensors."
        )
    names = {path.name for path in folder.iterdir()}
    if names & {"manifest.json", "checkpoints"}:
        content = "a checkpoint" if "manifest.json" in names else "a run without an adapter"
        return f"it is {content}. Export its adapter: fsdp-qlora export {folder} --out DIR."
    if "config.json" in names:
        return "it is a whole model. Give it as --model_name."
    return f"it has no {CONFIG}. Give a folder with an adapter in PEFT's format."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--adapter: {path} cannot be read ({error}). Restore the file.") from error
    if not isinstance(content, dict):
        raise UserError(f"--adapter: {path} does not contain a JSON object. Restore the file.")
    return content


def read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """(Plain name of each tensor -> name in the file, plain name -> shape).

    Raises:
        UserError: the file is damaged.
    """
    try:
        # NumPy as the framework, since importing torch takes seconds; get_slice reads no values.
        with safe_open(path, framework="numpy") as file:
            names = {_plain(name): name for name in file.keys()}  # noqa: SIM118
            shapes = {
                plain: tuple(file.get_slice(name).get_shape()) for plain, name in names.items()
            }
            return names, shapes
    except (OSError, SafetensorError) as error:
        raise UserError(f"--adapter: {path} is damaged ({error}). Restore the file.") from error


def _plain(name: str) -> str:
    """A tensor's name without additions of some versions of PEFT and of some trainers."""
    name = name.replace(".default.", ".").removesuffix(".default")
    return name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name


def _options(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Any], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Option -> value that the adapter determines."""
    return {
        "lora_rank": config.get("r", 8),
        "lora_alpha": config.get("lora_alpha", 8),
        "use_rslora": bool(config.get("use_rslora")),
        "rank_pattern": _pattern(config.get("rank_pattern")),
        "alpha_pattern": _pattern(config.get("alpha_pattern")),
        # The values come from the file, so that no special initial values are computed.
        "init_lora_weights": "true",
        "lora_target_modules": _targets(config, shapes),
        # Names that end in .weight are linear layers (peft_config.reached_by_weight).
        "lora_target_parameters": tuple(
            name for name in config.get("target_parameters") or () if not name.endswith(".weight")
        ),
        "modules_to_save": tuple(config.get("modules_to_save") or ()),
        # PEFT's configuration has no word for it.
        "merge_aware": bool((record.get("settings") or {}).get("merge_aware")),
    }


def _pattern(pattern: Mapping[str, Any] | None) -> tuple[str, ...]:
    return tuple(f"{name}={value:g}" for name, value in (pattern or {}).items())


def _targets(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapted layers as the configuration names them.

    Whole paths, read from the tensors' names, if other settings restrict those names.
    """
    targets = config.get("target_modules")
    # Shared experts, which `peft_config` lists as parameters.
    by_weight = [
        name.removesuffix(".weight")
        for name in config.get("target_parameters") or ()
        if ".weight" in name
    ]
    is_restricted = any(
        config.get(name) for name in ("exclude_modules", "layers_to_transform", "layers_pattern")
    )
    if isinstance(targets, list) and targets and not is_restricted:
        return (*sorted(targets), *by_weight)
    if isinstance(targets, str) and not by_weight and not is_restricted:
        return (targets,)
    ends = ".lora_A.weight"
    # Adapters of 3-D parameters are named by target_parameters. PEFT nests several of one module
    # in each other as base_layer.
    inside = {name for name in shapes if ".base_layer." in name or ".experts." in name}
    return tuple(
        name.removeprefix(PREFIX).removesuffix(ends)
        for name in shapes
        if name.endswith(ends) and name not in inside
    )
