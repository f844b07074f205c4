"""A cache of quantized weights on disk: a later start reads a quarter of the bytes and quantizes nothing.

An entry is a folder ROOT/KEY with checksums.json and the quantized layers' whole parameters as given by
`stored_parameters` (4-bit ones in bitsandbytes' format, see bnb_4bit_format.py), from which any number of ranks reads
its shards. Unquantized weights are read from the model's own files. While an entry is written it is ROOT/KEY.writing,
and its writer holds the lock ROOT/KEY.lock, which the system releases when the writer dies. The next start removes
unlocked leftovers.
"""

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.loading.weight_files import Weights
from fsdp_qlora.output.text import format_bytes
from fsdp_qlora.quant_cache.entries import (
    CHECKSUMS,
    FORMAT_VERSION,
    CachedWeights,
    DamagedEntry,
    cache_key,
    cache_root,
    device_kernels,
    quarantine_path,
)
from fsdp_qlora.quant_cache.writer import EntryWriter, Unavailable
from fsdp_qlora.quantizers.base import QuantizedWeight, packed_forms
from fsdp_qlora.ranks.distributed import Ranks, first_failure, gather_texts, shard_size

log = logging.getLogger("fsdp_qlora")


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
        return not first_failure(None if _is_there(self.folder / CHECKSUMS) else "absent", self.ranks.device)

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


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be read
        return False


def open_cache(
    option: str,
    layers: Mapping[str, QuantizedWeight],
    weights: Weights,
    ranks: Ranks,
    mesh: DeviceMesh,
) -> QuantCache | None:
    """The cache of a model that this run quantizes; None if it is off or nothing is quantized. See `cache_root`."""
    root = cache_root(option)
    if root is None or not layers:
        return None
    return QuantCache(root, layers, weights, ranks, mesh)
