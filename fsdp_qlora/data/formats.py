"""Formats: how a row of a dataset becomes a prompt and the response to learn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fsdp_qlora.errors import UserError

# The templates of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py); the response follows
# the colon directly.
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason under which it is counted."""


@dataclass(frozen=True)
class Format:
    """`columns` are the ones a dataset must have; `render` gives (prompt, response) or raises BadRow."""

    columns: tuple[str, ...]
    render: Callable[[Mapping[str, object]], tuple[str, str]]


def render_alpaca(row: Mapping[str, object]) -> tuple[str, str]:
    """Fill the Alpaca template; an `input` that is absent, null or blank is no input."""
    instruction, response = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input", required=False)
    template = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
    return template.format(instruction=instruction, input=context), response


FORMATS: dict[str, Format] = {
    "alpaca": Format(columns=("instruction", "output"), render=render_alpaca),
}


def choose_format(columns: Collection[str], *, dataset_format: str, origin: str) -> str:
    """Name the format of a dataset with these columns.

    Args:
        dataset_format: a key of FORMATS, or "auto" to tell it from the columns.
        origin: the dataset's path or name, for the message.
    Raises:
        UserError: the format is unknown, or the dataset lacks columns that it needs.
    """
    if dataset_format != "auto" and dataset_format not in FORMATS:
        raise UserError(f"dataset_format: unknown format {dataset_format!r}. Formats: {', '.join(['auto', *FORMATS])}.")
    candidates = list(FORMATS) if dataset_format == "auto" else [dataset_format]
    for name in candidates:
        if set(FORMATS[name].columns) <= set(columns):
            return name
    needed = "; ".join(f"{name}: {', '.join(FORMATS[name].columns)}" for name in candidates)
    raise UserError(
        f"{origin}: missing columns. It has: {', '.join(columns) or 'none'}. Needed ({needed}). "
        "Rename the columns of the dataset."
    )


def _text(row: Mapping[str, object], column: str, *, required: bool = True) -> str:
    """The text in one column; "" where it is blank and not required."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{column} is not text but {type(value).__name__}")
    if not value or value.isspace():
        if required:
            raise BadRow(f"empty {column}")
        return ""
    if not _is_unicode(value):
        raise BadRow(f"{column} has half a surrogate pair")
    return value


def _is_unicode(text: str) -> bool:
    """False for lone surrogates: JSON can carry them, a tokenizer cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
