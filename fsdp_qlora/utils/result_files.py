"""The files of a result, moved into place together.

result.json records each file's size and SHA-256.
"""

import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.files import (
    FileRecord,
    NotAFile,
    files_difference,
    flush,
    flush_files,
    read_named,
    records_of,
)
from fsdp_qlora.utils.run_files import CARD, RESULT

log = logging.getLogger("fsdp_qlora")

STAGING = ".saving"  # in output_dir, so that a rename moves the files and copies nothing
_SLOW_BYTES = 2**32  # hashing a whole model takes a minute or more


def publish_files(output_dir: Path, write: Callable[[Path], object]) -> None:
    """Flush to disk what `write` puts into a temporary folder, then move it into `output_dir`.

    Readers see each file complete or not at all.
    """
    staging = output_dir / STAGING
    # A killed process may have left some.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    # Before the renames: after a power cut a file may otherwise be there by name and empty.
    flush_files(staging)
    # Weights first: programs look for the configuration to decide whether a model is there.
    # result.json has the hashes of all files, so it comes last: a kill in between leaves a result
    # that does not pass verification.
    for path in sorted(staging.iterdir(), key=_place_of_publishing):
        target = output_dir / path.name
        if target.is_dir():  # an existing folder (of chat templates) cannot be replaced by a rename
            shutil.rmtree(target)
        path.replace(target)
    staging.rmdir()
    flush(output_dir)


def _place_of_publishing(path: Path) -> tuple[bool, bool, str]:
    return path.name == RESULT, path.suffix == ".json", path.name


def record_result(folder: Path, staged: Iterable[Path] = ()) -> None:
    """Write result.json into a folder that is about to be published.

    Args:
        staged: files outside the folder that will be added to it under their names.
    """
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    paths |= {path.name: path for path in staged}
    records = dict(zip(paths, records_of(list(paths.values())), strict=True))
    content = {"files": {name: record._asdict() for name, record in sorted(records.items())}}
    (folder / RESULT).write_text(json.dumps(content, indent=2) + "\n")


def result_error(output_dir: Path, only: Collection[str] | None = None) -> str | None:
    """Compare the result in a folder with result.json.

    Returns the first difference, None if there is none. The card (README.md) may be edited.

    Args:
        only: compare only these files, and only if result.json lists them. Without `only` a result
            must exist.
    Raises:
        OSError: a file cannot be read at present.
    """
    try:
        content: dict[str, Any] = json.loads(read_named(output_dir / RESULT))
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
    except FileNotFoundError:
        return None if only is not None else f"{RESULT} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, NotAFile) as error:
        return f"{RESULT} cannot be read ({error})"
    # The file may be a stranger's: its names must not lead out of the folder.
    if not files or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        return f"{RESULT} lists no files of the folder"
    files = {
        name: record
        for name, record in files.items()
        if (name != CARD if only is None else name in only)
    }
    size = sum(record.size for record in files.values())
    if size > _SLOW_BYTES:
        log.info(
            "Comparing the %.0f GiB of the result in %s with %s.", size / 2**30, output_dir, RESULT
        )
    return files_difference(output_dir, files)
