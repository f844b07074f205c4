"""Converts a config of another trainer: axolotl, LLaMA-Factory, TRL or torchtune."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp_qlora.config.cli import options_of, settings_of
from fsdp_qlora.config.marks import OF_USER
from fsdp_qlora.config.options import DEFAULTS, marks_of
from fsdp_qlora.config.other_names import OLDER, OTHER_NAMES, advise, translate
from fsdp_qlora.config.text import PlainLoader, read_options
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.redact import HIDDEN

# The kind of training and the base's bits there -> the train type here.
_TRAIN_TYPES = {
    ("lora", 4): "qlora",
    ("lora", 8): "int8_lora",
    ("lora", 0): "lora",
    ("dora", 4): "bnb_dora",
    ("dora", 0): "dora",
    ("full", 0): "full",
}
_TYPE_KEYS = (
    "adapter", "finetuning_type", "use_peft", "use_dora", "peft_use_dora", "load_in_4bit", "load_in_8bit",
    "quantization_bit",
)  # fmt: skip
# Options that have to be given, refused until they are.
_TO_GIVE = {"model_name": "./GIVE_THE_MODEL", "dataset": "./GIVE_THE_ROWS.jsonl"}
_OF_VALUES = (": expected", "is not a choice", " must be ")  # in a refusal of a value
_OF_USER = "it runs code, or says what is written or sent where: give it yourself"
_SECRET_NAME = re.compile(r"key|token(?!iz)|secret|passw|passphrase|credential|env", re.IGNORECASE)
# 24 letters and digits, or what follows the prefix of a service.
_SECRET = re.compile(r"\b(?:sk|glpat|pypi|xox[a-z])-[\w-]{16,}|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{24,}")
_MOST_SHOWN = 600  # characters of a comment's part


def convert(path: Path) -> str:
    """The text of a config file for --config: what is known of `path`, and the rest as comments with a reason.

    Raises:
        UserError: it is no YAML file of options.
    """
    try:
        content = yaml.load(read_options(path, "it", may_be_pipe=True), PlainLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError of a date, for example
        raise UserError(f"{path} cannot be read as YAML: {str(error).splitlines()[0].rstrip('.')}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no table of options.")
    entries = dict(_flat(content))
    taken: dict[str, Any] = {"train_type": _train_type(entries)}
    left = ""
    for name, value in entries.items():
        option, ours, reason = _translate(name, value)
        if option and (option == "entity" or (option not in OLDER and OF_USER in marks_of(option))):
            reason = _OF_USER
        elif option and option not in taken:
            said = _refusal({option: ours})
            # Conflicts with other options are told of all in the end.
            reason = said.rstrip(".") if any(word in said for word in _OF_VALUES) else ""
            taken |= {} if reason else {option: ours}
        if reason:
            left += f"# {_one_line(name)}: {_shown(name, value)}  ({_one_line(reason)})\n"
    if "stage" in entries and "lora_rank" in taken:  # LLaMA-Factory's default
        taken.setdefault("lora_alpha", 2 * options_of(None, {"lora_rank": taken["lora_rank"]})[0].lora_rank)
    if {"project_name", "name"} & taken.keys():
        taken.setdefault("log_to", "wandb")
    taken = _by_names_of_now(taken)
    taken |= {option: text for option, text in _TO_GIVE.items() if option not in taken}
    conflicts = _refusal(taken)
    return (
        f"# Made of {_one_line(path.name)} by fsdp-qlora convert.\n"
        + yaml.safe_dump(taken, sort_keys=False, allow_unicode=True)
        + (f"\n# Not taken over:\n{left}" if left else "")
        + (f"\n# To be changed before it starts: {_one_line(conflicts)}\n" if conflicts else "")
    )


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries that have a value; those of torchtune's components one by one."""
    for name, value in content.items():
        if isinstance(value, dict) and "_component_" in value:
            kind = str(value["_component_"]).rpartition(".")[2].lower()
            if name == "model" and "lora" in kind:
                yield from (("finetuning_type", "lora"), ("load_in_4bit", "qlora" in kind))
            elif name == "optimizer":
                yield name, kind
            elif name == "lr_scheduler":
                yield name, next((word for word in ("cosine", "linear", "constant") if word in kind), kind)
            else:
                yield name, kind
                continue
            yield from _flat(value)
        elif value not in (None, "", [], {}) and name != "_component_":
            yield str(name), value


