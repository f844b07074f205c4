"""Text from rows, files and other programs as it may be shown at a terminal: harmless, no longer than a screen."""

import logging
import os
import re
import sys
import tempfile

from fsdp_qlora.redact import redact

log = logging.getLogger("fsdp_qlora")

MOST_CHARACTERS, MOST_LINES = 4000, 50  # of a message
# C0 and C1 control characters but newline and tab, and halves of surrogate pairs, which no terminal can be given.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters as escapes such as \x1b: a terminal obeys those, whoever wrote them."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, rest: str) -> str:
    """The beginning of a text that is longer than a screen, and where the rest is."""
    lines = text.split("\n")
    kept = "\n".join(lines[:MOST_LINES])[:MOST_CHARACTERS]
    return text if len(kept) == len(text) else f"{kept}\n... {len(text) - len(kept):,} more characters: {rest}"


def shown(text: str) -> str:
    """A message as it is printed. One that is longer than a screen is kept whole in a file, whose name is the end."""
    if shortened(text, "") == text:
        return printable(text)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="fsdp_qlora_message_", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(printable(redact(text)))
        rest = file.name
    except OSError as error:
        rest = f"left out ({error})"
    return printable(shortened(text, rest))


def warn_from_any_rank(text: str) -> None:
    """A warning of what this rank alone knows. Others than rank 0 have no log, so theirs goes to stderr."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        log.warning("%s", text)
    else:
        print(f"[rank {rank}] {printable(text)}", file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """A record's message alone, printable."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
