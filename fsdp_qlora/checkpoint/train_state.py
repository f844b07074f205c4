"""Saves trainable parameters and optimizer state to a checkpoint's files, and loads them.

Rank 0 gathers, writes and reads small states (adapters) for all ranks, so no other rank needs
access to the folder. Large states are written by each rank of one copy of the model and read by all
ranks: file i of n holds the rows that `shard_bounds` gives to rank i of n, so any other number of
ranks finds its rows.

An entry of the optimizer's state is stored by its kind:
    rows    a tensor with the local shard's shape: sharded like its parameter
    once    a tensor without dims, such as a step count: the same on all ranks
    number  a plain number: the same on all ranks
    local   any other tensor, such as the scales of 8-bit states: valid for this split only
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_qlora.checkpoint.checkpoint import DamagedCheckpoint
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import (
    gather_rows,
    local_part,
    own_rows,
    shard_bounds,
    shard_rank,
    shard_size,
)
from fsdp_qlora.model.architecture.structure import canonical_name, persistent_buffers
from fsdp_qlora.sharding.optimizer import ShardedOptimizer
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import FileRecord
from fsdp_qlora.utils.safetensors_files import DTYPE_NAMES, DTYPES, TensorForm, write_tensors

# Parameter name -> state key -> description of the stored entry.
_Layout = dict[str, dict[str, dict[str, Any]]]
_PARAMETER = "parameter"  # the key of the parameter itself


class Tensors(NamedTuple):
    """The content of a safetensors file.

    forms: dtype and shape of each tensor. values: the tensors, in that order. They may be computed
    as they are taken, one at a time, so that no rank holds all of them.
    """

    forms: Mapping[str, TensorForm]
    values: Iterable[torch.Tensor]

    def copied(self) -> "Tensors":
        return self._replace(values=list(self.values))


class TrainState:
    """Trainable parameters and optimizer state of one sharded model.

    Args:
        is_large: each rank writes its own rows. Otherwise rank 0 gathers and writes, unless the
            optimizer has entries of kind local.
        beat: called for each tensor written, since a large state takes long.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        mesh: DeviceMesh,
        ranks: Ranks,
        *,
        is_large: bool,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = {
            canonical_name(name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = optimizer
        self.mesh = mesh
        self.ranks = ranks
        self.is_large = is_large
        self.beat = beat

    # --- writing ---

    @property
    def num_bytes(self) -> int:
        """Size of this rank's part in bytes."""
        return sum(
            value.numel() * value.element_size()
            for parameter in self.parameters.values()
            for value in self._local_values(parameter)
        )

    def contents(self) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """The files that this rank writes, by name, and the description that `load` needs.

        Collective. Taking a value copies it to the host, and may be a collective: every rank must
        take all values, in order.
        """
        layout = self._agreed_layout()
        is_sharded = self.is_large or _has_local(layout)
        description = {
            "files": shard_size(self.mesh) if is_sharded else 1,
            "is_sharded": is_sharded,
            "shapes": {name: list(parameter.shape) for name, parameter in self.parameters.items()},
            "layout": layout,
        }
        index = shard_rank(self.mesh) if is_sharded else 0
        values = {
            f"{name}/{key}": self._local_value(name, key, layout[name][key], is_sharded=is_sharded)
            for name, key in _tensors_of_file(layout, index)
        }
        # Lazy: a value is copied, or gathered, when it is taken. The layout is the same on all
        # ranks, so their gathers come in the same order.
        on_host = itertools.starmap(self._on_host, values.values())
        has_replicas = "replicate" in (self.mesh.mesh_dim_names or ())
        is_first_replica = not has_replicas or self.mesh.get_local_rank(0) == 0
        writes = is_first_replica if is_sharded else self.ranks.is_rank_0
        if not writes:
            # Taken and dropped: gathering is a collective, and the writer waits for this rank.
            for _ in on_host:
                pass
            return {}, description
        forms = {}
        for name, (value, num_rows) in values.items():
            shape = tuple(value.shape) if num_rows is None else (num_rows, *value.shape[1:])
            forms[name] = TensorForm(value.dtype, shape)
        return {_file(index): Tensors(forms, on_host)}, description

    def write(self, folder: Path, contents: Mapping[str, Tensors]) -> dict[str, FileRecord]:
        """Write the files from `contents`. All values are taken, even if it raises OSError."""
        return {name: write_tensors(folder / name, *content) for name, content in contents.items()}

    def check_finite(self) -> None:
        """Raise TrainingError on every rank if a parameter or its optimizer state is not finite.

        Collective.
        """
        names = list(self.parameters)
        first = len(names)
        for index, parameter in enumerate(self.parameters.values()):
            values = (value for value in self._local_values(parameter) if value.is_floating_point())
            if first == len(names) and not all(value.isfinite().all() for value in values):
                first = index
        # The first of any rank: a rank sees its own rows only.
        lowest = int(gather_numbers([first], self.ranks.device).min().item())
        if lowest < len(names):
            raise TrainingError(
                f"{names[lowest]} or its optimizer state has values that are not finite, so "
                "nothing is saved. Earlier checkpoints are intact. A lower --lr or --precision "
                "bf16/fp32 may help."
            )

    def _local_values(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """This rank's part of a parameter, and of its optimizer state."""
        for value in (local_part(parameter), *self.optimizer.state_of(parameter).values()):
            if isinstance(value, torch.Tensor):
                yield value

    def _agreed_layout(self) -> _Layout:
        """The entries to store for each parameter, the same on every rank. Collective.

        A rank without rows of a parameter has no state of it, and gets them from the others.
        """
        local: _Layout = {}
        for name, parameter in self.parameters.items():
            shard = local_part(parameter)
            if shard.numel():
                state = {_PARAMETER: shard} | self.optimizer.state_of(parameter)
                local[name] = {key: _describe(value, shard) for key, value in state.items()}
        by_rank: list[_Layout] = [
            json.loads(text) for text in all_gather_strings(json.dumps(local), self.ranks.device)
        ]
        layout: _Layout = {}
        for name in self.parameters:
            described = [ranks_layout[name] for ranks_layout in by_rank if name in ranks_layout]
            layout[name] = described[0]
            # A kind is told by the shape, which on one rank may be the shard's by chance. What the
            # ranks describe differently is valid for this split alone.
            for key in {key for entry in described for key in entry}:
                if any(entry.get(key) != described[0].get(key) for entry in described):
                    layout[name][key] = {"kind": "local"}
        return layout

    def _local_value(
        self, name: str, key: str, entry: Mapping[str, Any], *, is_sharded: bool
    ) -> tuple[torch.Tensor, int | None]:
        """This rank's value of an entry, with 0 rows if it has none; and how many rows to gather.

        The latter is None if nothing is gathered.
        """
        parameter = self.parameters[name]
        value: torch.Tensor | None = local_part(parameter)
        if key != _PARAMETER:
            value = self.optimizer.state_of(parameter).get(key)
        if value is None:
            dims = entry.get("dims", ())
            dtype = DTYPES[entry.get("dtype", "F32")]
            value = local_part(parameter).new_empty((0, *dims), dtype=dtype)
        is_part = not is_sharded and entry["kind"] == "rows" and isinstance(parameter, DTensor)
        return value.detach(), parameter.shape[0] if is_part else None

    def _on_host(self, value: torch.Tensor, num_rows: int | None) -> torch.Tensor:
        self.beat()
        if num_rows is not None:
            value = gather_rows(value, num_rows, self.mesh)
        # A copy also where it is on the CPU: the next step changes parameters in place.
        return value.to("cpu", copy=True)

    # --- reading ---

    def check(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that `load` could not load here, from its description alone.

        Called on every rank.

        Raises:
            UserError: it has other parameters, or requires another number of ranks; the same on
                every rank.
        """
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        _check_shapes(folder, description["shapes"], shapes)
        if _has_local(description["layout"]) and description["files"] != shard_size(self.mesh):
            raise UserError(
                f"{folder} holds optimizer state that can be resumed on {description['files']} "
                f"ranks only, and this run has {shard_size(self.mesh)}. Start "
                f"{description['files']} ranks."
            )

    def load(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Fill parameters and optimizer from a verified checkpoint. Collective.

        Raises:
            UserError: see `check`.
            DamagedCheckpoint: its files have changed since they were verified.
        """
        self.check(folder, description)
        layout = description["layout"]
        num_files = description["files"]
        is_reader = description["is_sharded"] or self.ranks.is_rank_0
        fill = self._fill_from_shards if description["is_sharded"] else self._fill_from_rank_0
        try:
            with torch.no_grad(), contextlib.ExitStack() as opened:
                count = num_files if is_reader else 0
                files = [opened.enter_context(_open_file(folder, index)) for index in range(count)]
                # In the order of the model and of the description, which are the same on all ranks:
                # `fill` may broadcast.
                for name, parameter in self.parameters.items():
                    values = {}
                    for key, entry in layout[name].items():
                        if entry["kind"] == "number":
                            values[key] = entry["value"]
                        else:
                            values[key] = fill(files, name, key, entry)
                    self._put(parameter, values)
        except (FileNotFoundError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{folder} cannot be read ({error})") from error

    def _fill_from_rank_0(
        self, files: Sequence[Any], name: str, key: str, entry: Mapping[str, Any]
    ) -> torch.Tensor:
        device = self.ranks.device
        is_rows = entry["kind"] == "rows"
        # Rank 0 alone has opened the file. The others know dtype and shape from the description,
        # which was sent to them.
        if files:
            whole = files[0].get_tensor(f"{name}/{key}").to(device)
        else:
            num_rows = self.parameters[name].shape[:1] if is_rows else ()
            whole = torch.empty(
                (*num_rows, *entry["dims"]), dtype=DTYPES[entry["dtype"]], device=device
            )
        dist.broadcast(whole, src=0)
        if not is_rows:
            return whole
        start, stop = own_rows(self.parameters[name], self.mesh)
        return whole[start:stop]

    def _fill_from_shards(
        self, files: Sequence[Any], name: str, key: str, entry: Mapping[str, Any]
    ) -> torch.Tensor:
        stored = f"{name}/{key}"
        if entry["kind"] != "rows":
            # `check` has refused local entries of another split; file 0 has what is stored once.
            index = shard_rank(self.mesh) if entry["kind"] == "local" else 0
            value: torch.Tensor = files[index].get_tensor(stored)
            return value
        start, stop = own_rows(self.parameters[name], self.mesh)
        num_rows = self.parameters[name].shape[0]
        parts = []
        for index, file in enumerate(files):
            # The rows of this file that are this rank's; a file is not read for none.
            first, end = shard_bounds(num_rows, rank=index, size=len(files))
            low = max(start, first)
            high = min(stop, end)
            if low < high:
                parts.append(file.get_slice(stored)[low - first : high - first])
        if not parts:
            return torch.empty((0, *entry["dims"]), dtype=DTYPES[entry["dtype"]])
        return torch.cat(parts)

    def _put(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Store the values of a parameter and of its optimizer state. They may be on any device."""
        # In place: FSDP2 has views of this memory, and the optimizer the very tensor.
        local = local_part(parameter)
        if local.numel():
            local.copy_(values.pop(_PARAMETER))
            self.optimizer.set_state(parameter, values)


class StoredValues:
    """The trained values in a checkpoint, for a model without weights. Implements
    `values.Values`.

    Args:
        description: returned by `TrainState.contents`.
        read_frozen: reads a tensor that does not train, by its name.
    Raises:
        UserError: the checkpoint belongs to another model.
    """

    keeps = True

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        description: Mapping[str, Any],
        read_frozen: Callable[[str], torch.Tensor],
    ) -> None:
        named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        _check_shapes(
            folder,
            description["shapes"],
            {name: list(value.shape) for name, value in trained.items()},
        )
        # By identity: callers ask for a tensor of the model, and `==` compares values.
        self._names = {id(parameter): name for name, parameter in named.items()}
        for name, buffer in persistent_buffers(model):
            self._names[id(buffer)] = canonical_name(name)
        self._trained = trained
        self._read = read_frozen
        self._opened = contextlib.ExitStack()
        self._files = [
            self._opened.enter_context(_open_file(folder, index))
            for index in range(description["files"])
        ]
        self.close = self._opened.close

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        name = self._names[id(tensor)]
        if name not in self._trained:
            return self._read(name)
        return torch.cat([file.get_tensor(f"{name}/{_PARAMETER}") for file in self._files])


def _open_file(folder: Path, index: int) -> Any:
    """File `index` of a checkpoint's tensors, for safetensors' safe_open."""
    return safe_open(folder / _file(index), framework="pt")


def _check_shapes(folder: Path, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise UserError if a checkpoint's parameters are not the model's."""
    names = expected.keys() | stored.keys()
    changed = sorted(name for name in names if expected.get(name) != stored.get(name))
    if changed:
        examples = ", ".join(changed[:4]) + (", ..." if len(changed) > 4 else "")
        raise UserError(
            f"{folder} belongs to a model with other trainable parameters: {examples} differ."
        )


def _describe(value: Any, local: torch.Tensor) -> dict[str, Any]:
    """The description of a stored value: its kind; of a tensor also its dtype and dims.

    Dims are without the sharded one, so that ranks with different numbers of rows agree.
    """
    if not isinstance(value, torch.Tensor):
        return {"kind": "number", "value": value}
    dtype = DTYPE_NAMES[value.dtype]
    if value.dim() == 0:
        return {"kind": "once", "dtype": dtype, "dims": []}
    if value.shape == local.shape:
        return {"kind": "rows", "dtype": dtype, "dims": list(value.shape[1:])}
    return {"kind": "local", "dtype": dtype}


def _tensors_of_file(layout: _Layout, index: int) -> Iterator[tuple[str, str]]:
    """(parameter, key) of each tensor in file `index`.

    File 0 alone has the entries of kind once.
    """
    for name, keys in layout.items():
        for key, entry in sorted(keys.items()):
            if entry["kind"] in ("rows", "local") or (entry["kind"] == "once" and index == 0):
                yield name, key


def _has_local(layout: _Layout) -> bool:
    return any(entry["kind"] == "local" for keys in layout.values() for entry in keys.values())


def _file(index: int) -> str:
    return f"state_{index:05d}.safetensors"
