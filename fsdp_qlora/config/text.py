"""Options as text: help, the stored options of a run, and the YAML files of the program."""

import ast
import inspect
import itertools
import os
import re
import textwrap
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from fsdp_qlora.config.marks import MAY_DIFFER
from fsdp_qlora.config.options import DEFAULTS, TrainConfig, names_marked
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named
from fsdp_qlora.utils.redact import redact_values

SWITCH = {word: True for word in ("true", "yes", "on", "1")} | {
    word: False for word in ("false", "no", "off", "0")
}
"""The words of YAML 1.1 for a switch, which a user may well write in the file."""


def parse_number(kind: type, text: str) -> Any:
    """The number that a text is. kind: int or float. Raises ValueError."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"expected {'a whole number' if kind is int else 'a number'}, got {text!r}"
        ) from None


def switch(text: str) -> bool:
    """Whether a switch is on. Raises ValueError if it is no word for one."""
    if text.lower() not in SWITCH:
        raise ValueError(f"expected true or false, got {text!r}")
    return SWITCH[text.lower()]


# --- help ---


def option_help() -> dict[str, dict[str, str]]:
    """Heading -> option -> help, in the order of the fields,
    read from the sources of `TrainConfig`'s bases.
    """
    options: dict[str, dict[str, str]] = {}
    for group in reversed(TrainConfig.__mro__[1:-1]):  # without object
        options |= _help_of_group(group)
    return options


def _help_of_group(group: type) -> dict[str, dict[str, str]]:
    source = textwrap.dedent(inspect.getsource(group))
    headings = {
        row: line.strip(" #=") for row, line in enumerate(source.splitlines(), 1) if "# ==" in line
    }
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    options: dict[str, dict[str, str]] = {heading: {} for heading in headings.values()}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            heading = headings[max(row for row in headings if row < field.lineno)]
            name = ast.unparse(field.target)
            sentence = ast.literal_eval(text.value)
            options[heading][name] = " ".join(sentence.split())
    return options


def type_text(hint: Any) -> str:
    """The form of a value: INT, or {nf4,fp4}."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        return type_text(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        members = [type_text(member) for member in get_args(hint) if member is not types.NoneType]
        return (
            members[0]
            if len(members) == 1
            else "|".join(text.strip("{}").replace(",", "|") for text in members)
        )
    return {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}[hint]


def value_text(value: object) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


# --- the options of a run, in its folder, in checkpoints and with its result ---


def resolved_options(config: TrainConfig) -> dict[str, Any]:
    """All options of the run, with the defaults that other options decide.

    For files, logs and other machines: secrets are taken out. A dry run has the options of the run
    that it plans.
    """
    used = config.objective_row.decided(config)._asdict() | {"dry_run": False}
    return redact_values(stored_values(vars(config) | used))


def stored_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options as JSON and YAML have them."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }


def resolved_yaml(config: TrainConfig) -> str:
    """`resolved_options` as YAML that `--config` accepts for the same run."""
    return yaml.safe_dump(resolved_options(config), sort_keys=False, allow_unicode=True)


def identity_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The stored options that identify a run, and the ones that are not the default.

    None of them is a path, so that they can be published.
    """
    may_differ = names_marked(MAY_DIFFER)
    defaults = resolved_options(DEFAULTS)
    settings = {
        name: value
        for name, value in options.items()
        if name in defaults and name not in may_differ
    }
    changed = {
        name: value
        for name, value in settings.items()
        if value != defaults[name] or name == "train_type"
    }
    return settings, changed


# --- values of several parts ---


def pairs(items: Iterable[str]) -> list[tuple[str, str]]:
    """["q_proj=8"] -> [("q_proj", "8")]; without `=` the value is empty."""
    result = []
    for item in items:
        # at the last one: a name may be a regular expression, which may have = itself
        name, equals, value = item.rpartition("=")
        result.append((name, value) if equals else (item, ""))
    return result


def named_tokens(words: Iterable[str]) -> tuple[str, ...]:
    """The tokens of --add_tokens, with tokens of .txt files in the files' place; each once.

    Raises:
        UserError: a file cannot be read or has no token, or a description has no token or another
            one before it.
    """
    listed = [_tokens_of_file(word) if word.endswith(".txt") else [word] for word in words]
    tokens = tuple(dict.fromkeys(itertools.chain(*listed)))
    # A token that is named twice may not start from two different descriptions.
    described: dict[str, str] = {}
    for word in tokens:
        token, _, description = word.partition(": ")
        if not token:
            raise UserError(f"--add_tokens: {word[:80]!r} is a description without its token.")
        if described.setdefault(token, description) != description:
            raise UserError(
                f"--add_tokens: {token} has two descriptions, or one and none. Name it once."
            )
    return tokens


def _tokens_of_file(name: str) -> list[str]:
    try:
        # Editors on Windows begin files with a byte order mark, which would become a token.
        lines = read_named(Path(name)).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--add_tokens: a file of tokens cannot be read ({error}).") from error
    tokens = [line for line in lines if line.strip()]
    if not tokens:
        raise UserError(f"--add_tokens: {name} has no token. Write one in each line.")
    return tokens


ALL = ("all", "all-linear")  # PEFT's word is all-linear
TOWERS = ("vision", "projector")
"""Words for linear layers that compute images, which may stand beside all others."""


def is_regex(name: str) -> bool:
    """Whether a target is a regular expression: layer names consist of word characters and dots."""
    return name not in ALL and re.fullmatch(r"[\w.]+", name) is None


def url_error(name: str, url: str) -> str | None:
    """Check the address of an option's server; returns a message if it cannot be used.

    It has a scheme, and neither a user nor a password, which would come into logs.
    """
    if re.fullmatch(r"https?://[^/\s@]+(/\S*)?", url):
        return None
    return (
        f"--{name} is {url!r}. Give a URL such as http://localhost:8000, without user and password."
    )


# --- YAML files that come with the program ---

_FOLDER = Path(__file__).resolve().parent.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """The YAML files that come with the program, by their names."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that was given, or the one that comes with the program under this name.

    An existing file wins, but a folder does not: demo.sh makes a folder with the name of its
    settings.
    """
    path = Path(name)
    is_users = os.path.exists(path) and not os.path.isdir(path)
    return path if is_users else shipped_configs().get(name, path)


def describe_config(path: Path) -> str:
    """The purpose of a file: the first sentence of the comment that it begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line[2:].strip() for line in comment).partition(". ")[0].partition(":  ")[0]
