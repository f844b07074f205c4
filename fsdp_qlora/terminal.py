"""Prints lines without breaking the progress bar, and silences misleading messages of libraries."""

import logging
import shutil
from typing import Any

from tqdm import tqdm


class LineHandler(logging.StreamHandler[Any]):
    """Clears the progress bar for each line and redraws it below."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def shorten(text: str, *, num_lines: int, heading: str) -> str:
    """At most `num_lines` lines of a text, none wider than the terminal; the parts under headings get equal shares.

    Args:
        heading: what the first line of a part begins with.
    """
    width = shutil.get_terminal_size((120, 24)).columns
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(heading):
            parts.append([])
        parts[-1].append(line)
    shares = [n for n in range(3, num_lines) if sum(min(len(part), n) for part in parts) <= num_lines]
    share = max(shares, default=2)
    lines = [line for part in parts for line in _ends(part, share)]
    if len(lines) > num_lines:
        lines = [*lines[: num_lines - 1], "[...]"]
    return "\n".join(line if len(line) <= width else f"{line[: width - 6]} [...]" for line in lines)


def _ends(lines: list[str], count: int) -> list[str]:
    """The first two of some lines and the last ones, `count` in all; empty ones are the first to go."""
    if len(lines) <= count:
        return lines
    lines = [line for line in lines if line.strip()]
    if len(lines) <= count:
        return lines
    last = max(0, count - 3)
    return [*lines[: count - 1 - last], "[...]", *lines[len(lines) - last :]]


def quiet_libraries() -> None:
    """Suppress libraries' messages that look like failures and are not. Call it before they are imported."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """bitsandbytes looks for a faster CPU kernel on the hub when it is imported; its own does."""
    return "Failed to load CPU gemm_4bit_forward" not in record.msg
