"""result.json: the files of a finished run's result, with the size and SHA-256 of each."""

import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpointing.checkpoint import DamagedCheckpoint, check_file, record_of
from fsdp_qlora.checkpointing.layout import CARD, RESULT
from fsdp_qlora.storage.files import FileRecord, open_own

log = logging.getLogger("fsdp_qlora")

_SAID_FROM = 2**32  # bytes: hashing a whole model takes a minute or more
# Every result has one of these; earlier versions did not write result.json.
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")


def record_result(folder: Path, staged: Iterable[Path] = ()) -> None:
    """Write result.json into a folder that is about to be published.

    Args:
        staged: files that will be added to the folder under their names.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    paths |= {path.name: path for path in staged}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing lets other threads run
        records = dict(zip(paths, pool.map(record_of, paths.values()), strict=True))
    content = {"files": {name: record._asdict() for name, record in sorted(records.items())}}
    (folder / RESULT).write_text(json.dumps(content, indent=2) + "\n")


def result_error(output_dir: Path) -> str | None:
    """How the result in a folder differs from the one that was saved; None if it does not. The card may be edited."""
    try:
        with open(open_own(output_dir / RESULT, 0), "rb") as file:
            content: dict[str, Any] = json.loads(file.read().decode())
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
    except FileNotFoundError:
        return None if _has_weights(output_dir) else f"none of {', '.join(_WEIGHTS)} is there"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{RESULT} cannot be read ({error})"
    if not files or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        return f"{RESULT} names no files of the folder"
    if (size := sum(record.size for record in files.values())) > _SAID_FROM:
        log.info("The %.0f GiB of the result in %s are compared with %s.", size / 2**30, output_dir, RESULT)
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            checked = [name for name in files if name != CARD]
            list(pool.map(lambda name: check_file(output_dir / name, files[name]), checked))
    except DamagedCheckpoint as error:
        return str(error)
    return None


def changed_error(folder: Path, names: Iterable[str]) -> str | None:
    """How files of a result differ from those that were saved; None if they do not, or nothing is known of them."""
    try:
        files = json.loads((folder / RESULT).read_text())["files"]
        for name in names:
            if name in files:
                check_file(folder / name, FileRecord(**files[name]))
    except FileNotFoundError:
        return None
    except DamagedCheckpoint as error:
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{RESULT} cannot be read ({error})"
    return None


def _has_weights(output_dir: Path) -> bool:
    return any((output_dir / name).is_file() and (output_dir / name).stat().st_size for name in _WEIGHTS)
