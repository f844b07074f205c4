"""Command line and YAML file -> `TrainConfig`: defaults, then the file of `--config`, then the flags.

The text of a YAML value is converted like a flag's value. So `lr: 2e-4`, which YAML 1.1 reads as a string, is a
number here, and a misspelled choice is an error in both places.

argparse only splits the words and prints the help. The conversion is done here because argparse's own stops
at the first error and suggests no nearest choice. (tyro refuses `true`, cannot group the options of a flat
dataclass in `--help`, and gives errors no name of file and key.)
"""

import argparse
import contextlib
import difflib
import itertools
import os
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml

from fsdp_qlora.config.conflicts import check, out_of_range
from fsdp_qlora.config.options import DEFAULTS, RESULT_OPTIONS, TrainConfig, option_types
from fsdp_qlora.config.other_names import OLDER, OTHER_NAMES, Advice, Setting, advise, translate
from fsdp_qlora.config.text import (
    SWITCH,
    find_config,
    number,
    option_help,
    read_options,
    resolved_options,
    shipped_configs,
    stored_values,
    type_text,
    value_text,
)
from fsdp_qlora.utils.errors import UserError

_HINTS = option_types()
# What an earlier release's config.yaml has, and changes nothing.
_REMOVED = [("compile", ["false"]), ("world_size", ["-1"]), ("nproc_per_node", ["-1"])]
_SAME = {"world_size": "nproc_per_node"}  # the 2024 program's name of an option
# How an option is written, alone and with a value.
_AS_FLAG, _AS_KEY, _AS_KEYWORD = ("--{}", "--{} {}"), ('"{}"', '"{}: {}"'), ("{}", "{}={}")


def parse_options(
    argv: list[str], result: Path | Mapping[str, object] | None = None, notes: list[str] | None = None
) -> tuple[TrainConfig, Collection[str]]:
    """Read the options of a run; returns them, and the names of those that were given.

    Args:
        argv: the arguments after the program's name.
        result: the config.yaml of a result, or the options that another file of it has; those in `argv` win. Only
            RESULT_OPTIONS are read from it.
        notes: gets a line for each older name of an option that was given.
    Raises:
        UserError: lists every unknown option, unreadable value and impossible combination at once.
        SystemExit: with status 0, after `--help`.
    """
    asked = next((after for word, after in itertools.pairwise(argv) if word in ("--help", "-h")), "")
    namespace, unknown = _parser(asked).parse_known_args(with_underscores(argv))
    flags = vars(namespace)
    path = flags.pop("config", None)
    errors: list[str] = []
    notes = [] if notes is None else notes
    settings = _read_result(result, errors)
    given = _read_yaml(find_config(path), errors) if path is not None else []
    # An older option without a value is a switch.
    flags = {name: ["true"] if name in OLDER and not values else values for name, values in flags.items()}
    given += [Setting(f"--{name}", name, values) for name, values in flags.items() if values]
    settings += translate(given, errors, notes)
    errors += [f"--{name}: expected a value." for name, values in flags.items() if not values]
    errors += _unknown_flags(unknown)
    converted = _convert(settings, errors)
    return _checked(TrainConfig(**converted), errors), converted.keys()


def options_of(
    base: TrainConfig | str | Path | None, given: Mapping[str, object]
) -> tuple[TrainConfig, Collection[str]]:
    """Read the options of a run from Python values, by the rules and with the messages of the command line.

    Args:
        base: options that those in `given` replace: a YAML file, a name of `shipped_configs`, or made before.
    Raises: as `parse_options`.
    """
    given = {_SAME.get(name, name): value for name, value in given.items()}
    others = {name: str(value) for name, value in given.items() if name not in (*_HINTS, *OLDER)}
    errors = [f"Unknown option {name}{_advice(name, _AS_KEYWORD, value)}" for name, value in others.items()]
    known = {name: value for name, value in given.items() if name in (*_HINTS, *OLDER)}
    settings = [Setting(name, name, words) for name, value in known.items() if (words := _as_words(name, value))]
    # An empty list has no words; None leaves an option that is never None at its default.
    values = {name: () for name, value in known.items() if isinstance(value, (list, tuple)) and not value}
    if isinstance(base, TrainConfig):
        values = vars(base) | values
    elif base is not None:
        settings = _read_yaml(find_config(os.fspath(base)), errors) + settings
    converted = _convert(translate(settings, errors, []), errors)
    return _checked(TrainConfig(**{**values, **converted}), errors), converted.keys()


def _read_result(result: Path | Mapping[str, object] | None, errors: list[str]) -> list[Setting]:
    if isinstance(result, Path):
        settings = _read_yaml(result, errors, is_result=True)
    else:
        given = {name: value for name, value in (result or {}).items() if name in (*RESULT_OPTIONS, *OLDER)}
        settings = [Setting(f"its {name}", name, words) for name in given if (words := _as_words(name, given[name]))]
    settings = [one for one in translate(settings, errors, []) if one.name in RESULT_OPTIONS]
    # A template's name, or else a file of this machine.
    return [one for one in settings if one.name != "prompt_template" or "".join(one.values).isidentifier()]


