"""The quantized weights of a model, kept on disk: a later start reads a quarter of the bytes and quantizes nothing.

An entry is a folder ROOT/KEY: the 4-bit weights as bitsandbytes saves them (see packed.py), whole, so that any
number of ranks reads its shards from them, and checksums.json. What is not quantized is read from the model's own
files. While an entry is written it is ROOT/KEY.writing, and its writer holds the lock ROOT/KEY.lock, which the
system frees when the writer dies: what lies there without a holder is removed by the next start.
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.checkpoint_files import Checkpoint
from fsdp_qlora.distributed import Ranks, shard_rank, shard_size
from fsdp_qlora.errors import UserError
from fsdp_qlora.packed import byte_range, local_bytes, state_name, stored_maps, stored_parameters, write_state
from fsdp_qlora.packed_files import PackedFiles, packed_forms
from fsdp_qlora.quantize import Bnb4bitLinear
from fsdp_qlora.verify import format_bytes

log = logging.getLogger("fsdp_qlora")

FORMAT_VERSION = 1  # raise it when the layout, the key or the quantization changes
_CHECKSUMS = "checksums.json"
_PAGE = 4096  # checksums are of whole pages
_CHUNKS = 128  # at most so many checksums per tensor: a rank reads at most a chunk more at each end of its part
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a file's content, where its name does not say what is in it


class DamagedEntry(UserError):
    """An entry of the cache is not what was written."""


def cache_root(option: str) -> Path | None:
    """The cache's folder. option: off, a folder, or auto (FSDP_QLORA_CACHE, or the user's cache folder)."""
    if option == "off":
        return None
    if option != "auto":
        return Path(option).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FSDP_QLORA_CACHE") or Path(base) / "fsdp_qlora") / "quantized"


# ---- whose weights they are ------------------------------------------------------------------------------


def cache_key(
    layers: Mapping[str, Bnb4bitLinear], checkpoint: Checkpoint, sources: Mapping[str, str], device: torch.device
) -> str:
    """The name of an entry: a hash of everything that decides its bytes.

    That is: the files (see `_file_identity`), which tensor goes into which layer, the layers' shapes and settings,
    and what quantizes: the version of bitsandbytes and the kind of device, whose kernels round differently.
    """
    files = sorted({checkpoint.files[sources[weight]] for weight in layers})
    identity = {
        "format": FORMAT_VERSION,
        "bitsandbytes": bitsandbytes.__version__,
        "device": device.type,
        "files": [_file_identity(path) for path in files],
        "layers": [
            [weight, sources[weight], list(layer.format), layer.double_quant, type(layer).__name__]
            for weight, layer in layers.items()
        ],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]


def _file_identity(path: Path) -> list[object]:
    """What tells a file from every other content it might have, without reading it all.

    In the hub's cache a file is a link to a blob that is named by the hash of its content. Any other file is known
    by its size, its time of change to the nanosecond, its header and 64 samples of its content: a file that was
    replaced differs in its time, and one that was replaced with its time kept (cp -p, rsync) in the samples, since
    training changes every weight.
    """
    real = path.resolve()
    if real.parent.name == "blobs":
        return [path.name, real.stat().st_size, real.name]
    about = real.stat()
    digest = hashlib.sha256()
    with real.open("rb") as file:
        header = file.read(8)
        digest.update(header + file.read(int.from_bytes(header, "little")))
        for sample in range(_SAMPLES):
            file.seek(sample * max(about.st_size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return [path.name, about.st_size, about.st_mtime_ns, digest.hexdigest()]


# ---- reading ---------------------------------------------------------------------------------------------


class CachedWeights(Checkpoint):
    """The 4-bit weights of an entry, checked as they are read, and everything else from the model's own files.

    Raises:
        DamagedEntry: by any of its methods.
    """

    def __init__(self, folder: Path, original: Checkpoint) -> None:
        self.original = original
        self._descriptors = {}
        try:
            about = read_about(folder)
            super().__init__(folder)
            self._checksums: dict[str, dict[str, Any]] = about["tensors"]
            _check_headers(folder, about["headers"])
            if self._checksums.keys() != self.files.keys():
                raise ValueError("its tensors are not those of its checksums")
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedEntry(str(error)) from error
        self._own = dict(self.files)
        self.files = {**original.files, **self._own}

    def shape(self, name: str) -> torch.Size:
        return super().shape(name) if name in self._own else self.original.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return super().dtype(name) if name in self._own else self.original.dtype(name)

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a tensor; of a 4-bit one these are bytes, and their chunks are checked."""
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
            if zlib.crc32(part.numpy()) != expected[chunk]:  # type: ignore[arg-type]
                at = chunk * size
                raise DamagedEntry(f"{self._own[name]}: bytes {at} to {at + len(part)} of {name} have changed")
        return content[start - begin : stop - begin]


