"""Text for people: at a terminal, without what a terminal would obey, and with numbers in readable units."""

import logging
import os
import re
import sys
from typing import Any

from tqdm import tqdm

log = logging.getLogger("fsdp_qlora")

GIB = 2**30
_COLUMNS = 100  # of a line of the start
_LONGEST, _SCREEN = 1000, 6000  # characters of a message's line, and of a message

# C0 and C1 control characters but newline and tab, and halves of surrogate pairs, which no terminal can be given.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters as escapes such as \x1b: a terminal obeys those, whoever wrote them."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def warn_from_any_rank(text: str) -> None:
    """Log a warning that only this rank can give. Ranks other than 0 have no log, so they print it to stderr."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        log.warning("%s", text)
    else:
        print(f"[rank {rank}] {printable(text)}", file=sys.stderr, flush=True)


class LineHandler(logging.StreamHandler[Any]):
    """Writes printable lines; clears the progress bar for each and redraws it below."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def fit(text: str, path: str = "") -> str:
    """One line of the screen: a text, cut in its middle, and as much of the end of a path as there is room for."""
    room = max(_COLUMNS - len(text), 0)
    line = text + (path if len(path) <= room else f"...{path[len(path) - room + 3 :]}")
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS // 2 - 5]} ... {line[-_COLUMNS // 2 :]}"


def cut(text: str) -> str:
    """A message of at most about a screen, without the middle of its long lines: it may quote the longest of a file."""
    return _without_middle("\n".join(_without_middle(line, _LONGEST) for line in text.split("\n")), _SCREEN)


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - _COLUMNS]} ... {text[-_COLUMNS:]}"


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def quiet_libraries() -> None:
    """Suppress libraries' messages that look like failures and are not. Call it before they are imported."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that others have loaded


def _is_of_use(record: logging.LogRecord) -> bool:
    """bitsandbytes looks for a faster CPU kernel on the hub when it is imported; its own does."""
    return "Failed to load CPU gemm_4bit_forward" not in record.msg


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError
