"""Variables of the chat template that a row sets, such as enable_thinking."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fsdp_qlora.data.content import BadRow, Row, plain_value

COLUMN = "chat_template_kwargs"
"""The column with an object of several, as TRL has it. Others have the variable's name."""
RESERVED = {
    *("messages", "tools", "add_generation_prompt"),
    # Parameters of transformers' functions.
    *(
        "conversations",
        "conversation",
        "chat_template",
        "continue_final_message",
        "return_assistant_tokens_mask",
    ),
    *(
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
    ),
    # Functions that templates call.
    *(
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
    ),
    *(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
    "additional_special_tokens",
}
"""Names that no row can set: they are the row's columns, the tokenizer's or the program's."""
# How variables are called that are on or off.
_SWITCH = re.compile(r"(enable|preserve|keep|add|use|is|has)_|thinking$")


def columns_of(
    columns: Iterable[str],
    renames: Mapping[str, str],
    template: str,
    ask: Callable[[], Collection[str]],
) -> dict[str, str]:
    """The columns that a template reads: their name -> the variable's, or COLUMN.

    Args:
        renames: of `parse_columns`.
        ask: gives the variables of the template, if some column may be one.
    """
    named = {column: renames.get(column, column) for column in columns}
    may_be = {
        column: name
        for column, name in named.items()
        if name not in RESERVED and _has_word(template, name)
    }
    # A worker has to start for it, so it is asked only if the template has a column's name in it.
    variables = ask() if may_be.keys() - {COLUMN} else ()
    return {
        column: name
        for column, name in named.items()
        if name == COLUMN or (column in may_be and name in variables)
    }


def unused(names: Iterable[str], template: str) -> list[str]:
    """The names that do not occur in a template."""
    return [name for name in names if not _has_word(template, name)]


def _has_word(template: str, name: str) -> bool:
    return name.isidentifier() and bool(re.search(rf"\b{name}\b", template))


def read_kwargs(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The variables of a row. Raises BadRow if one is of a wrong type or reserved.

    Args:
        columns: as of `columns_of`.
    """
    given: dict[str, Any] = {}
    for column, name in columns.items():
        value = row.get(column)
        if value is None or value == "":
            continue
        if name == COLUMN:
            variables = _object(value, column)
            advice = ""
        else:
            variables = {name: value}
            advice = f"; --columns ignore={column} trains without it"
        for variable, inner in variables.items():
            _check(variable, inner, advice)
            if given.setdefault(variable, inner) != inner:
                raise BadRow(
                    f"{variable} is {given[variable]!r} in one column and {inner!r} in another"
                )
    plain: dict[str, Any] = plain_value(given)
    return plain


def _object(value: object, column: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{column} is not JSON") from error
    if not isinstance(value, Mapping):
        raise BadRow(
            f"{column} is not an object with the template's variables but {type(value).__name__}"
        )
    return value


def _check(name: str, value: object, advice: str) -> None:
    if name in RESERVED:
        raise BadRow(f"{COLUMN}: a row cannot set {name}")
    # A template would take both words for true: in jinja2 any text but the empty one is.
    is_word = isinstance(value, str) and value.lower() in ("true", "false")
    if is_word or (_SWITCH.match(name) and not isinstance(value, bool | None)):
        raise BadRow(f"{name} is {value!r:.40}, and can be true or false{advice}")
