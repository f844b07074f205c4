"""A stranger's quantization_config, read field by field with types, as options are.

bitsandbytes, transformers (FP8, MXFP4), compressed-tensors, modelopt, AutoAWQ and GPTQ's programs
write it into config.json; modelopt writes hf_quant_config.json too, which some models have alone.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named
from fsdp_qlora.utils.text import shown, shown_name

# The key by which this package marks models whose experts it has quantized (see bnb_4bit).
EXPERTS_KEY = "fsdp_qlora_experts"
MODELOPT_FILE = "hf_quant_config.json"
# Keys of config.json; the second is that of old versions of compressed-tensors.
KEYS = ("quantization_config", "compression_config")
# Characters of a name or pattern; those of published models have about 100.
_LONGEST_TEXT = 1000
# Sizes beyond this have no tensor.
_LARGEST = 2**31 - 1
_ADVICE = "Download it again, or give the model with 16- or 32-bit weights."


class Kind(NamedTuple):
    """The values that a field may have. words: as a message says it."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any, least: int, most: int) -> bool:
    # True and false are integers in Python.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_block(value: Any) -> bool:
    sides = value.split("x") if _is_text(value) else value
    if not isinstance(sides, list) or len(sides) != 2:
        return False
    return all(_is_whole(_side(side), 1, _LARGEST) for side in sides)


def _side(side: Any) -> Any:
    """A side of a block; old compressed-tensors wrote blocks as 128x128."""
    # int() would take other alphabets' digits, and texts of any length.
    if not isinstance(side, str) or len(side) >= 10:
        return side
    is_number = side.isascii() and side.isdecimal()
    return int(side) if is_number else side


def as_block(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, from a value that fits `_BLOCK`."""
    if not value:
        return None
    rows, columns = value.split("x") if isinstance(value, str) else value
    return _side(rows), _side(columns)


_TEXT = Kind(f"a text of at most {_LONGEST_TEXT} characters", _is_text)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_BITS = Kind("a whole number from 1 to 64", lambda value: _is_whole(value, 1, 64))
_SIZE = Kind(
    "a whole number above 0, or -1", lambda value: value == -1 or _is_whole(value, 1, _LARGEST)
)
_BLOCK = Kind("a list of two whole numbers above 0", _is_block)
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_OBJECTS = Kind(
    "an object of objects",
    lambda value: (
        isinstance(value, dict)
        and all(entry is None or isinstance(entry, dict) for entry in value.values())
    ),
)
_NAMES = Kind(
    f"a list of texts of at most {_LONGEST_TEXT} characters",
    lambda value: isinstance(value, list) and all(map(_is_text, value)),
)
_QUANT_TYPE = Kind("nf4 or fp4", lambda value: value in ("nf4", "fp4"))

# The fields of all programs in one table: a name means the same in each of them.
_FIELDS: Mapping[str, Kind] = {
    "quant_method": _TEXT,
    "quant_algo": _TEXT,
    "format": _TEXT,
    "checkpoint_format": _TEXT,
    "version": _TEXT,
    "activation_scheme": _TEXT,
    "bits": _BITS,
    "group_size": _SIZE,
    "desc_act": _FLAG,
    "sym": _FLAG,
    "zero_point": _FLAG,
    "dynamic": _OBJECTS,
    "weight_block_size": _BLOCK,
    "config_groups": _OBJECTS,
    "quantized_layers": _OBJECTS,
    "transform_config": _OBJECT,
    "sparsity_config": _OBJECT,
    "ignore": _NAMES,
    "ignored_layers": _NAMES,
    "exclude_modules": _NAMES,
    "modules_to_not_convert": _NAMES,
    "llm_int8_skip_modules": _NAMES,
    "load_in_4bit": _FLAG,
    "_load_in_4bit": _FLAG,
    "load_in_8bit": _FLAG,
    "bnb_4bit_quant_type": _QUANT_TYPE,
    "bnb_4bit_use_double_quant": _FLAG,
    EXPERTS_KEY: _FLAG,
}
_OF_GROUP: Mapping[str, Kind] = {"targets": _NAMES, "weights": _OBJECT, "format": _TEXT}
_OF_LAYER: Mapping[str, Kind] = {"quant_algo": _TEXT, "group_size": _SIZE}
_OF_WEIGHTS: Mapping[str, Kind] = {
    "type": _TEXT,
    "num_bits": _BITS,
    "group_size": _SIZE,
    "strategy": _TEXT,
    "block_structure": _BLOCK,
    "symmetric": _FLAG,
}


class Scheme(NamedTuple):
    """How a group of compressed-tensors or modelopt is quantized; absent fields are None.

    name: of the group. layout: the format of its files.
    """

    name: str
    targets: list[str]
    layout: str
    kind: str | None
    bits: int | None
    group_size: int | None
    strategy: str | None
    block: tuple[int, int] | None
    symmetric: bool | None = None
    is_modelopt: bool = False


class Algorithm(NamedTuple):
    """modelopt's name of a way to quantize, with its group size if a layer has one."""

    name: str
    group_size: int | None


class Settings(NamedTuple):
    """A quantization_config.

    file: that it is in. fields: those of `_FIELDS` that it has, and are not null. layers: those
    that modelopt's quantized_layers names, by algorithm.
    """

    file: str
    method: str
    fields: Mapping[str, Any]
    schemes: list[Scheme]
    layers: Mapping[Algorithm, list[str]]

    @property
    def layout(self) -> str:
        """The layout of the files; empty if none is named."""
        # GPTQModel writes checkpoint_format, compressed-tensors format, AutoAWQ version.
        for key in ("checkpoint_format", "format", "version"):
            if self.fields.get(key):
                return str(self.fields[key]).lower()
        return ""

    @property
    def skipped(self) -> list[str]:
        """The names and patterns of modules that are not quantized, from any program's keys."""
        keys = [key for key, kind in _FIELDS.items() if kind is _NAMES]
        return [name for key in keys for name in self.fields.get(key, [])]


def is_quantized(config: PretrainedConfig, folder: Path) -> bool:
    """Whether a model says that it is quantized."""
    # The key may be in text_config, the part of a model with images that is for text.
    parts = (config, config.get_text_config())
    has_key = any(vars(part).get(key) for part in parts for key in KEYS)
    return has_key or (folder / MODELOPT_FILE).is_file()


def take_settings(
    config: PretrainedConfig, name: str, folder: Path | None, *, methods: Collection[str]
) -> Settings | None:
    """Remove a quantization_config from a model's configuration and return it.

    None if the model is not quantized.

    folder: the model's, whose hf_quant_config.json counts if config.json has nothing. methods:
    values of quant_method whose fields are read. Raises UserError for a value of a wrong type.
    """
    raw = None
    file = "config.json"
    # The first one that is there counts, and only this one is removed.
    for part in (config, config.get_text_config()):
        for key in KEYS:
            raw = _take(part, key) if raw is None else raw
    if raw is None and folder is not None:
        raw = _modelopt_file(folder, name)
        file = MODELOPT_FILE
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, dict):
        raise UserError(
            f"model_name {name}: {file} has quantization_config {shown(raw)}, not an "
            f"object. {_ADVICE}"
        )
    return _read(raw, f"model_name {name}: {file}", file, methods)


