"""Identifies a file's content without reading all of it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HEAD_BYTES = 2**20  # holds the names, types and shapes of all tensors of a usual file
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint_files(files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes, beginnings and samples of their content.

    Paths and times do not count: a copy on another machine is the same base. Training changes every weight, so the
    samples distinguish a base from a further trained version of it.
    """
    digest = hashlib.sha256()
    for path in sorted(set(files), key=lambda path: path.name):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        _hash_samples(digest, path, head_bytes=_HEAD_BYTES, samples=_SAMPLES)
    return digest.hexdigest()


def file_identity(path: Path, *, samples: int) -> list[object]:
    """Name, size and modification time (ns) of a safetensors file, and a hash of its header and samples.

    A replaced file has another time, or, if the time was preserved (cp -p, rsync), other samples. In the hub's cache a
    file is a link to a blob named by the hash of its content, which is sufficient.
    """
    real = path.resolve()
    stat = real.stat()
    if real.parent.name == "blobs":
        return [path.name, stat.st_size, real.name]
    with real.open("rb") as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
    digest = hashlib.sha256()
    _hash_samples(digest, real, head_bytes=header_bytes, samples=samples)
    return [path.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()]


def _hash_samples(digest: Any, path: Path, *, head_bytes: int, samples: int) -> None:
    """Add to a hash a file's beginning and `samples` pages spread evenly over it."""
    last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        digest.update(file.read(head_bytes))
        for sample in range(samples):
            file.seek(sample * last // (samples - 1))
            digest.update(file.read(_SAMPLE_BYTES))
