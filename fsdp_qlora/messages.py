"""Text from rows, files and other programs, made harmless for a terminal."""

import logging
import os
import re
import sys

log = logging.getLogger("fsdp_qlora")

# C0 and C1 control characters but newline and tab, and halves of surrogate pairs, which no terminal can be given.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters as escapes such as \x1b: a terminal obeys those, whoever wrote them."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


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
