"""The help of each option, which is the sentence under its field; its type and default as text."""

import ast
import inspect
import itertools
import textwrap
import types
from typing import Any, Literal, Union, get_args, get_origin

from fsdp_qlora.config.marks import NO_EFFECT
from fsdp_qlora.config.options import TrainConfig, names_marked


def option_help() -> dict[str, dict[str, str]]:
    """Heading -> option -> help, in the order of the fields, read from the source of `TrainConfig`."""
    source = textwrap.dedent(inspect.getsource(TrainConfig))
    headings = {number: line.strip(" #=") for number, line in enumerate(source.splitlines(), 1) if "# ==" in line}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    options: dict[str, dict[str, str]] = {heading: {} for heading in headings.values()}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            heading = headings[max(number for number in headings if number < field.lineno)]
            name, sentence = ast.unparse(field.target), ast.literal_eval(text.value)
            options[heading][name] = " ".join(sentence.split())
    return options


def type_text(hint: Any) -> str:
    """What a value looks like: INT, or {nf4,fp4}."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    if get_origin(hint) is tuple:
        return type_text(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        members = [type_text(member) for member in get_args(hint) if member is not types.NoneType]
        return members[0] if len(members) == 1 else "|".join(text.strip("{}").replace(",", "|") for text in members)
    return {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}[hint]


def value_text(value: object) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def needless_lines(config: TrainConfig) -> list[str]:
    """One line for each option that was given and has no effect any more."""
    given = [name for name in names_marked(NO_EFFECT) if getattr(config, name) is not None]
    help_of = {name: text for options in option_help().values() for name, text in options.items()} if given else {}
    return [f"--{name} is no longer needed. {help_of[name]}" for name in given]
