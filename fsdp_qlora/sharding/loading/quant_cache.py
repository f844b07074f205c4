"""A cache of quantized weights: later starts read a quarter of the bytes and quantize nothing.

An entry is a folder ROOT/KEY with checksums.json and safetensors files of the quantized layers'
whole parameters as `stored_forms` describes them (4-bit ones in bitsandbytes' format, see
bnb_4bit.py). Any number of ranks can read its shards. Unquantized weights are read from the model's
own files. While an entry is written it is ROOT/KEY.writing, and its writer holds the lock
ROOT/KEY.lock, which the system releases when the writer dies. The next start removes unlocked
leftovers.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import shard_rank, shard_size
from fsdp_qlora.model.quantizers.base import QuantizedWeight, packed_forms
from fsdp_qlora.sharding.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import (
    cache_folder,
    file_identity,
    publish_folder,
)
from fsdp_qlora.utils.locks import try_lock
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.safetensors_files import PackedFiles
from fsdp_qlora.utils.text import format_bytes
from fsdp_qlora.utils.verified_files import ChunkChecksums, Damaged

log = logging.getLogger("fsdp_qlora")

CHECKSUMS = "checksums.json"
FORMAT_VERSION = 2  # increase it when the layout, the key or the quantization changes
_PAGE = 4096  # a checksum covers whole pages, in which disks and the page cache work
# Most checksums per tensor. A rank reads up to one additional chunk at each end of its part, so
# with fewer and larger chunks many ranks would read much twice.
_CHUNKS = 128
# Of files that are not identified by a hash: for all files together, and at least for each.
_SAMPLES = 256
_MIN_SAMPLES = 4


def cache_root(option: str) -> Path | None:
    """The cache's folder; None if it is off. option: off, auto (`cache_folder`) or a folder."""
    if option == "off":
        return None
    return cache_folder() / "quantized" if option == "auto" else Path(option).expanduser()


def cache_key(
    layers: Mapping[str, QuantizedWeight],
    weight_files: WeightFiles,
    sources: Mapping[str, str],
    kernels: Iterable[str],
) -> str:
    """The name of an entry: a hash of everything that determines its bytes.

    kernels: `device_kernels` of every rank. Each rank quantizes its part, and kernels may round
    differently.
    """
    origins = {weight: weight_files.origins(sources[weight]) for weight in layers}
    files: set[Path] = set()
    for tensors in origins.values():
        files.update(tensors.values())
    # Hashing whole files would take as long as quantizing them: samples of their bytes are enough
    # to tell one model from another.
    samples = max(_MIN_SAMPLES, _SAMPLES // max(1, len(files)))
    # The text is hashed, so its order is part of the format: a change needs another FORMAT_VERSION.
    identity = {
        "format": FORMAT_VERSION,
        "device": ", ".join(sorted(set(kernels))),
        "files": [file_identity(path, samples=samples) for path in sorted(files)],
        "layers": [
            _layer_identity(weight, layer, list(origins[weight]))
            for weight, layer in layers.items()
        ],
    }
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]


def _layer_identity(weight: str, layer: QuantizedWeight, origins: list[str]) -> list[Any]:
    """List for JSON what determines a layer's bytes, apart from the content of its files."""
    forms = [[suffix, str(form.dtype), form.shape] for suffix, form in layer.stored_forms().items()]
    return [weight, origins, type(layer).__name__, layer.shape, layer.code_settings(), forms]


def device_kernels(device: torch.device) -> str:
    """The name of the device whose kernels quantize on this rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def open_entry(folder: Path) -> WeightFiles:
    """The quantized weights of an entry, which are verified as they are read.

    Raises Damaged. Reading a tensor may raise it, too.
    """
    try:
        tensors = read_description(folder / CHECKSUMS)["tensors"]
        checksums = {name: ChunkChecksums(**fields) for name, fields in tensors.items()}
        entry = WeightFiles(folder, in_bytes=True, checksums=checksums)
        if checksums.keys() != entry.files.keys():
            raise ValueError("its tensors and its checksums do not match")
    except (
        UserError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Damaged(str(error)) from error
    return entry


def _checksums(files: WeightFiles, name: str) -> ChunkChecksums:
    """The checksums of a tensor's chunks, which are whole pages."""
    total = files.shape(name).numel()
    size = max(1, -(-total // (_CHUNKS * _PAGE))) * _PAGE
    return ChunkChecksums.of(files.read_flat(name, 0, total), size)


class Unavailable(Exception):
    """An entry is not written. The message is the reason, as the end of a sentence."""


def write_entry(
    target: Path, layers: Mapping[str, QuantizedWeight], weights: Weights, mesh: DeviceMesh
) -> int:
    """Write the layers, which have been filled from `weights`, as an entry. Returns its bytes.

    Collective over a shard group. Raises Unavailable on every rank, with the reason of the first
    one that fails.
    """
    folder = target.with_name(f"{target.name}.writing")
    rank = shard_rank(mesh)
    forms = {
        name: form
        for weight, layer in layers.items()
        for name, form in packed_forms(weight, layer).items()
    }
    files = PackedFiles(folder, forms)
    # Each `_together` ends with an exchange of errors, so no rank goes on to a step whose files
    # another rank could not make, and all leave at the same point.
    with contextlib.ExitStack() as cleanup:
        with _together(target.parent, mesh):
            if rank == 0:
                _begin(target, files, cleanup)
        with _together(target.parent, mesh):
            for weight, layer in layers.items():
                _write_part(files, weight, layer, weights, mesh)
            files.sync()
        checksums: dict[str, Any] = {}
        # Checksums are of what the files give back, not of what was meant to be written. The ranks
        # share the work of reading.
        with _together(target.parent, mesh):
            written = WeightFiles(folder, in_bytes=True)
            checksums = {
                name: _checksums(written, name)._asdict()
                for name in sorted(forms)[rank :: shard_size(mesh)]
            }
        device = torch.device(mesh.device_type)
        group = mesh["shard"].get_group()
        for part in all_gather_strings(json.dumps(checksums), device, group):
            checksums |= json.loads(part)
        description = {
            "format": FORMAT_VERSION,
            "model": str(weights.files.folder),
            "created": time.strftime("%Y-%m-%d %H:%M:%S"),
            "tensors": checksums,
        }
        with _together(target.parent, mesh):
            if rank == 0:
                # Tensors have been flushed, and the description comes last: a folder with it is
                # whole. A kill before the rename leaves a `.writing` that nobody reads.
                write_description(folder / CHECKSUMS, description)
                publish_folder(folder, target)
    return files.num_bytes


@contextlib.contextmanager
def _together(root: Path, mesh: DeviceMesh) -> Iterator[None]:
    """Raise Unavailable on every rank of a shard group if the block fails on one.

    The block has no collectives: a rank that fails would leave the others waiting in one.
    """
    with raise_on_all_ranks(Unavailable, torch.device(mesh.device_type), mesh["shard"].get_group()):
        try:
            yield
        except UserError as error:
            raise Unavailable(str(error)) from error
        except OSError as error:
            advice = "give another folder with --quant_cache, or off"
            raise Unavailable(
                f"{root} cannot be written ({error.strerror or error}); {advice}"
            ) from error


def _begin(target: Path, files: PackedFiles, cleanup: contextlib.ExitStack) -> None:
    """Lock an entry and create its files, if it does not exist and fits on the disk."""
    lock = try_lock(target)
    if lock is None:
        raise Unavailable("another run is writing it")
    cleanup.callback(lock.release)
    # Between this run's look for an entry and the lock, another run may have come and gone.
    if (target / CHECKSUMS).exists():
        raise Unavailable("another run has just written it")
    # After a success it has another name, and nothing is removed. Callbacks run in reverse, so the
    # lock is released after the files are gone.
    cleanup.callback(shutil.rmtree, files.folder, ignore_errors=True)
    for leftover in target.parent.glob("*.writing"):  # of killed runs
        leftover_lock = try_lock(leftover.with_suffix(""))
        if leftover_lock is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            leftover_lock.release()
    for leftover in (target, files.folder):
        shutil.rmtree(leftover, ignore_errors=True)
    free = free_disk(target.parent)
    size = files.num_bytes
    if free < 2 * size:  # on a full disk the run could not save its result
        raise Unavailable(
            f"it needs twice its size of {format_bytes(size)}, and {target.parent} has "
            f"{format_bytes(free)} free; give another folder with --quant_cache, or off"
        )
    # In their full size, so that all ranks can write their parts at the same time.
    files.folder.mkdir()
    files.create()


def _write_part(
    files: PackedFiles, weight: str, layer: QuantizedWeight, weights: Weights, mesh: DeviceMesh
) -> None:
    """Write this rank's part of a layer. The first rank writes the tensors that every rank has."""
    for suffix in layer.stored_forms():
        start, stop = layer.stored_range(suffix, mesh)
        # Without the padding that FSDP2 wants behind the last rank's rows.
        content = layer.stored_bytes(suffix)[: stop - start].cpu()
        files.write(weight + suffix, start, content)
    if shard_rank(mesh) == 0:
        for suffix, whole in layer.stored_whole(
            weights.files.dtype(weights.sources[weight])
        ).items():
            files.write(weight + suffix, 0, whole)


def load_or_create(
    root: Path,
    layers: Mapping[str, QuantizedWeight],
    weights: Weights,
    load_weights: Callable[..., None],
    ranks: Ranks,
    mesh: DeviceMesh,
) -> None:
    """Fill the model from its entry in the cache, or from its own files, and write an entry then.

    load_weights: the function `load_weights` with all arguments bound except `weights`.
    """
    kernels = all_gather_strings(device_kernels(ranks.device), ranks.device)
    folder = root / cache_key(layers, weights.files, weights.sources, kernels)
    has_entry = os.path.isfile(folder / CHECKSUMS)  # False also if the folder is not readable
    # Without a shared folder, some nodes may not have the entry. Loading from files may be
    # collective, so all ranks take the same way.
    if gather_numbers([has_entry], ranks.device).all() and _load_entry(
        folder, weights, load_weights, ranks
    ):
        return
    load_weights(weights=weights)
    if shard_size(mesh) > ranks.local_world_size:
        log.info(
            "No quantized cache is written: no single machine of this run holds the whole model."
        )
    # otherwise it has a further copy of the model on this machine
    elif ranks.local_rank < shard_size(mesh):
        try:
            size = write_entry(folder, layers, weights, mesh)
        except Unavailable as reason:
            log.warning("No quantized cache is written: %s.", reason)
        else:
            log.debug(
                "Quantized weights were saved for the next start: %s (%s).",
                folder,
                format_bytes(size),
            )


def _load_entry(
    folder: Path, weights: Weights, load_weights: Callable[..., None], ranks: Ranks
) -> bool:
    """Fill the model from an entry. If it is damaged on any rank, remove it and return False."""
    try:
        with raise_on_all_ranks(Damaged, ranks.device):
            entry = open_entry(folder)
            # The entry's tensors come first: bitsandbytes' have the names of the weights in the
            # model.
            sources = dict(weights.sources) | {name: name for name in entry.files}
            entry.borrow(weights.files)
            load_weights(weights=Weights(entry, sources, packed=True))
    except Damaged as error:
        log.warning(
            "The quantized cache %s is damaged (%s). It is rebuilt from the model's own weights.",
            folder,
            error,
        )
        if ranks.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return False
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(folder / CHECKSUMS)  # the time shows when it was last used
    log.debug("  its quantized weights come from the cache, verified: %s", folder)
    return True