def read_about(folder: Path) -> dict[str, Any]:
    """What `_describe` wrote into an entry."""
    about: dict[str, Any] = json.loads((folder / _CHECKSUMS).read_text())
    return about


def _check_headers(folder: Path, headers: Mapping[str, str]) -> None:
    for name, expected in headers.items():
        with (folder / name).open("rb") as file:
            size = file.read(8)
            if hashlib.sha256(size + file.read(int.from_bytes(size, "little"))).hexdigest() != expected:
                raise ValueError(f"the header of {folder / name} has changed")


# ---- writing ---------------------------------------------------------------------------------------------


class _Unavailable(Exception):
    """Why an entry is not written, in words that end a sentence."""


class _Writer:
    """An entry in the making. All ranks of a shard group write into it; their first, the leader, completes it."""

    def __init__(self, root: Path, key: str, layers: Mapping[str, Bnb4bitLinear], mesh: DeviceMesh) -> None:
        self.mesh, self.group, self.leads = mesh, mesh["shard"].get_group(), shard_rank(mesh) == 0
        self.target, self.folder = root / key, root / f"{key}.writing"
        self.layers = layers
        forms = {name: form for weight, layer in layers.items() for name, form in packed_forms(weight, layer).items()}
        self.files = PackedFiles(self.folder, forms)
        self._checksums: dict[str, dict[int, int]] = {}
        self._lock: FileLock | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Make the files. Raises _Unavailable on every rank when the leader cannot."""
        if self.leads:
            with self._collecting_failure():
                self._lock = hold(self.target)
                if self._lock is None:
                    raise _Unavailable("another run is writing it")
                if self.target.exists():
                    raise _Unavailable("another run has just written it")
                _remove_leftovers(self.target.parent)
                shutil.rmtree(self.folder, ignore_errors=True)
                self._check_free_disk()
                self.folder.mkdir()
                self.files.create()
        self._stop_if_any_failed()

    def _check_free_disk(self) -> None:
        """A disk that the cache fills would end the run when it saves its result."""
        free, size = shutil.disk_usage(self.target.parent).free, self.files.num_bytes
        if free < 2 * size:
            raise _Unavailable(
                f"it takes {format_bytes(size)} and leaves as much free, but {self.target.parent} has "
                f"{format_bytes(free)} left; give another folder with --quant_cache, or off"
            )

    def keep(self, weight: str, dtype: torch.dtype) -> None:
        """Write this rank's part of a layer that has just been quantized. dtype: of the weight before."""
        if self._failure is not None:
            return
        layer = self.layers[weight]
        with self._collecting_failure():
            for suffix, stored in stored_parameters(layer).items():
                start, stop = byte_range(layer, stored, self.mesh)
                self._write(weight + suffix, start, local_bytes(layer, stored)[: stop - start].cpu())
            if self.leads:
                for suffix, values in stored_maps(layer).items():
                    self._write(weight + suffix, 0, values)
                state = torch.frombuffer(bytearray(write_state(layer, dtype)), dtype=torch.uint8)
                self._write(state_name(weight, layer.format.quant_type), 0, state)

    def _write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write a part and compute the checksums of the chunks that lie wholly in it."""
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

    def finish(self, about: Mapping[str, Any]) -> None:
        """Put the entry in its place once every rank's bytes are on the disk. Raises _Unavailable on every rank."""
        with self._collecting_failure():
            self.files.sync()
            rank_file = self.folder / f"{shard_rank(self.mesh)}.json"
            rank_file.write_text(json.dumps(self._checksums))
        self._stop_if_any_failed()
        if self.leads:
            with self._collecting_failure():
                self._complete(about)
        self._stop_if_any_failed()

    def _complete(self, about: Mapping[str, Any]) -> None:
        for rank in range(shard_size(self.mesh)):
            rank_file = self.folder / f"{rank}.json"
            for name, sums in json.loads(rank_file.read_text()).items():
                self._checksums.setdefault(name, {}).update({int(chunk): value for chunk, value in sums.items()})
            rank_file.unlink()
        description = {
            **about,
            "headers": {name: hashlib.sha256(header).hexdigest() for name, header in self.files.headers.items()},
            "tensors": {name: self._tensor_checksums(name) for name in self.files.forms},
        }
        with (self.folder / _CHECKSUMS).open("w") as file:
            json.dump(description, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.folder)
        os.rename(self.folder, self.target)
        _sync_folder(self.target.parent)
        shutil.rmtree(_damaged(self.target), ignore_errors=True)

    def _tensor_checksums(self, name: str) -> dict[str, Any]:
        """All of a tensor's; a chunk that two ranks share is read back from the file."""
        total, sums = self.files.forms[name].num_bytes, self._checksums[name]
        size = chunk_bytes(total)
        for chunk in range(-(-total // size)):
            if chunk not in sums:
                sums[chunk] = zlib.crc32(self.files.read(name, chunk * size, min((chunk + 1) * size, total)))
        return {"chunk": size, "crc32": [sums[chunk] for chunk in sorted(sums)]}

    def close(self) -> None:
        """Let go of the files; what was not finished is removed."""
        self.files.close()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()

    @contextlib.contextmanager
    def _collecting_failure(self) -> Iterator[None]:
        try:
            yield
        except _Unavailable as error:
            self._failure = str(error)
        except (OSError, NotImplementedError) as error:
            self._failure = f"{self.target.parent} cannot be written ({getattr(error, 'strerror', None) or error})"

    def _stop_if_any_failed(self) -> None:
        if failures := _from_every_rank(self._failure, self.group):
            raise _Unavailable(failures[0])


def chunk_bytes(num_bytes: int) -> int:
    """Bytes under one checksum in a tensor of `num_bytes`."""
    return max(1, -(-num_bytes // (_CHUNKS * _PAGE))) * _PAGE


def _from_every_rank(message: str | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """The messages of all ranks that have one, on every rank."""
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return [text for text in messages if text is not None]


def hold(target: Path) -> FileLock | None:
    """The lock of an entry; None when another process has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{target}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def _remove_leftovers(root: Path) -> None:
    """Remove what runs were writing when they ended before its end."""
    for folder in root.glob("*.writing"):
        lock = hold(root / folder.stem)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def last_used(folder: Path) -> float:
    """When an entry was last written or read, in seconds since 1970."""
    about = folder / _CHECKSUMS
    return (about if about.is_file() else folder).stat().st_mtime


def _damaged(target: Path) -> Path:
    return target.with_name(f"{target.name}.damaged")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- a run's use of it -----------------------------------------------------------------------------------


class QuantCache:
    """The place of one model's quantized weights in the cache, for all ranks of a run."""

    def __init__(
        self,
        root: Path,
        layers: Mapping[str, Bnb4bitLinear],
        checkpoint: Checkpoint,
        sources: Mapping[str, str],
        ranks: Ranks,
        mesh: DeviceMesh,
    ) -> None:
        self.checkpoint, self.sources, self.layers = checkpoint, sources, layers
        self.ranks, self.mesh = ranks, mesh
        self.key = cache_key(layers, checkpoint, sources, ranks.device)
        self.folder = root / self.key

    def load(self, load_weights: Callable[..., None]) -> None:
        """Fill the model from the cache, else from its own files while the cache is written.

        Args:
            load_weights: `weights.load_weights` with everything given but checkpoint, sources, packed and keep.
        """
        if self._is_everywhere() and self._load_entry(load_weights):
            return
        writer = self._open_writer()
        try:
            keep = functools.partial(self._keep, writer) if writer else None
            load_weights(checkpoint=self.checkpoint, sources=self.sources, packed=False, keep=keep)
            if writer:
                self._finish(writer)
        finally:
            if writer:
                writer.close()

    def _is_everywhere(self) -> bool:
        """Whether every rank sees the entry: without a shared folder, not all nodes need have it."""
        return not _from_every_rank(None if (self.folder / _CHECKSUMS).is_file() else "absent")

    def _load_entry(self, load_weights: Callable[..., None]) -> bool:
        """Read the entry. False when a rank finds it damaged: it is then set aside."""
        failure = None
        try:
            cached = CachedWeights(self.folder, self.checkpoint)
            own = {name: name for weight, layer in self.layers.items() for name in packed_forms(weight, layer)}
            if absent := sorted(own.keys() - cached.files.keys()):
                raise DamagedEntry(f"{absent[0]} is not in it")
            load_weights(checkpoint=cached, sources={**self.sources, **own}, packed=True, keep=None)
        except UserError as error:  # of the model's own files too: reading those again tells
            failure = str(error)
        failures = _from_every_rank(failure)
        if not failures:
            with contextlib.suppress(OSError):  # a cache that may only be read
                os.utime(self.folder / _CHECKSUMS)  # for `last_used`
            log.info("  its quantized weights come from the cache, checked: %s", self.folder)
            return True
        log.warning(
            "The quantized cache %s is damaged (%s). It is set aside, and made again from the model's own weights.",
            self.folder, failures[0],
        )  # fmt: skip
        if self.ranks.local_rank == 0:
            with contextlib.suppress(OSError):  # another run may have done it
                shutil.rmtree(_damaged(self.folder), ignore_errors=True)
                os.rename(self.folder, _damaged(self.folder))
        return False

    def _open_writer(self) -> _Writer | None:
        if shard_size(self.mesh) > self.ranks.local_world_size:
            log.info("No quantized cache is written: no single machine of this run holds the whole model.")
            return None
        if self.ranks.local_rank >= shard_size(self.mesh):  # of a second copy of the model on this machine
            return None
        writer = _Writer(self.folder.parent, self.key, self.layers, self.mesh)
        try:
            writer.start()
        except _Unavailable as reason:
            writer.close()
            log.info("No quantized cache is written: %s.", reason)
            return None
        return writer

    def _keep(self, writer: _Writer, weight: str) -> None:
        if weight in self.layers:
            writer.keep(weight, self.checkpoint.dtype(self.sources[weight]))

    def _finish(self, writer: _Writer) -> None:
        about = {
            "format": FORMAT_VERSION,
            "model": str(self.checkpoint.folder),
            "quantizer": f"{next(iter(self.layers.values())).format.quant_type}"
            + ", double quantization" * any(layer.double_quant for layer in self.layers.values()),
            "created": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        try:
            writer.finish(about)
        except _Unavailable as reason:
            log.warning("No quantized cache is kept: %s. Training goes on without.", reason)
            return
        log.info(
            "Quantized weights are kept for the next start: %s (%s).", self.folder, format_bytes(writer.files.num_bytes)
        )


def open_cache(
    option: str,
    layers: Mapping[str, nn.Module],
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    ranks: Ranks,
    mesh: DeviceMesh,
) -> QuantCache | None:
    """The cache of a model that this run quantizes; None where there is nothing to keep. See `cache_root`."""
    root = cache_root(option)
    packable = {weight: layer for weight, layer in layers.items() if isinstance(layer, Bnb4bitLinear)}
    if root is None or not layers or len(packable) < len(layers):
        return None
    return QuantCache(root, packable, checkpoint, sources, ranks, mesh)
