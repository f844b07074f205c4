"""Text for people: no control characters, limited length, and numbers in readable units."""

import logging
import os
import re
import reprlib
import sys
from typing import Any

from tqdm import tqdm

log = logging.getLogger("fsdp_qlora")

GIB = 2**30
_COLUMNS = 100  # of the lines that a run prints at its start
_LONGEST = 1000  # most characters of a message's line
_SCREEN = 6000  # most characters of a message

_LONGEST_VALUE = 80  # most characters of a value that a message quotes
# A value that is shown without quotation marks.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.()+/-]*")

# C0 and C1 control characters except newline and tab, and lone surrogates, which cannot be encoded
# in UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Replace control characters by escapes such as \x1b."""
    # A terminal would obey those in a stranger's row or in a model's name.
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def plural(count: int, noun: str, *, ending: str = "s") -> str:
    """A number and its noun: "1 rank", "2 ranks"; ending: "es" for "processes"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def shown(value: Any) -> str:
    """A value of a stranger's file for a message: on one line, of limited length and depth."""
    short = reprlib.Repr()
    short.maxlevel = 3
    short.maxstring = short.maxother = short.maxlong = _LONGEST_VALUE
    return _without_middle(short.repr(value), 2 * _LONGEST_VALUE)


def shown_name(name: str) -> str:
    """A name for a message, quoted only where it does not look like a name."""
    if len(name) <= _LONGEST_VALUE and _PLAIN.fullmatch(name):
        return name
    return shown(name)


def warn_from_any_rank(text: str) -> None:
    """Log a warning about this rank alone."""
    _say_from_any_rank(logging.WARNING, text)


def inform_from_any_rank(text: str) -> None:
    """Log a line about what this rank does for others."""
    _say_from_any_rank(logging.INFO, text)


def _say_from_any_rank(level: int, text: str) -> None:
    # Ranks other than 0 have no handler, so that nothing is logged once for each rank.
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        log.log(level, "%s", text)
    else:
        print(f"[rank {rank}] {printable(text)}", file=sys.stderr, flush=True)


class LineHandler(logging.StreamHandler[Any]):
    """Writes printable lines. The progress bar is cleared for each line and redrawn below it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def fit_line(text: str, path: str = "") -> str:
    """Fit a text and the end of a path into one line of the screen.

    A text that is too long loses its middle.
    """
    room = max(_COLUMNS - len(text), 0)
    if len(path) > room:
        path = f"...{path[len(path) - room + 3 :]}"
    line = text + path
    if len(line) <= _COLUMNS:
        return line
    return f"{line[: _COLUMNS // 2 - 5]} ... {line[-_COLUMNS // 2 :]}"


def cut(text: str) -> str:
    """Shorten a message to about a screen, and its long lines to 1000 characters."""
    # It may quote a line of a file, and the end of a library's message often has the reason.
    lines = [_without_middle(line, _LONGEST) for line in text.split("\n")]
    return _without_middle("\n".join(lines), _SCREEN)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most - _COLUMNS]} ... {text[-_COLUMNS:]}"


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def quiet_libraries() -> None:
    """Suppress libraries' messages that look like failures and are not.

    Call it before the libraries are imported.
    """
    # On import bitsandbytes looks for a faster CPU kernel on the hub. Its own kernel is sufficient.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "Failed to load CPU gemm_4bit_forward" not in record.msg
    )
    # It warns of a model that it has not loaded itself.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """1234567 -> "1.2M"."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.2f}B"
