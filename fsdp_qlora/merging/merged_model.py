"""A merged model, computed weight by weight and a piece at a time."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fsdp_qlora.loading.weight_files import TensorSlice, Weights
from fsdp_qlora.merging.base import OriginalBase, ReadFlat
from fsdp_qlora.merging.changes import Changes
from fsdp_qlora.merging.peft_folder import PeftFolder
from fsdp_qlora.models import has_tied_embeddings
from fsdp_qlora.storage.safetensors_files import TensorForm

_PIECE = 2**23  # weights changed at a time, in float32


@dataclass(frozen=True)
class MergedModel:
    """A base with an adapter's changes.

    weights: of the base. names: the tensors of the base's files that belong to the merged model. parameters: names of
    the model's parameters. dtype: of the merged parameters; None for that of each in the base's files.
    copies: a parameter that the base does not have -> the one it is made from: a head that shared the embeddings.
    is_reduced: the base is one without the adapter's first values, so only what was trained is added (PiSSA, OLoRA).
    """

    weights: Weights
    adapter: PeftFolder
    changes: Changes
    base: OriginalBase
    parameters: Mapping[str, torch.Size]
    names: list[str]
    dtype: torch.dtype | None
    copies: Mapping[str, str]
    is_reduced: bool = False

    def forms(self) -> dict[str, TensorForm]:
        """Every tensor of the merged model's files, in the base's order."""
        forms = {part: form for name in self._order() for part, form in self._forms_of(name)}
        files = self.weights.files
        rest = {name: files.form(name) for name in self.names if name not in forms}
        return {name: forms[name] for name in [*self.names, *forms] if name in forms} | rest

    def files(self) -> dict[str, str]:
        """Tensor of the merged model -> its file's name, as in the base."""
        origin = self.weights.files.files
        found = {name: origin[name].name if name in origin else "" for name in self.forms()}
        for part, source in self.copies.items():
            found[part] = origin[self.weights.sources[source]].name
        only = len(set(found.values())) == 1
        return {name: "model.safetensors" if only else file for name, file in found.items()}

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(tensor of the files, element at which the piece starts, values in the tensor's dtype) of all tensors."""
        forms, done = self.forms(), set()
        for name in self._order():
            for part, start, values in self._changed(name):
                done.add(part)
                yield part, start, values.to(forms[part].dtype)
        for name in forms.keys() - done:
            for start, stop in _spans(forms[name].num_bytes // forms[name].dtype.itemsize, 1):
                yield name, start, self.weights.files.read_flat(name, start, stop)

    def whole(self, name: str) -> torch.Tensor:
        """One of the model's parameters, in the dtype of the merged files."""
        whole = torch.empty(self.shape(name).numel(), dtype=self.dtype or self._own_dtype(name))
        done = 0
        for _, _, values in self._changed(name):
            whole[done : done + len(values)] = values
            done += len(values)
        return whole.view(self.shape(name))

    def _order(self) -> list[str]:
        """The parameters that are computed, in the order of the base's files."""
        files = self.weights.files
        known = [name for name in self.parameters if name in self.weights.sources or name in self.copies]
        return sorted(known, key=lambda name: str(files.files[self._source(name)]))

    def _source(self, name: str) -> str:
        return self.weights.sources[self.copies.get(name, name)]

    def _own_dtype(self, name: str) -> torch.dtype:
        stored = self.weights.files.dtype(self._source(name))
        return stored if stored.is_floating_point else torch.bfloat16  # of weights that are quantized already

    def shape(self, name: str) -> torch.Size:
        """The shape of a merged parameter: embeddings may have been resized."""
        change = self.changes.replaced(name)
        return change.shape if change else self.parameters[name]

    def resized(self, name: str) -> torch.Size | None:
        """The shape of a parameter that is not the base's."""
        return self.shape(name) if self.shape(name) != self.parameters[name] else None

    def _parts(self, name: str) -> list[TensorSlice]:
        """The tensors of the merged files that make up a parameter."""
        whole = TensorSlice(name if name in self.copies else self._source(name), 0, self.shape(name).numel())
        is_new = name in self.copies or self.weights.packed or self.changes.replaced(name)
        return [whole] if is_new else self.weights.files.parts(self._source(name))

    def _forms_of(self, name: str) -> Iterator[tuple[str, TensorForm]]:
        dtype, parts = self.dtype or self._own_dtype(name), self._parts(name)
        for part, _, _ in parts:
            yield (
                part,
                TensorForm(dtype, tuple(self.shape(name) if len(parts) == 1 else self.weights.files.shape(part))),
            )

    def _changed(self, name: str) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(tensor of the files, start, values) of the pieces of one parameter."""
        change, replaced = self.changes.low_rank(name), self.changes.replaced(name)
        if self.is_reduced and change:
            change = change.trained()
        read: ReadFlat
        if replaced:
            read = functools.partial(self.adapter.files.read_flat, replaced.name)
        else:
            read = self.base.open(self.copies.get(name, name))
        columns = self.parameters[name][-1] if self.parameters[name] else 1
        before = 0
        for part, first, last in self._parts(name):
            for start, stop in _spans(last - first, columns):
                values = read(before + start, before + stop)
                if change:
                    rows = values.float().view(-1, columns)
                    values = change.apply(rows, (before + start) // columns).flatten()
                yield part, start, values
            before += last - first


def _spans(count: int, columns: int) -> Iterator[tuple[int, int]]:
    """Pieces of whole rows."""
    size = max(1, _PIECE // columns) * columns
    return ((start, min(start + size, count)) for start in range(0, count, size))


def split_ends(model: PreTrainedModel, changes: Changes) -> dict[str, str]:
    """The head -> the embeddings, where the adapter changes one of these two that share a tensor in the base."""
    if not has_tied_embeddings(model):
        return {}
    ends = {id(model.get_input_embeddings()): "", id(model.get_output_embeddings()): ""}
    for path, module in model.named_modules():
        if id(module) in ends:
            ends[id(module)] = f"{path}.weight"
    embeddings, head = ends.values()
    own = [change.is_copy for name in (embeddings, head) if (change := changes.replaced(name))]
    return {head: embeddings} if any(own) or changes.names(low_rank=True) & {embeddings, head} else {}
