"""Merges an adapter that was trained merge-aware: the weights that its run computed with.

They are rounded by the layers of the run, from the codes in the base's files, and their bytes
replace the base's.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.export.changes import LowRankUpdate
from fsdp_qlora.export.merge import Merge, MergedModel, quantized_model, spans
from fsdp_qlora.model.quantizers.base import QuantizedExperts
from fsdp_qlora.model.quantizers.rounded_experts import ExpertsUpdate, round_experts
from fsdp_qlora.model.quantizers.rounded_weight import Update, rounded_plain
from fsdp_qlora.sharding.loading.load_weights import (
    load_quantized,
    match_tensors,
    quantized_layers,
)
from fsdp_qlora.sharding.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import DTYPES, TensorForm

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True, kw_only=True)
class ModelAsTrained(MergedModel):
    """A merged model in the format of the base's files, with the bits of the training.

    raw: the base's files as they are. kept: the same for quantized layers. layers: weight -> its
    layer on the meta device. stored_names: name of a tensor in `kept` -> in `raw`.
    """

    keeps_format = True
    raw: WeightFiles
    kept: Weights
    layers: Mapping[str, Any]
    stored_names: Mapping[str, str]
    mesh: DeviceMesh
    device: torch.device

    def forms(self) -> dict[str, TensorForm]:
        forms: dict[str, TensorForm] = {}
        for file in dict.fromkeys(self.raw.files.values()):
            with safe_open(file, framework="pt") as content:
                names = content.keys()
                for name in names:
                    part = content.get_slice(name)
                    forms[name] = TensorForm(DTYPES[part.get_dtype()], tuple(part.get_shape()))
        return {name: forms[name] for name in self.raw.files}

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The pieces of all tensors as `MergedModel` has them, as bytes."""
        forms = self.forms()
        done = set()
        for name in self._order():
            if name not in self.changes.layers:
                continue
            rounded = self._rounded if name in self.layers else self._rounded_plain
            for tensor, start, content in rounded(name, forms):
                done.add(tensor)
                yield tensor, start, content
        for name in forms.keys() - done:
            for start, stop in spans(self.raw.shape(name).numel(), 1):
                values = self.raw.read_flat(name, start, stop)
                yield name, start * values.itemsize, values.view(torch.uint8)

    def _rounded(
        self, name: str, forms: Mapping[str, TensorForm]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The pieces of a weight's codes and statistics, as bytes of the tensors in the files."""
        # Memory for one weight at a time.
        layer = self.layers[name]
        layer.to_empty(device=self.device)
        load_quantized(name, layer, self.kept, self.mesh, self.device)
        layer.store(_round(layer, self._change(name), self.device))
        for suffix, form in layer.stored_forms().items():
            content = layer.stored_bytes(suffix)[: form.num_bytes].cpu()
            done = 0
            for tensor, start, stop in self.kept.files.parts(self.kept.sources[name + suffix]):
                stored = self.stored_names[tensor]
                piece = content[done : done + stop - start]
                done += stop - start
                dtype = forms[stored].dtype
                if suffix == ".scale" and form.dtype != torch.uint8 and dtype != form.dtype:
                    # Kept in float32, and in fewer bits in the files, which they fit.
                    start = start // form.dtype.itemsize * dtype.itemsize
                    piece = piece.view(form.dtype).to(dtype).view(torch.uint8)
                yield stored, start, piece
        layer.to("meta")

    def _rounded_plain(
        self, name: str, forms: Mapping[str, TensorForm]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The same of a weight that is not quantized in the files."""
        files = self.kept.files
        source = self.kept.sources[name]
        shape = files.shape(source)
        weight = files.read_rows(source, 0, shape[0]).to(self.device)
        update = _update_of(self._change(name), self.device)
        rounded = rounded_plain(weight, update, weight.dtype).cpu().flatten()
        done = 0
        for tensor, start, stop in files.parts(source):
            piece = rounded[done : done + stop - start]
            done += stop - start
            yield self.stored_names[tensor], start * piece.itemsize, piece.view(torch.uint8)

    def _change(self, name: str) -> LowRankUpdate:
        change = self.changes.update(name)
        assert isinstance(change, LowRankUpdate)
        return change

    def warn(self, folder: Path) -> None:
        log.info("Rounded as in training: the weights are those that the run evaluated.")


@torch.no_grad()
def _round(layer: Any, change: LowRankUpdate, device: torch.device) -> Any:
    """The tensors of a layer after rounding it with its update, as in training."""
    if not isinstance(layer, QuantizedExperts):
        return layer.rounded(_update_of(change, device), layer.tensors())
    update = ExpertsUpdate(change.left.to(device), change.right.to(device), change.scaling)
    if layer.is_swapped:
        update = update.transposed()
    return round_experts(layer, range(layer.shape[0]), update, layer.tensors())


def _update_of(change: LowRankUpdate, device: torch.device) -> Update:
    """The update of a linear layer's weight."""
    [lora_B] = change.left.to(device)
    [lora_A] = change.right.to(device)
    return Update(lora_A, lora_B, change.scaling)


def as_trained(merge: Merge, mesh: DeviceMesh, device: torch.device) -> ModelAsTrained:
    """The merged model of an adapter that was trained merge-aware.

    Args:
        mesh: of this one process.
    Raises:
        UserError: the base is not in the format of the training.
    """
    run = merge.run
    stored = merge.stored
    if stored is None or not stored.is_kept("bnb_4bit", run.quant_type):
        raise UserError(
            f"{merge.adapter.path} was trained merge-aware, for a base in MXFP4, NVFP4, FP8 or "
            f"bitsandbytes' 4 bits, and model_name {run.model_name} is not in one. Give the base "
            "of the training."
        )
    quantized = quantized_model(merge.config, run, stored)
    files = WeightFiles(merge.folder, packed=stored)
    kept = match_tensors(quantized, files, packed=True)
    raw = WeightFiles(merge.folder)
    named = {stored.name_here(name): name for name in raw.files}
    # asdict() would copy the tensors inside.
    fields = {
        field.name: getattr(merge.original, field.name)
        for field in dataclasses.fields(merge.original)
    }
    return ModelAsTrained(
        **fields,
        raw=raw,
        kept=kept,
        layers=quantized_layers(quantized),
        stored_names={here: name for here, name in named.items() if here},
        mesh=mesh,
        device=device,
    )
