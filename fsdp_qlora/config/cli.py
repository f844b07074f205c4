"""Reads `TrainConfig` from defaults, then the YAML file of `--config`, then the flags.

The text of a YAML value is converted like a flag's value. So `lr: 2e-4`, which YAML 1.1 reads as a
string, is a number here, and a misspelled choice is an error in both places.

(argparse stops at the first error; tyro refuses `true`, and gives errors no name of file and key.)
"""

import contextlib
import difflib
import os
import shutil
import textwrap
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from fsdp_qlora.config.conflicts import check, out_of_range
from fsdp_qlora.config.options import DEFAULTS, RESULT_OPTIONS, TrainConfig, option_types
from fsdp_qlora.config.other_names import OLDER, OTHER_NAMES, Advice, Setting, advise, translate
from fsdp_qlora.config.text import (
    find_config,
    option_help,
    parse_number,
    resolved_options,
    shipped_configs,
    switch,
    type_text,
    value_text,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named
from fsdp_qlora.utils.text import cut

_HINTS = option_types()
_KNOWN = (*_HINTS, *OLDER)
_MOST_ERRORS = 20  # of a file
_MOST_BYTES = 2**20  # of a file, which may be a stranger's
# How an option is written, alone and with a value.
_AS_FLAG = ("--{}", "--{} {}")
_AS_KEY = ('"{}"', '"{}: {}"')
_AS_KEYWORD = ("{}", "{}={}")


def parse_options(
    argv: list[str],
    result: Path | Mapping[str, object] | None = None,
    notes: list[str] | None = None,
) -> tuple[TrainConfig, Collection[str]]:
    """Read the options of a run; returns them, and the names of those that were given.

    Args:
        argv: the arguments after the program's name.
        result: the config.yaml of a result, or the options that another file of it has; those in
            `argv` win. Only RESULT_OPTIONS are read from it.
        notes: gets a line for each older name of an option that was given.
    Raises:
        UserError: lists every unknown option, unreadable value and impossible combination at once.
        SystemExit: with status 0, after `--help`.
    """
    for index, word in enumerate(argv):
        if word in ("--help", "-h"):
            _print_help("".join(argv[index + 1 : index + 2]))
            raise SystemExit(0)
    errors: list[str] = []
    flags = _split(argv, errors)
    settings = _read_result(result, errors)
    paths = flags.pop("config", None)
    named_options = _read_yaml(find_config(paths[0]), errors) if paths else []
    if paths is not None and len(paths) != 1:
        errors.append(f"--config: expected one file, got {len(paths)}.")
    for name, values in flags.items():
        if name not in _KNOWN:
            errors.append(f"Unknown option --{name}{_advice(name, _AS_FLAG, ''.join(values[:1]))}")
        elif values:
            named_options.append(Setting(f"--{name}", name, values))
        elif name in OLDER or _is_switch(name):
            # a switch without a value is on, also one of the 2024 program
            named_options.append(Setting(f"--{name}", name, ["true"]))
        else:
            errors.append(f"--{name}: expected a value.")
    settings += translate(named_options, errors, [] if notes is None else notes)
    converted = _convert(settings, errors)
    return _checked(TrainConfig(**converted), errors), converted.keys()


def options_of(
    base: TrainConfig | str | Path | None, options: Mapping[str, object]
) -> tuple[TrainConfig, Collection[str]]:
    """Read the options of a run from Python values.

    The rules and the messages are those of the command line, because values become its text first.

    Args:
        base: options that those in `options` replace: a YAML file, a name of `shipped_configs`, or
            made before.
    Raises: as `parse_options`.
    """
    others = {name: str(value) for name, value in options.items() if name not in _KNOWN}
    errors = [
        f"Unknown option {name}{_advice(name, _AS_KEYWORD, value)}"
        for name, value in others.items()
    ]
    settings = settings_of(options)
    if isinstance(base, (str, Path)):
        settings = _read_yaml(find_config(os.fspath(base)), errors) + settings
    converted = _convert(translate(settings, errors, []), errors)
    values = vars(base) if isinstance(base, TrainConfig) else {}
    return _checked(TrainConfig(**(values | converted)), errors), converted.keys()


def _read_result(result: Path | Mapping[str, object] | None, errors: list[str]) -> list[Setting]:
    if isinstance(result, Path):
        settings = _read_yaml(result, errors, is_result=True)
    else:
        stored = result or {}
        described = {name: stored[name] for name in RESULT_OPTIONS if name in stored}
        settings = settings_of(described, "its ")
    # A prompt_template is a name or a file, and a stranger's result must not choose a file to read
    # on this machine.
    return [
        setting
        for setting in settings
        if setting.name != "prompt_template" or setting.text.isidentifier()
    ]


def is_option(name: str) -> bool:
    """Whether the command line of a run takes an option of this name, or an older name of one."""
    return name == "config" or name in _KNOWN


def current_options(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored options of a run, which an earlier version may have written.

    An option that it did not have is at its default.
    """
    return resolved_options(DEFAULTS) | dict(stored)


def settings_of(options: Mapping[str, object], place: str = "") -> list[Setting]:
    """Options as they would be given on the command line.

    None leaves an option at its default if the option cannot be None.

    Args:
        place: what the names of the options in messages begin with.
    """
    settings = []
    for name, value in options.items():
        may_be_none = type(None) in get_args(_HINTS.get(name))
        if name in _KNOWN and (value is not None or may_be_none):
            settings.append(Setting(f"{place}{name}", name, _words_of_value(value)))
    return settings


def _words_of_value(value: object) -> list[str]:
    """A Python value as the words of the command line; `none` for None and for an empty list."""
    if value is None:
        return ["none"]
    items = value if isinstance(value, (list, tuple)) else [value]
    words = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    return words or ["none"]


def _checked(config: TrainConfig, errors: list[str]) -> TrainConfig:
    # An option that is not known, or was not understood, may be what another one needs. So
    # combinations are checked only if all options could be read.
    errors = [*errors, *out_of_range(config)] if errors else check(config)
    errors = [cut(error) for error in errors]
    if len(errors) == 1:
        raise UserError(errors[0])
    if errors:
        raise UserError("\n  ".join([f"{len(errors)} options are wrong:", *errors]))
    return config


def _convert(settings: Iterable[Setting], errors: list[str]) -> dict[str, Any]:
    """Name -> value, a later setting of a name replacing an earlier one; adds to `errors`."""
    converted: dict[str, Any] = {}
    for where, name, values in settings:
        try:
            converted[name] = _parse(values, _HINTS[name])
        except ValueError as error:
            errors.append(f"{where}: {error}.")
    return converted


# --- text -> value ---


def _parse(values: list[str], hint: Any) -> object:
    """Convert the words given for an option to its type; ValueError says what was expected."""
    if get_origin(hint) is tuple:
        items = [item.strip() for value in values for item in value.split(",")]
        if items == ["none"]:  # an empty list as `value_text` writes it
            return ()
        not_empty = [item for item in items if item]  # "a, b" in two words has an empty one
        if items and not not_empty:
            raise ValueError(f"expected one value or more, or none, got {' '.join(values)!r}")
        return tuple(_parse_one(item, get_args(hint)[0]) for item in not_empty)
    if len(values) != 1:
        raise ValueError(f"expected one value, got {len(values)}: {' '.join(values)}")
    return _parse_one(values[0], hint)


def _parse_one(text: str, hint: Any) -> object:
    if get_origin(hint) in (Union, types.UnionType):
        return _one_of_types(text, hint)
    if get_origin(hint) is Literal:
        return _choice(text, get_args(hint))
    if hint is bool:
        return switch(text)
    return text if hint is str else parse_number(hint, text)


def _one_of_types(text: str, hint: Any) -> object:
    members = [member for member in get_args(hint) if member is not types.NoneType]
    if len(members) < len(get_args(hint)) and text.lower() in ("none", "null", "~", ""):
        return None
    if len(members) == 1:
        return _parse_one(text, members[0])
    # in the order of the type: a word of a Literal before a number, a whole number before a float
    for member in members:
        with contextlib.suppress(ValueError):
            return _parse_one(text, member)
    raise ValueError(f"expected {type_text(hint)}, got {text!r}")


def _choice(text: str, choices: tuple[str, ...]) -> str:
    choice_of = {choice.lower(): choice for choice in choices}
    choice = choice_of.get(text.lower().replace("-", "_"))
    if choice:
        return choice
    if f"{text.partition('=')[0]}=" in choices:  # a setting, whose value is free
        return text
    close = difflib.get_close_matches(text, choices, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise ValueError(f"{text!r} is not a choice{hint} Choices: {', '.join(choices)}")


# --- unknown names ---


def _advice(name: str, forms: tuple[str, str], value: str = "") -> str:
    """The end of a sentence on an option that does not exist: what to give instead, if known.

    Args:
        forms: how an option is written there, alone and with a value.
        value: the one that was given; "" for none.
    """
    turned_off = name.removeprefix("no_")
    if turned_off != name and _is_switch(turned_off):
        return f"; give {forms[1].format(turned_off, 'false')}."
    advice = advise(name, value)
    if not advice:
        close = difflib.get_close_matches(name.lower(), [*_HINTS, *OTHER_NAMES], n=1, cutoff=0.6)
        if not close:
            return "."
        advice = advise(close[0], value) or Advice(close[0])
    if advice.reason:
        return f": {advice.reason}."
    alone, with_value = forms
    suggested = with_value if advice.value else alone
    return f"; did you mean {suggested.format(advice.option, advice.value)}?"


def _is_switch(name: str) -> bool:
    """Whether an option is true or false."""
    return bool in (_HINTS.get(name), *get_args(_HINTS.get(name)))


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
        if len(errors) == _MOST_ERRORS:
            errors.append(f"{path}: the lines from {line} on are not checked.")
            break
        where = f"{path}, line {line}"
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else "?"
        words = _words(value)
        if is_result and name not in RESULT_OPTIONS:
            continue
        if name not in _KNOWN:
            errors.append(
                f'{where}: unknown key "{name}"{_advice(name, _AS_KEY, "".join((words or [])[:1]))}'
            )
        elif name in lines:
            errors.append(f"{where}: {name} is already given in line {lines[name]}.")
        elif words is None:
            errors.append(
                f"{where}: {name} expects a value or a list of values; options are not nested."
            )
        elif value.tag != "tag:yaml.org,2002:null":  # which leaves the option at its default
            settings.append(Setting(f"{where}: {name}", name, words))
        lines.setdefault(name, line)
    return settings


def _words(value: yaml.Node) -> list[str] | None:
    if isinstance(value, yaml.ScalarNode):
        return [value.value]
    if not isinstance(value, yaml.SequenceNode):
        return None
    if not all(isinstance(item, yaml.ScalarNode) for item in value.value):
        return None
    return [item.value for item in value.value]


def _yaml_pairs(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        # The nodes and not the values: they keep the text as written, the lines, and keys given
        # twice.
        root = yaml.compose(read_named(path, _MOST_BYTES).decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = f" Give a file, or one of {', '.join(shipped_configs())}."
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


_DESCRIPTION = """\
usage: fsdp-qlora train [--config FILE] [--option value ...]

Fine-tune a language model with a sharded, 4-bit quantized base on one or more devices.

  fsdp-qlora train --model_name Qwen/Qwen3-8B-Base --dataset rows.jsonl
  fsdp-qlora train --config qlora_8b_2x24gb --dataset alpaca --dry_run true
  fsdp-qlora train --model_name ./my_model --dataset chats.jsonl --eval_fraction 0.05 --output_dir runs/1

--help GROUP shows the options of one group: %s.
--config takes a YAML file of options, or a name that `fsdp-qlora configs` lists; flags win over it.
"""  # noqa: E501


def _split(argv: Iterable[str], errors: list[str]) -> dict[str, list[str]]:
    """Flag -> its words: `--batch-size=8` is {"batch_size": ["8"]}. Adds to `errors`."""
    flags: dict[str, list[str]] = {}
    words: list[str] | None = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words = flags[name.replace("-", "_")] = [value] if equals else []
        elif words is not None:
            words.append(word)
        else:
            hint = ""
            if word in shipped_configs() or word.endswith((".yaml", ".yml")):
                hint = f" Did you mean --config {word}?"
            elif "." in word:  # a file of rows, such as rows.jsonl
                hint = f" Did you mean --dataset {word}?"
            errors.append(f"Unexpected argument {word!r}: options are given as --name value.{hint}")
    return flags


def _print_help(group: str) -> None:
    """Print the options on rank 0.

    group: the heading whose options are shown; all if there is none of this name.
    """
    groups = option_help()
    lines = [_DESCRIPTION % ", ".join(groups)]
    width = min(shutil.get_terminal_size().columns, 120)
    for heading in [group] if group in groups else groups:
        lines.append(f"{heading}:")
        for name, text in groups[heading].items():
            described = f"{text} (default: {value_text(getattr(DEFAULTS, name))})"
            lines.append(f"  --{name} {type_text(_HINTS[name])}")
            lines.append(textwrap.indent(textwrap.fill(described, width - 6), " " * 6))
        lines.append("")
    # torchrun starts this on every rank, and the device and ranks are not known yet
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines))