def current_options(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored options of a run, which an earlier release may have written, by their names of now.

    An option that the release did not have is at its default.
    """
    older = [Setting(name, name, _as_words(name, value)) for name, value in stored.items() if name in OLDER]
    now = _convert(translate(older, [], []), [])
    return {**resolved_options(DEFAULTS), **stored, **stored_values(now)}


def _checked(config: TrainConfig, errors: list[str]) -> TrainConfig:
    # What is not known, or was not understood, may be what another option needs.
    errors = [*errors, *out_of_range(config)] if errors else check(config)
    if len(errors) == 1:
        raise UserError(errors[0])
    if errors:
        raise UserError("\n  ".join([f"{len(errors)} options are wrong:", *errors]))
    return config


def _convert(settings: Iterable[Setting], errors: list[str]) -> dict[str, Any]:
    """Name -> value, a later setting of a name replacing an earlier one; adds to `errors`."""
    given: dict[str, Any] = {}
    for where, name, values in settings:
        try:
            given[name] = _parse(values, _HINTS[name])
        except ValueError as error:
            errors.append(f"{where}: {error}.")
    return given


# --- text -> value ---


def _parse(values: list[str], hint: Any) -> object:
    """Convert the words given for an option to its type; ValueError says what was expected."""
    if get_origin(hint) is tuple:
        items = [item.strip() for value in values for item in value.split(",")]
        if items == ["none"]:  # an empty list as `value_text` writes it
            return ()
        return tuple(_parse_one(item, get_args(hint)[0]) for item in items if item)
    if len(values) != 1:
        raise ValueError(f"expected one value, got {len(values)}: {' '.join(values)}")
    return _parse_one(values[0], hint)


def _parse_one(text: str, hint: Any) -> object:
    if get_origin(hint) in (Union, types.UnionType):
        return _one_of_types(text, hint)
    if get_origin(hint) is Literal:
        return _choice(text, get_args(hint))
    if hint is bool:
        return _bool(text)
    return text if hint is str else number(hint, text)


def _one_of_types(text: str, hint: Any) -> object:
    members = [member for member in get_args(hint) if member is not types.NoneType]
    if len(members) < len(get_args(hint)) and text.lower() in ("none", "null", "~", ""):
        return None
    if len(members) == 1:
        return _parse_one(text, members[0])
    for member in members:
        with contextlib.suppress(ValueError):
            return _parse_one(text, member)
    raise ValueError(f"expected {type_text(hint)}, got {text!r}")


def _choice(text: str, choices: tuple[str, ...]) -> str:
    known = {choice.lower(): choice for choice in choices}
    if found := known.get(text.lower().replace("-", "_")):
        return found
    raise ValueError(f"{text!r} is not a choice{_nearest(text, choices)} Choices: {', '.join(choices)}")


def _bool(text: str) -> bool:
    if text.lower() not in SWITCH:
        raise ValueError(f"expected true or false, got {text!r}")
    return SWITCH[text.lower()]


# --- unknown names ---


def _nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that suggests the name nearest to a misspelled one, where one is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "."


def _advice(name: str, forms: tuple[str, str], value: str = "") -> str:
    """The end of a sentence on an option that does not exist: what to give instead, where that is known.

    Args:
        forms: how options are written there. value: that was given; "" for none.
    """
    if (turned_off := name.removeprefix("no_")) != name and _is_switch(turned_off):
        return f"; give {forms[1].format(turned_off, 'false')}."
    if not (found := advise(name, value)):
        close = difflib.get_close_matches(name.lower(), [*_HINTS, *OTHER_NAMES], n=1, cutoff=0.6)
        if not close:
            return "."
        found = advise(close[0], value) or Advice(close[0])
    if found.reason:
        return f": {found.reason}."
    return f"; did you mean {forms[bool(found.value)].format(found.option, found.value)}?"


def _as_words(name: str, value: object) -> list[str]:
    """A Python value as it would be given on the command line; no word for None where an option is never None."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    if value is None:
        return ["none"] if type(None) in get_args(_HINTS.get(name)) else []
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _is_switch(name: str) -> bool:
    """Whether an option is true or false."""
    return bool in (_HINTS.get(name), *get_args(_HINTS.get(name)))


def _unknown_flags(unknown: list[str]) -> list[str]:
    """One message per flag that does not exist; the words after one are taken for its value."""
    errors = []
    for place, word in enumerate(unknown):
        flag, _, value = word.partition("=")
        if not value and place + 1 < len(unknown) and not unknown[place + 1].startswith("-"):
            value = unknown[place + 1]
        if word.startswith("-"):
            errors.append(f"Unknown option {flag}{_advice(flag.lstrip('-'), _AS_FLAG, value)}")
    if not errors and unknown:
        option = "config" if unknown[0] in shipped_configs() or unknown[0].endswith((".yaml", ".yml")) else "dataset"
        hint = f" Did you mean --{option} {unknown[0]}?" if option == "config" or "." in unknown[0] else ""
        return [f"Unexpected argument {unknown[0]!r}: options are given as --name value.{hint}"]
    return errors


# --- the YAML file ---


def _read_yaml(path: Path, errors: list[str], *, is_result: bool = False) -> list[Setting]:
    """The settings of a YAML file; unknown keys and nested values are added to `errors`.

    Args:
        is_result: only RESULT_OPTIONS count, and other keys are passed over.
    """
    settings: list[Setting] = []
    lines: dict[str, int] = {}
    for key, value in _yaml_pairs(path):
        line = key.start_mark.line + 1
        where = f"{path}, line {line}"
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else "?"
        words = _words(value)
        if (is_result and name not in (*RESULT_OPTIONS, *OLDER)) or (name, words) in _REMOVED:
            continue
        name = _SAME.get(name, name)
        if name not in _HINTS and name not in OLDER:
            errors.append(f'{where}: unknown key "{name}"{_advice(name, _AS_KEY, "".join((words or [])[:1]))}')
        elif name in lines:
            errors.append(f"{where}: {name} is already given in line {lines[name]}.")
        elif words is None:
            errors.append(f"{where}: {name} expects a value or a list of values; options are not nested.")
        elif value.tag != "tag:yaml.org,2002:null":  # which leaves the option at its default
            settings.append(Setting(f"{where}: {name}", name, words))
        lines.setdefault(name, line)
    return settings


def _words(value: yaml.Node) -> list[str] | None:
    if isinstance(value, yaml.ScalarNode):
        return [value.value]
    if not isinstance(value, yaml.SequenceNode):
        return None
    items = value.value
    return [item.value for item in items] if all(isinstance(item, yaml.ScalarNode) for item in items) else None


def _yaml_pairs(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        # The nodes and not the values: they keep the text as written, the lines, and keys given twice.
        root = yaml.compose(read_options(path, f"--config {path}"), Loader=yaml.SafeLoader)
    except OSError as error:
        names = ", ".join(shipped_configs())
        hint = f" It is no file, and not one of {names} either." if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"--config {path}: cannot read it: {error.strerror}.{hint}") from error
    except UnicodeError as error:  # of the content, or of the name
        raise UserError(f"--config {path}: it is not a text file in UTF-8.") from error
    except RecursionError as error:
        raise UserError(f"--config {path}: nested too deeply; options are not nested.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"--config {path}, line {mark.line + 1}" if mark else f"--config {path}"
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {path}: expected lines of the form `option: value`.")
    pairs: list[tuple[yaml.Node, yaml.Node]] = root.value
    return pairs


# --- the command line ---


_FIRST = ("model", "data", "output")
_DESCRIPTION = """\
Fine-tune a language model with a sharded, 4-bit quantized base on one or more devices.

  fsdp-qlora train --model_name Qwen/Qwen3-8B-Base --dataset rows.jsonl
  fsdp-qlora train --config qlora_8b_2x24gb --dataset alpaca --dry_run true
  fsdp-qlora train --model_name ./my_model --dataset chats.jsonl --eval_fraction 0.05 --output_dir runs/1

--help GROUP shows the options of one group: %s."""


class Parser(argparse.ArgumentParser):
    """argparse, except that errors are raised to the caller and only rank 0 prints the help."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See --help.")

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def _parser(asked: str = "") -> Parser:
    """A parser that splits the command line into words per option, and knows the help.

    Args:
        asked: the heading whose options are shown; all if there is none of this name.
    """
    groups = option_help()
    shown = [heading for heading in groups if asked and heading.startswith(asked)] or [*_FIRST, *groups]
    parser = Parser(
        prog="fsdp-qlora train",
        usage="fsdp-qlora train [--config FILE] [--option value ...]",
        description=_DESCRIPTION % ", ".join(heading for heading in groups if len(heading.split()) == 1),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, or a name that `fsdp-qlora configs` lists; flags win"
    )
    for heading, options in {heading: groups[heading] for heading in shown}.items():
        group = parser.add_argument_group(heading)
        for name, text in options.items():
            help_text = f"{text} (default: {value_text(getattr(DEFAULTS, name))})".replace("%", "%%")
            # An option without its value is reported with all other errors.
            values: dict[str, Any] = {"nargs": "?", "type": lambda word: [word], "const": []}
            if get_origin(_HINTS[name]) is tuple:
                values = {"nargs": "*"}
            elif _is_switch(name):
                values["const"] = ["true"]
            also = [f"--{other}" for other, ours in _SAME.items() if ours == name]
            group.add_argument(f"--{name}", *also, metavar=type_text(_HINTS[name]), help=help_text, **values)
    for name in OLDER.keys() - _HINTS.keys():
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, nargs="?", type=lambda word: [word], const=["true"])
    return parser


def with_underscores(argv: Iterable[str]) -> list[str]:
    """Spell `--batch-size=8` as `--batch_size=8`."""
    parts = [(word, *word[2:].partition("=")) for word in argv]
    return [
        f"--{flag.replace('-', '_')}{equals}{value}" if word.startswith("--") else word
        for word, flag, equals, value in parts
    ]
