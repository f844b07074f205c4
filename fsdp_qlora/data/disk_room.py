"""Looks at the disk of the cache before much of a dataset is read: its free bytes, its folder."""

from pathlib import Path

from fsdp_qlora.data.sources.file_content import is_packed
from fsdp_qlora.data.sources.source import Source
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, why_not_writable
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.text import format_bytes, warn_from_any_rank

# Smaller datasets are not looked at.
_LARGE = 2**30  # bytes
# A token is about 4 bytes of text, and 5 bytes of the cache: its id, and whether it is learned.
_CACHE_OF_TEXT = 5 / 4
# Text is packed about this number of times.
_PACKED = 4
# Much of a file may be columns that are not used, so only a fraction is sure to be needed.
_SURE = 0.05
# Rows that are estimated to fill so many pieces are sure to fill several.
_SURELY_SEVERAL = 4


def check_room(source: Source, limit: int | None) -> None:
    """Compare the free disk with the estimated size of a dataset's tokens.

    A dataset of which a slice is read is not looked at, nor a table of `datasets`.

    Args:
        limit: the rows that are read, None for all.
    Raises:
        UserError: even a twentieth of the estimate does not fit. If only the estimate does not, a
            warning says so.
    """
    if limit is not None or source.start or source.stop is not None:
        return
    text = 0
    for part in source.parts:
        if part.is_file:
            is_compressed = is_packed(Path(part.name)) or part.name.endswith(".parquet")
            text += part.size * (_PACKED if is_compressed else 1)
    needed = text * _CACHE_OF_TEXT
    free = free_disk(cache_folder())
    if text <= _LARGE or needed <= free:
        return
    about = (
        f"{source.origin}: its tokens may take about {format_bytes(needed)}, and the cache, "
        f"{cache_folder()}, has {format_bytes(free)} free"
    )
    advice = (
        "Free some space, set FSDP_QLORA_CACHE to a folder on a larger disk, or use fewer rows "
        "with --dataset_samples"
    )
    if needed * _SURE > free:
        raise UserError(f"{about}. {advice}.")
    warn_from_any_rank(f"{about}. {advice}, if it gets full.")


def check_folder(num_pieces: float) -> None:
    """Refuse a cache that cannot be written, for rows that are sure to need it.

    Args:
        num_pieces: that the rows fill, by the first ones of them.
    Raises:
        UserError: they are several, which would not fit in memory, and cannot be kept.
    """
    if num_pieces < _SURELY_SEVERAL:
        return
    folder = cache_folder() / "tokenized"
    reason = why_not_writable(folder)
    if reason:
        raise UserError(
            f"Tokenized rows cannot be written to {folder} ({reason}), and these are too many for "
            f"memory: they fill about {num_pieces:,.0f} pieces. Name another folder with the "
            "environment variable FSDP_QLORA_CACHE, or use fewer rows with --dataset_samples."
        )
