"""Merges an adapter into a base that is published in MXFP4, NVFP4, FP8 or integers.

The merged model has the same format.
"""

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_qlora.export.merge import Merge, MergedModel, spans
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.safetensors_files import TensorForm

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True, kw_only=True)
class RoundedModel(MergedModel):
    """A merged model in the format of the base's files.

    What the adapter changes is rounded to it again.

    raw: the base's files, not decoded. stored: their format.
    """

    keeps_format = True
    raw: WeightFiles
    stored: PublishedFormat

    def forms(self) -> dict[str, TensorForm]:
        # Tensors of the files as they are, in their order. Weights that are stored plain have the
        # merged model's shape, since embeddings may have been resized.
        forms = {name: self.raw.form(name) for name in self.raw.files}
        for name, form in super().forms().items():
            if self._unit(name) == 1:
                forms[name] = form
        return forms

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The pieces of all tensors as `MergedModel` has them, as bytes."""
        forms = self.forms()
        done = set()
        # Only what the adapter changes is decoded and rounded again; all other bytes are copied.
        changed = {*self.changes.layers, *self.changes.replaced, *self.copies}
        for name in self._order():
            if name not in changed:
                continue
            for part, start, merged, _ in self._changed(name):
                # A piece of a weight becomes pieces of several tensors: codes and scales.
                for tensor, first, values in self.weights.files.encode(part, start, merged):
                    done.add(tensor)
                    if values.is_floating_point():
                        values = values.to(forms[tensor].dtype)
                    yield tensor, first * values.itemsize, values.flatten().view(torch.uint8)
        for name in forms.keys() - done:
            for start, stop in spans(self.raw.shape(name).numel(), 1):
                values = self.raw.read_flat(name, start, stop)
                yield name, start * values.itemsize, values.view(torch.uint8)

    def warn(self, folder: Path) -> None:
        """Say how much of the adapter's update the rounded weights of this folder have.

        The folder is complete.
        """
        # What rounding left is known only from the files, whose scales it depends on, too.
        written_files = WeightFiles(folder, self.stored)
        updated = self.changes.layers.keys() - self.changes.replaced.keys()
        for name in updated - self.copies.keys():
            for part, start, merged, base in self._changed(name):
                if base is not None and self._unit(part) > 1:
                    written = written_files.read_flat(part, start, start + len(merged))
                    self.effect.add(base, merged, written)
        log.info("%s", self.effect.describe(self.stored.name))
        self.effect.warn(
            self.stored.name, advice="Leave out --format same, or load the adapter beside the base"
        )

    def _unit(self, part: str) -> int:
        return self.weights.files.unit(part)


def rounded(merge: Merge) -> RoundedModel:
    """The merged model in the format of the base's files.

    Raises UserError if they have none that is written.
    """
    formats = merge.stored.formats if merge.stored else ()
    if merge.stored is None or not all(each.is_written for each in formats):
        stored = merge.stored.name if merge.stored else "16 or 32 bits"
        raise UserError(
            f"--format same: model_name {merge.run.model_name} is stored in {stored}, not in "
            "MXFP4, NVFP4, FP8 or integers of compressed-tensors. Merge without this option."
        )
    # asdict() would copy the tensors inside.
    fields = {
        field.name: getattr(merge.original, field.name)
        for field in dataclasses.fields(merge.original)
    }
    return RoundedModel(**fields, raw=WeightFiles(merge.folder), stored=merge.stored)
