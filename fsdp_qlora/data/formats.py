"""Formats: how a row of a dataset becomes text, and which of the text is learned. A new format is a row of FORMATS."""

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
class Segment:
    """A piece of a row's text. Segments are tokenized apart, so no token crosses a boundary."""

    text: str
    learned: bool
    """True where the model learns to write the text, false where it only reads it."""


@dataclass(frozen=True)
class Format:
    """How one kind of dataset is recognized and read."""

    columns: tuple[str, ...]
    """Columns that a dataset must have. One that has them all is of this format."""
    optional_columns: tuple[str, ...]
    """Columns that are used where they are present."""
    render: Callable[[Mapping[str, object]], list[Segment]]
    """The text of a row in order, in any number of segments. Raises BadRow."""

    def fits(self, columns: Collection[str]) -> bool:
        """Whether a dataset with these columns can be read in this format."""
        return set(self.columns) <= set(columns)

    def describe_columns(self) -> str:
        """The columns for people: "instruction, output (and input, if present)"."""
        optional = f" (and {', '.join(self.optional_columns)}, if present)" if self.optional_columns else ""
        return ", ".join(self.columns) + optional


def render_alpaca(row: Mapping[str, object]) -> list[Segment]:
    """Fill the Alpaca template. An `input` that is absent, null or blank counts as no input."""
    instruction, response = _text(row, "instruction"), _text(row, "output")
    context = _text(row, "input", required=False)
    template = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
    prompt = template.format(instruction=instruction, input=context)
    return [Segment(prompt, learned=False), Segment(response, learned=True)]


# With dataset_format auto the first that fits is used, so a format stands before those that need only some of its
# columns. Raise cache.CACHE_VERSION when the order or the text of a format changes: cached rows hold the old one.
FORMATS: dict[str, Format] = {
    "alpaca": Format(columns=("instruction", "output"), optional_columns=("input",), render=render_alpaca),
}


def choose_format(columns: Collection[str], *, dataset_format: str, origin: str) -> str:
    """Name the format of a dataset with these columns.

    Args:
        dataset_format: a key of FORMATS, or "auto" for the first format that fits.
        origin: the dataset's path or name, for the message.
    Raises:
        UserError: the format is unknown, or the dataset lacks columns that it needs.
    """
    if dataset_format != "auto" and dataset_format not in FORMATS:
        raise UserError(f"dataset_format: unknown format {dataset_format!r}. Formats: {', '.join(['auto', *FORMATS])}.")
    candidates = list(FORMATS) if dataset_format == "auto" else [dataset_format]
    for name in candidates:
        if FORMATS[name].fits(columns):
            return name
    needed = "; ".join(f"{name}: {FORMATS[name].describe_columns()}" for name in candidates)
    raise UserError(
        f"{origin}: missing columns. It has: {', '.join(columns) or 'none'}. Needed ({needed}). "
        "Rename the columns of the dataset."
    )


def _text(row: Mapping[str, object], column: str, *, required: bool = True) -> str:
    """The text of a column; "" if it is blank and not required."""
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
    """False for lone surrogates: JSON can contain them, a tokenizer cannot read them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
