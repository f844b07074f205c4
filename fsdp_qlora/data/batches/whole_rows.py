"""Files of tables whose tokens are side by side elsewhere: in pieces, or in other datasets' files.

A folder has an array for each row or document in rows.safetensors, and the rest in index.json,
which is written last: with it the table is complete.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdp_qlora.data.batches.report import DataReport, report_as_json, report_of_json
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.side_by_side import FlatArray, SideBySide
from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.files import staged_file
from fsdp_qlora.utils.verified_files import Arrays, Damaged, Metadata, read_verified, write_verified

INDEX = "index.json"
ROWS = "rows.safetensors"
STAMP = "verified.json"


class _RowArrays(NamedTuple):
    """The arrays of rows.safetensors."""

    arrays: Arrays

    @property
    def digest(self) -> str:
        total = hashlib.blake2b(digest_size=16)
        for name, array in sorted(self.arrays.items()):
            total.update(f"{name} {array.dtype} {array.shape} ".encode())
            total.update(np.ascontiguousarray(array).data)
        return total.hexdigest()

    @classmethod
    def build(cls, arrays: Arrays, metadata: Metadata) -> "_RowArrays":
        return cls(arrays)


def write_whole(
    folder: Path, rows: TokenizedRows, report: DataReport, pieces: Mapping[str, str]
) -> None:
    """Write all of a table but its tokens.

    Args:
        pieces: the names of the files with its tokens and the digests of these, if they are the
            folder's.
    Raises:
        OSError or SafetensorError: the folder cannot be written.
    """
    arrays = {
        name: array for name, array in rows.arrays.items() if not isinstance(array, SideBySide)
    }
    content = _RowArrays(arrays)
    folder.mkdir(exist_ok=True)
    write_verified(folder / ROWS, arrays, content)
    index = {
        "digest": rows.digest,
        "learns": rows.learns,
        "rows": content.digest,
        "report": report_as_json(report),
        "pieces": dict(pieces),
    }
    with staged_file(folder / INDEX) as partial:
        write_description(partial, index)


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a folder; None if there is none. Raises Damaged."""
    try:
        return read_description(folder / INDEX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(str(error)) from error


def read_whole(
    folder: Path, index: Mapping[str, Any], parts: Sequence[TokenizedRows], *, is_hashed: bool
) -> tuple[TokenizedRows, DataReport]:
    """Map the table of a folder, whose tokens are those of `parts`.

    Args:
        is_hashed: as of `read_verified`.
    Raises:
        Damaged: the files do not belong together.
    """
    found = read_verified(folder / ROWS, _RowArrays.build, is_hashed=is_hashed)
    if found is None or (is_hashed and found.digest != index["rows"]):
        raise Damaged(f"{ROWS} is missing, or of other rows")
    arrays: dict[str, FlatArray] = dict(found.arrays)
    arrays["input_ids"] = SideBySide([part.input_ids for part in parts])
    arrays["learned"] = SideBySide([part.learned for part in parts])
    rows = TokenizedRows.from_arrays(arrays, index["learns"], index["digest"])
    return rows, report_of_json(index["report"])
