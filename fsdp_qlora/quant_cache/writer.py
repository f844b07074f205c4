"""Writes an entry of the cache of quantized weights, with all ranks of a shard group."""

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.output.text import format_bytes
from fsdp_qlora.quant_cache.entries import (
    CHECKSUMS,
    chunk_bytes,
    description_hash,
    quarantine_path,
    remove_leftovers,
    try_lock,
)
from fsdp_qlora.quantizers.base import QuantizedWeight, packed_forms
from fsdp_qlora.ranks.distributed import first_failure, shard_rank, shard_size
from fsdp_qlora.storage.files import free_disk, publish_folder, write_hashed_json
from fsdp_qlora.storage.safetensors_files import PackedFiles


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
