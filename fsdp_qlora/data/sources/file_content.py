"""Opens local files: unpacked, line by line, as UTF-8 text, and within limits of length."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from fsdp_qlora.data.content import MAX_ROW, BadRow, most_row_bytes
from fsdp_qlora.data.sources.reading import Reading
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named


def _open_zst(packed: IO[bytes]) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"))


# Times its size that a .json or .parquet may unpack to; text is packed 3 to 20 times.
_MOST_PACKED = 100
# The last suffix of a packed file -> how it is opened.
PACKED: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".zst": _open_zst}


@contextlib.contextmanager
def open_file(path: Path, reading: Reading | None = None) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked. Raises UserError where that is damaged.

    Args:
        reading: gets the share of the bytes on the disk that have been read.
    """
    try:
        with (
            open_named(path) as raw,
            PACKED.get(path.suffix.lower(), contextlib.nullcontext)(raw) as file,
        ):
            if reading is not None:
                size = max(1, path.stat().st_size)
                reading.share = lambda: 1.0 if raw.closed else raw.tell() / size
            yield file
    except (EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None) is not None:  # of the disk, not of the content
            raise
        raise UserError(
            f"{path}: the packed file is damaged or cut off ({error}). Copy it again."
        ) from error


def is_packed(path: Path) -> bool:
    """Whether a file is packed, so that it can be read from its beginning only."""
    return path.suffix.lower() in PACKED


def lines_of(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file.

    Raises UserError for one that is too long, before all of it is in memory.
    """
    most = most_row_bytes()
    for line_number in count(1):
        # One byte more than allowed tells a line that is too long from one that just fits.
        line = file.readline(most + 1)
        if not line:
            return
        if len(line) > most:
            raise too_long(f"{path}:{line_number}")
        yield line


def max_unpacked_bytes(num_bytes: int) -> int:
    """The bytes that `num_bytes` packed ones may unpack to."""
    return max(most_row_bytes(), _MOST_PACKED * num_bytes)


def too_long(place: str) -> UserError:
    """The refusal of a row that is longer than one may be."""
    return UserError(
        f"{place}: longer than {most_row_bytes() / 2**20:.0f} MiB. Is it damaged? If not, allow it "
        f"with the environment variable {MAX_ROW}, in MiB."
    )


def decode(data: bytes) -> str:
    """UTF-8 to text, without a mark at its beginning. Raises BadRow with the byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(error) from error


def not_text(error: UnicodeDecodeError, before: int = 0) -> BadRow:
    """The reason for refusing bytes that are not UTF-8. before: bytes that were decoded earlier."""
    return BadRow(f"not UTF-8 text (byte {before + error.start}: {error.reason})")
