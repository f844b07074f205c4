"""Merges an adapter into a base that is published in MXFP4, NVFP4 or FP8, as a model in the same format."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_qlora.export.merge import Merge, MergedModel, spans, write_merged
from fsdp_qlora.model.quantizers.packed_format import BITSANDBYTES, INTEGERS
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True, kw_only=True)
class RoundedModel(MergedModel):
    """A merged model in the format of the base's files, to which what the adapter changes is rounded again.

    raw: the base's files, not decoded.
    """

    keeps_format = True
    raw: WeightFiles

    def forms(self) -> dict[str, TensorForm]:
        plain = {name: form for name, form in super().forms().items() if self._unit(name) == 1}
        return {name: self.raw.form(name) for name in self.raw.files} | plain

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """As in `MergedModel`, as bytes."""
        forms, done = self.forms(), set()
        changed = self.changes.layers.keys() | self.changes.replaced.keys() | self.copies.keys()
        for name in filter(changed.__contains__, self._order()):
            for part, start, merged in self._changed(name):
                for tensor, first, values in self.weights.files.encode(part, start, merged):
                    done.add(tensor)
                    values = values.to(forms[tensor].dtype) if values.is_floating_point() else values
                    yield tensor, first * values.itemsize, values.flatten().view(torch.uint8)
        for name in forms.keys() - done:
            for start, stop in spans(self.raw.shape(name).numel(), 1):
                values = self.raw.read_flat(name, start, stop)
                yield name, start * values.itemsize, values.view(torch.uint8)

    def effect_left(self, written_files: WeightFiles) -> tuple[float, float]:
        """The share of the adapter's update u that the written weights have, and what rounding adds to it.

        Returns:
            <r, u> / <u, u> for the difference r of the written weights from the base's, and the length of the rest of
            r, which is orthogonal to u, divided by that of u. Over all rounded weights.
        """
        sums = torch.zeros(3, dtype=torch.float64)
        for name in self.changes.layers.keys() - self.changes.replaced.keys() - self.copies.keys():
            for part, start, merged in self._changed(name):
                if self._unit(part) > 1:
                    span = (part, start, start + len(merged))
                    base, written = (files.read_flat(*span).float() for files in (self.weights.files, written_files))
                    u, r = merged - base, written - base
                    sums += torch.stack([u @ u, r @ u, r @ r])
        of_update, along, of_difference = sums.tolist()
        share = along / (of_update or 1)
        return share, math.sqrt(max(of_difference / (of_update or 1) - share**2, 0))

    def _unit(self, part: str) -> int:
        return self.weights.files.unit(part)


def rounded(merge: Merge) -> RoundedModel:
    """The merged model in the format of the base's files. Raises UserError if they have none that is written."""
    if merge.stored is None or merge.stored.quantizer in (INTEGERS, BITSANDBYTES):
        stored = merge.stored.name if merge.stored else "16 or 32 bits"
        raise UserError(
            f"--format same: model_name {merge.run.model_name} is stored in {stored}, not in MXFP4, NVFP4 or FP8. "
            "Merge without this option."
        )
    fields = {field.name: getattr(merge.original, field.name) for field in dataclasses.fields(merge.original)}
    return RoundedModel(**fields, raw=WeightFiles(merge.folder))


def write_rounded(merge: Merge, model: RoundedModel, out: Path) -> None:
    """Write the folder and say what rounding has left of the adapter."""
    assert merge.stored is not None
    write_merged(merge, model, out)
    share, rest = model.effect_left(WeightFiles(out, merge.stored))
    log.info(
        "Rounded to %s: %.1f%% of the adapter's update is left, and rounding adds %.2f times its length.",
        merge.stored.name, 100 * share, rest,
    )  # fmt: skip
