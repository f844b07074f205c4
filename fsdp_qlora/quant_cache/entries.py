"""Entries of the cache of quantized weights: their folders, locks and keys, and reading them with checksums."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import WeightFiles
from fsdp_qlora.quantizers.base import QuantizedWeight
from fsdp_qlora.storage.files import cache_folder
from fsdp_qlora.storage.fingerprint import file_identity

CHECKSUMS = "checksums.json"
FORMAT_VERSION = 2  # raise it when the layout, the key or the quantization changes
_PAGE = 4096  # a checksum covers whole pages
_CHUNKS = 128  # most checksums per tensor: a rank reads at most one more chunk at each end of its part
# Samples of content for files not identified by a hash: for all files together, and at least for each.
_SAMPLES, _MIN_SAMPLES = 256, 4


def cache_root(option: str) -> Path | None:
    """The cache's folder, None if off. option: off, a folder, or auto (see `cache_folder`)."""
    if option == "off":
        return None
    if option != "auto":
        return Path(option).expanduser()
    return cache_folder() / "quantized"


def read_description(folder: Path) -> dict[str, Any]:
    """The description of an entry, as its writer left it. Raises ValueError if it has changed."""
    description = json.loads((folder / CHECKSUMS).read_bytes())
    if not isinstance(description, dict) or description.pop("sha256", None) != description_hash(description):
        raise ValueError(f"{folder / CHECKSUMS} has changed")
    return description


def description_hash(description: Mapping[str, Any]) -> str:
    """The hash that verifies an entry's description, which in turn verifies all else."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def last_used(folder: Path) -> float:
    """When an entry was last written or read, in seconds since 1970."""
    description = folder / CHECKSUMS
    return (description if description.is_file() else folder).stat().st_mtime


def quarantine_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.damaged")


def try_lock(target: Path) -> FileLock | None:
    """The lock of an entry; None when another process has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def remove_leftovers(root: Path) -> None:
    """Remove entries that runs left unfinished."""
    for folder in root.glob("*.writing"):
        lock = try_lock(root / folder.stem)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


class DamagedEntry(UserError):
    """An entry of the cache has changed since it was written."""


def cache_key(
    layers: Mapping[str, QuantizedWeight], weight_files: WeightFiles, sources: Mapping[str, str], kernels: Iterable[str]
) -> str:
    """The name of an entry: a hash of everything that determines its bytes.

    That is: the files (see `file_identity`), the tensors of each layer, the layers' shapes and settings, the
    library's version, and the devices, whose kernels may round differently.

    Args:
        kernels: `device_kernels` of every rank: each quantizes its part, and all must compute the same key.
    """
    origins = {weight: weight_files.origins(sources[weight]) for weight in layers}
    files = sorted({file for tensors in origins.values() for file in tensors.values()})
    identity = {
        "format": FORMAT_VERSION,
        "device": ", ".join(sorted(set(kernels))),
        "files": [file_identity(path, samples=max(_MIN_SAMPLES, _SAMPLES // len(files))) for path in files],
        "layers": [
            [weight, list(origins[weight]), type(layer).__name__, layer.shape, layer.code_settings(), _stored(layer)]
            for weight, layer in layers.items()
        ],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]


def _stored(layer: QuantizedWeight) -> list[list[object]]:
    return [[suffix, str(stored.form.dtype), stored.form.shape] for suffix, stored in layer.stored_parameters().items()]


def device_kernels(device: torch.device) -> str:
    """The device whose kernels quantize on this rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


class CachedWeights(WeightFiles):
    """The quantized weights of an entry, verified as they are read, and all others from the model's own files.

    Raises:
        DamagedEntry: from any method.
    """

    def __init__(self, folder: Path, original: WeightFiles) -> None:
        self.original = original
        self._descriptors = {}
        try:
            description = read_description(folder)
            super().__init__(folder, as_bytes=True)
            self._checksums: dict[str, dict[str, Any]] = description["tensors"]
            _check_headers(folder, description["headers"])
            if self._checksums.keys() != self.files.keys():
                raise ValueError("its tensors and its checksums do not match")
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedEntry(str(error)) from error
        self._own = dict(self.files)
        self.files = {**original.files, **self._own}

    def shape(self, name: str) -> torch.Size:
        return super().shape(name) if name in self._own else self.original.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return super().dtype(name) if name in self._own else self.original.dtype(name)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor; for the entry's tensors these are bytes, with verified checksums."""
        if name not in self._own:
            return self.original.read_flat(name, start, stop)
        if start == stop:
            return super().read_flat(name, start, stop)
        size, expected = self._checksums[name]["chunk"], self._checksums[name]["crc32"]
        first, last = start // size, -(-stop // size)
        begin, end = first * size, min(last * size, self.shape(name).numel())
        try:
            content = super().read_flat(name, begin, end)
        except UserError as error:
            raise DamagedEntry(str(error)) from error
        for chunk, part in enumerate(content.split(size), first):
            if zlib.crc32(part.numpy()) != expected[chunk]:
                at = chunk * size
                raise DamagedEntry(f"{self._own[name]}: bytes {at} to {at + len(part)} of {name} have changed")
        return content[start - begin : stop - begin]


def _check_headers(folder: Path, headers: Mapping[str, str]) -> None:
    for name, expected in headers.items():
        with (folder / name).open("rb") as file:
            size = file.read(8)
            if hashlib.sha256(size + file.read(int.from_bytes(size, "little"))).hexdigest() != expected:
                raise ValueError(f"the header of {folder / name} has changed")


def chunk_bytes(num_bytes: int) -> int:
    """Bytes under one checksum in a tensor of `num_bytes`."""
    return max(1, -(-num_bytes // (_CHUNKS * _PAGE))) * _PAGE