def _train_type(entries: Mapping[str, Any]) -> str:
    words = {name: str(entries[name]).lower() for name in _TYPE_KEYS if name in entries}
    bits = {"4": 4, "8": 8}.get(words.get("quantization_bit", ""), 0)
    if "qlora" in words.values() or words.get("load_in_4bit") == "true":
        bits = 4
    elif words.get("load_in_8bit") == "true":
        bits = 8
    # LLaMA-Factory, whose configs have a stage, trains adapters by default, the others all weights.
    kind = words.get("finetuning_type", "lora" if "stage" in entries else "full")
    if bits or words.get("adapter") == "lora" or words.get("use_peft") == "true":
        kind = "lora"
    if "true" in (words.get("use_dora"), words.get("peft_use_dora")):
        kind = "dora"
    return _TRAIN_TYPES.get((kind, bits), "GIVE_ONE")


def _translate(name: str, value: Any) -> tuple[str, Any, str]:
    """(option, its value, "") or ("", None, why there is none)."""
    if name in _TYPE_KEYS:
        return "", None, ""
    if name in ("datasets", "test_datasets"):
        return _rows(value, OTHER_NAMES[name])
    if name == "dataset":
        return "", None, "names of dataset_info.json: give the files of rows"
    advice = advise(name, str(value).lower() if isinstance(value, bool) else str(value), older=True)
    if advice is None:
        return (name, value, "") if name in vars(DEFAULTS) else ("", None, "there is no such option")
    ours = advice.value or (int(value) if isinstance(value, float) and value.is_integer() else value)
    return (
        advice.option,
        {"true": True, "false": False}.get(ours, ours) if isinstance(ours, str) else ours,
        advice.reason,
    )


def _by_names_of_now(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose older names are replaced, several of which may be one option now."""
    settings = settings_of(taken)
    texts = {setting.name: setting.text for setting in translate(settings, [], []) if setting not in settings}
    kept = {name: value for name, value in taken.items() if name in vars(DEFAULTS)}
    return kept | {name: yaml.safe_load(f"[{text}]" if "," in text else text) for name, text in texts.items()}


def _rows(value: Any, option: str) -> tuple[str, Any, str]:
    """axolotl's list of datasets."""
    rows = value if isinstance(value, list) else [value]
    names = []
    for row in rows:
        if not isinstance(row, dict) or not row.get("path"):
            return "", None, "its rows have no path"
        config = f":{row['name']}" if row.get("name") else ""
        split = f"[{row['split']}]" if row.get("split") else ""
        files = row.get("data_files") or row["path"]
        names += [f"{file}{config}{split}" for file in (files if isinstance(files, list) else [files])]
    return option, names, ""


def _refusal(taken: Mapping[str, Any]) -> str:
    """Why this program does not take these options; "" if it does."""
    try:
        options_of(None, taken)
    except UserError as error:
        return str(error)
    return ""


def _shown(name: str, value: Any) -> str:
    """A value in a comment: such files are passed on. One that has a secret in it is hidden as a whole."""
    names = f"{name} {value}" if isinstance(value, (dict, list)) else name
    return HIDDEN if _SECRET_NAME.search(names) else _SECRET.sub(HIDDEN, _one_line(value))


def _one_line(value: Any) -> str:
    """A part of a comment, which nothing in it must end."""
    line = " ".join(str(value).split())[:_MOST_SHOWN]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
