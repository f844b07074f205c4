"""Whether the base model is the one a run was started with, without reading all of it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

_HEAD_BYTES = 2**20  # holds the names, types and shapes of all tensors of a usual file
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint_files(files: Iterable[Path]) -> str:
    """A hash of the files' names and sizes, their beginnings and samples of their content.

    Not of their places or times: a copy on another machine is the same base. Training changes every weight, so the
    samples tell a base from a version of it that was trained further.
    """
    digest = hashlib.sha256()
    for path in sorted(set(files), key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
