"""A cache of quantized weights on disk: a later start reads a quarter of the bytes and quantizes nothing.

An entry is a folder ROOT/KEY with checksums.json and the quantized layers' whole parameters as given by
`stored_parameters` (4-bit ones in bitsandbytes' format, see bnb_4bit.py), from which any number of ranks reads
its shards. Unquantized weights are read from the model's own files. While an entry is written it is ROOT/KEY.writing,
and its writer holds the lock ROOT/KEY.lock, which the system releases when the writer dies. The next start removes
unlocked leftovers.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.output.text import format_bytes
from fsdp_qlora.quantizers.base import QuantizedWeight, packed_forms
from fsdp_qlora.ranks.distributed import Ranks, first_failure, gather_texts, shard_rank, shard_size
from fsdp_qlora.storage.files import cache_folder, file_identity, free_disk, publish_folder, write_hashed_json
from fsdp_qlora.storage.safetensors_files import PackedFiles

log = logging.getLogger("fsdp_qlora")

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


class Unavailable(Exception):
    """Why an entry is not written, as the end of a sentence."""


class EntryWriter:
    """An unfinished entry. All ranks of a shard group write into it; the first, the leader, completes it."""

    def __init__(self, root: Path, key: str, layers: Mapping[str, QuantizedWeight], mesh: DeviceMesh) -> None:
        self.mesh, self.group, self.leads = mesh, mesh["shard"].get_group(), shard_rank(mesh) == 0
        self.target, self.folder = root / key, root / f"{key}.writing"
        self.layers = layers
        forms = {name: form for weight, layer in layers.items() for name, form in packed_forms(weight, layer).items()}
        self.files = PackedFiles(self.folder, forms)
        self._checksums: dict[str, dict[int, int]] = {}
        self._lock: FileLock | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Create the files. Raises Unavailable on every rank if the leader cannot."""
        if self.leads:
            with self._collecting_failure():
                self._lock = try_lock(self.target)
                if self._lock is None:
                    raise Unavailable("another run is writing it")
                if (self.target / CHECKSUMS).exists():
                    raise Unavailable("another run has just written it")
                shutil.rmtree(self.target, ignore_errors=True)
                remove_leftovers(self.target.parent)
                shutil.rmtree(self.folder, ignore_errors=True)
                self._check_free_disk()
                self.folder.mkdir()
                self.files.create()
        self._stop_if_any_failed()

    def _check_free_disk(self) -> None:
        """Refuse to fill the disk: the run could not save its result."""
        free, size = free_disk(self.target.parent), self.files.num_bytes
        if free < 2 * size:
            raise Unavailable(
                f"it needs {format_bytes(size)} and as much left free after that, and {self.target.parent} has "
                f"{format_bytes(free)} free; give another folder with --quant_cache, or off"
            )

    def keep(self, weight: str, dtype: torch.dtype) -> None:
        """Write this rank's part of a layer that has just been quantized. dtype: of the unquantized weight."""
        if self._failure is not None:
            return
        layer = self.layers[weight]
        with self._collecting_failure():
            for suffix, stored in layer.stored_parameters().items():
                start, stop = layer.stored_range(stored, self.mesh)
                self._write(weight + suffix, start, layer.stored_bytes(stored)[: stop - start].cpu())
            if self.leads:
                for suffix, whole in layer.stored_whole(dtype).items():
                    self._write(weight + suffix, 0, whole)

    def _write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write a part and compute the checksums of the chunks that it contains whole."""
        content = values.reshape(-1).view(torch.uint8)
        total = self.files.forms[name].num_bytes
        size = chunk_bytes(total)
        self.files.write(name, start, content)
        sums = self._checksums.setdefault(name, {})
        for chunk in range(-(-start // size), -(-total // size)):
            begin, stop = chunk * size, min((chunk + 1) * size, total)
            if stop > start + len(content):
                break
            sums[chunk] = zlib.crc32(content[begin - start : stop - start].numpy())  # type: ignore[arg-type]

    def finish(self, description: Mapping[str, Any]) -> None:
        """Publish the entry once every rank's bytes are on disk. Raises Unavailable on every rank if any fails."""
        with self._collecting_failure():
            self.files.sync()
            rank_file = self.folder / f"{shard_rank(self.mesh)}.json"
            rank_file.write_text(json.dumps(self._checksums))
        self._stop_if_any_failed()
        if self.leads:
            with self._collecting_failure():
                self._complete(description)
        self._stop_if_any_failed()

    def _complete(self, description: Mapping[str, Any]) -> None:
        for rank in range(shard_size(self.mesh)):
            rank_file = self.folder / f"{rank}.json"
            for name, sums in json.loads(rank_file.read_text()).items():
                self._checksums.setdefault(name, {}).update({int(chunk): value for chunk, value in sums.items()})
            rank_file.unlink()
        description = {
            **description,
            "headers": {name: hashlib.sha256(header).hexdigest() for name, header in self.files.headers.items()},
            "tensors": {name: self._tensor_checksums(name) for name in self.files.forms},
        }
        write_hashed_json(self.folder / CHECKSUMS, description | {"sha256": description_hash(description)})
        publish_folder(self.folder, self.target)
        shutil.rmtree(quarantine_path(self.target), ignore_errors=True)

    def _tensor_checksums(self, name: str) -> dict[str, Any]:
        """All checksums of a tensor; chunks shared by two ranks are read back from the file."""
        total, sums = self.files.forms[name].num_bytes, self._checksums[name]
        size = chunk_bytes(total)
        for chunk in range(-(-total // size)):
            if chunk not in sums:
                sums[chunk] = zlib.crc32(self.files.read(name, chunk * size, min((chunk + 1) * size, total)))
        return {"chunk": size, "crc32": [sums[chunk] for chunk in sorted(sums)]}

    def close(self) -> None:
        """Close the files; an unfinished entry is removed."""
        self.files.close()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()

    @contextlib.contextmanager
    def _collecting_failure(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self._failure = self._failure or str(error)
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            advice = "give another folder with --quant_cache, or off"
            self._failure = self._failure or f"{self.target.parent} cannot be written ({reason}); {advice}"

    def _stop_if_any_failed(self) -> None:
        if failure := first_failure(self._failure, torch.device(self.mesh.device_type), self.group):
            raise Unavailable(failure)


class QuantCache:
    """One model's entry in the cache, for all ranks of a run."""

    def __init__(
        self,
        root: Path,
        layers: Mapping[str, QuantizedWeight],
        weights: Weights,
        ranks: Ranks,
        mesh: DeviceMesh,
    ) -> None:
        self.layers, self.weights, self.ranks, self.mesh = layers, weights, ranks, mesh
        kernels = gather_texts(device_kernels(ranks.device), ranks.device)
        self.key = cache_key(layers, weights.files, weights.sources, kernels)
        self.folder = root / self.key

    def load_or_create(self, load_weights: Callable[..., None]) -> None:
        """Fill the model from the cache; without an entry, fill it from its own files and write one.

        Args:
            load_weights: `load_weights` with all arguments bound except weights and keep.
        """
        if self._is_everywhere() and self._load_entry(load_weights):
            return
        writer = self._open_writer()
        try:
            keep = functools.partial(self._keep, writer) if writer else None
            load_weights(weights=self.weights, keep=keep)
            if writer:
                self._finish(writer)
        finally:
            if writer:
                writer.close()

    def _is_everywhere(self) -> bool:
        """Whether every rank sees the entry: without a shared folder, some nodes may lack it."""
        is_there = os.path.isfile(self.folder / CHECKSUMS)  # False also where the folder may not be read
        return not first_failure(None if is_there else "absent", self.ranks.device)

    def _load_entry(self, load_weights: Callable[..., None]) -> bool:
        """Read the entry. If any rank finds it damaged, set it aside and return False."""
        failure = None
        try:
            cached = CachedWeights(self.folder, self.weights.files)
            own = {name: name for weight, layer in self.layers.items() for name in packed_forms(weight, layer)}
            if absent := sorted(own.keys() - cached.files.keys()):
                raise DamagedEntry(f"{absent[0]} is not in it")
            load_weights(weights=Weights(cached, {**self.weights.sources, **own}, packed=True))
        except DamagedEntry as error:
            failure = str(error)
        failure = first_failure(failure, self.ranks.device)
        if not failure:
            with contextlib.suppress(OSError):  # a read-only cache
                os.utime(self.folder / CHECKSUMS)  # for `last_used`
            log.info("  its quantized weights come from the cache, verified: %s", self.folder)
            return True
        log.warning(
            "The quantized cache %s is damaged (%s). It is set aside and made again from the model's own weights.",
            self.folder, failure,
        )  # fmt: skip
        if self.ranks.local_rank == 0:
            with contextlib.suppress(OSError):  # another run may have set it aside already
                shutil.rmtree(quarantine_path(self.folder), ignore_errors=True)
                os.rename(self.folder, quarantine_path(self.folder))
        return False

    def _open_writer(self) -> EntryWriter | None:
        if shard_size(self.mesh) > self.ranks.local_world_size:
            log.info("No quantized cache is written: no single machine of this run holds the whole model.")
            return None
        if self.ranks.local_rank >= shard_size(self.mesh):  # holds a second copy of the model on this machine
            return None
        writer = EntryWriter(self.folder.parent, self.key, self.layers, self.mesh)
        try:
            writer.start()
        except Unavailable as reason:
            writer.close()
            log.info("No quantized cache is written: %s.", reason)
            return None
        return writer

    def _keep(self, writer: EntryWriter, weight: str) -> None:
        if weight in self.layers:
            writer.keep(weight, self.weights.files.dtype(self.weights.sources[weight]))

    def _finish(self, writer: EntryWriter) -> None:
        description = {
            "format": FORMAT_VERSION,
            "model": str(self.weights.files.folder),
            "quantizer": next(iter(self.layers.values())).describe_code(),
            "created": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            writer.finish(description)
        except Unavailable as reason:
            log.warning("No quantized cache is written: %s. Training continues without it.", reason)
            return
        log.info(
            "Quantized weights are saved for the next start: %s (%s).",
            self.folder, format_bytes(writer.files.num_bytes),
        )  # fmt: skip