def _take(config: PretrainedConfig, key: str) -> Any:
    """Remove a key from the configuration and return its value.

    The model is then built with plain layers, which ours replace.
    """
    value = vars(config).get(key)
    if key in vars(config):
        delattr(config, key)
    # transformers makes an object of a configuration whose method it knows.
    return value.to_dict() if hasattr(value, "to_dict") else value


def _modelopt_file(folder: Path, name: str) -> Any:
    """The content of modelopt's own file; None if there is none."""
    path = folder / MODELOPT_FILE
    if not path.is_file():
        return None
    try:
        return {"quant_method": "modelopt"} | dict(json.loads(read_named(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"model_name {name}: {path} is not a JSON object ({shown(str(error))}). {_ADVICE}"
        ) from error


def _read(raw: Mapping[str, Any], place: str, file: str, methods: Collection[str]) -> Settings:
    """Read a quantization_config. place: for messages."""
    inner = _fields(raw, {"quantization": _OBJECT}, place).get("quantization")
    # modelopt's own file has the fields one level deeper.
    if inner is not None:
        raw = {"quant_method": "modelopt"} | dict(raw) | dict(inner)
    method = _fields(raw, {"quant_method": _TEXT}, place).get("quant_method", "")
    # The fields of a method that is not known may mean anything: only what a message says is read.
    if method not in ("", *methods):
        fields = {
            key: raw[key]
            for key in ("checkpoint_format", "format", "version")
            if _is_text(raw.get(key))
        }
        return Settings(file, method, fields, [], {})
    fields = _fields(raw, _FIELDS, place)
    groups = fields.get("config_groups", {})
    read = [
        _scheme(group, content or {}, fields.get("format", ""), place)
        for group, content in groups.items()
    ]
    layers = _algorithms(fields.get("quantized_layers", {}), place)
    return Settings(file, method, fields, [scheme for scheme in read if scheme], layers)


def _algorithms(entries: Mapping[str, Any], place: str) -> dict[Algorithm, list[str]]:
    """The layers of each algorithm in quantized_layers."""
    layers: dict[Algorithm, list[str]] = {}
    for layer, entry in entries.items():
        inside = f"quantized_layers.{shown_name(layer)}."
        fields = _fields(entry or {}, _OF_LAYER, place, inside)
        algorithm = Algorithm(fields.get("quant_algo", ""), fields.get("group_size"))
        layers.setdefault(algorithm, []).append(layer)
    return layers


def _scheme(name: str, group: Mapping[str, Any], layout: str, place: str) -> Scheme | None:
    """A group of config_groups; None for one that quantizes activations alone."""
    inside = f"config_groups.{shown_name(name)}."
    fields = _fields(group, _OF_GROUP, place, inside)
    if "weights" not in fields:
        return None
    weights = _fields(fields["weights"], _OF_WEIGHTS, place, f"{inside}weights.")
    return Scheme(
        name=shown_name(name),
        targets=fields.get("targets", ["Linear"]),
        layout=fields.get("format", layout).lower(),
        kind=weights.get("type"),
        bits=weights.get("num_bits"),
        group_size=weights.get("group_size"),
        strategy=weights.get("strategy"),
        block=as_block(weights.get("block_structure")),
        symmetric=weights.get("symmetric"),
    )


def _fields(
    raw: Mapping[str, Any], kinds: Mapping[str, Kind], place: str, inside: str = ""
) -> dict[str, Any]:
    """The values of known fields. Null is as absent. Raises UserError for one of another kind."""
    values = {}
    for field, kind in kinds.items():
        value = raw.get(field)
        if value is None:
            continue
        if not kind.fits(value):
            raise UserError(
                f"{place} has quantization_config.{inside}{field} {shown(value)}, and it must be "
                f"{kind.words}. {_ADVICE}"
            )
        values[field] = value
    return values
