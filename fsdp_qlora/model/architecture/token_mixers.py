"""Layers that mix tokens by a convolution and a state, as Mamba's and linear attention, of documents in one row.

transformers keeps documents apart in them where kernels for GPUs are installed (flash-linear-attention, causal-conv1d,
mamba-ssm). Elsewhere documents are rows of their own inside of such a layer alone, one after another, and those of
about equal length together.

Shapes: hidden states [1, T, H], of all documents.
"""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fsdp_qlora.model.architecture.models import find_blocks

# Of the tokens computed in a group of documents. 16 documents of 20 to 150 tokens are then 6 groups instead of 15, each
# of which decodes the layer's weights and launches its kernels again; more padding costs more than it saves.
_MOST_PADDING = 0.1

# Of a layer's output for a few tokens: rounding stays below, what another document leaves far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# The arguments from `data.micro_batch.describe_documents`.
_DESCRIPTION = {"position_ids", "document_lengths", "document_ends", "own_tokens", "places"}
_DESCRIPTION |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}


class ByDocument:
    """Replaces the forward method of a layer, and computes each document as if it were alone.

    documents: what its block was told of them, empty where rows are padded.
    is_needed: whether the layer itself does not keep documents apart; None until it has been tried.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.own = layer.forward
        self.documents: Mapping[str, Any] = {}
        self.is_needed: bool | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **told: Any) -> Any:
        if not self.documents:
            return self.own(hidden_states, *args, **told)
        has_shared, is_alone = "places" in self.documents, len(self.documents["document_lengths"]) == 1
        if self.is_needed is None and not (has_shared or is_alone or hidden_states.is_meta):
            self.is_needed = self._crosses_documents(hidden_states, *args, **told)
        if self.is_needed is False and not has_shared:
            return self.own(hidden_states, *args, **told)
        return self._each(hidden_states, *args, **told)

    def _each(self, hidden_states: torch.Tensor, *args: Any, **told: Any) -> torch.Tensor:
        others = {name: value for name, value in told.items() if name not in (*_DESCRIPTION, "seq_idx")}
        tokens, places = hidden_states[0], self.documents.get("places")
        if places is not None:
            tokens = tokens.index_select(0, places)
        lengths = list(groups(self.documents["document_lengths"]))
        parts = tokens.split([sum(each) for each in lengths])
        found = []
        for each, part in zip(lengths, parts, strict=True):
            rows = self.own(pad_sequence(part.split(each), batch_first=True), *args, **others)
            if not isinstance(rows, torch.Tensor):
                raise NotImplementedError("a layer that mixes tokens returns more than hidden states")
            # Causal, so nothing of the padding reaches a document.
            sizes = [size for length in each for size in (length, max(each) - length)]
            found += rows.flatten(0, 1).split(sizes)[::2]
        joined = torch.cat(found)
        return (joined if places is None else joined.index_select(0, self.documents["own_tokens"]))[None]

    @torch.no_grad()
    def _crosses_documents(self, hidden_states: torch.Tensor, *args: Any, **told: Any) -> bool:
        """Whether the layer's own code lets a document change another, or refuses several.

        Raises:
            NotImplementedError: nor can it compute them apart.
        """
        try:
            found = self.own(hidden_states, *args, **told)
        except (RuntimeError, TypeError, ValueError):  # transformers raises ValueError, kernels others
            return True
        try:
            alone = self._each(hidden_states, *args, **told).float()
        except (RuntimeError, TypeError, ValueError) as error:  # it takes more that has a value for each token
            raise NotImplementedError(f"a layer with a convolution cannot compute it apart: {error}") from error
        off = (found.float() - alone).norm(dim=-1).max() / alone.norm(dim=-1).mean()
        return not off <= _TOLERANCE[found.dtype]  # also where it is no number


def groups(lengths: list[int]) -> Iterator[list[int]]:
    """Neighbours of about equal length, which make rows of one batch with little padding."""
    group: list[int] = []
    for length in lengths:
        joined = [*group, length]
        if sum(joined) < (1 - _MOST_PADDING) * max(joined) * len(joined):
            yield group
            joined = [length]
        group = joined
    yield group


def has_convolution(module: nn.Module) -> bool:
    """Whether a module itself, and none inside of it, mixes tokens by a convolution."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def keep_documents_apart(model: PreTrainedModel) -> None:
    """Let the layers with a convolution over tokens, inside of decoder blocks, compute each document alone."""
    for block in find_blocks(model):
        found = []
        for module in block.modules():
            if has_convolution(module) and "hidden_states" in inspect.signature(module.forward).parameters:
                module.forward = ByDocument(module)
                found.append(module.forward)
        if found:  # not every block hands on to them what it is told
            block.register_forward_pre_hook(partial(tell, found), with_kwargs=True)


def tell(
    layers: list[ByDocument], _: nn.Module, args: tuple[Any, ...], told: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell a block's layers of the documents, and kernels by `seq_idx`, int32 [1, T], the document of each token."""
    documents = {name: told[name] for name in _DESCRIPTION & told.keys() if "document_lengths" in told}
    for layer in layers:
        layer.documents = documents
    if (bounds := documents.get("cu_seq_lens_q")) is not None:
        starts = torch.zeros(sum(documents["document_lengths"]), dtype=torch.int32, device=bounds.device)
        starts[bounds[1:-1].long()] = 1
        told = {**told, "seq_idx": starts.cumsum(0, dtype=torch.int32)[None]}
    return args, told


def layers_apart(model: nn.Module) -> list[str]:
    """Names of the layers that compute documents apart since their own code does not, each name once."""
    found = ((path, vars(module).get("forward")) for path, module in model.named_modules())
    return [*dict.fromkeys(path.split(".")[-1] for path, own in found if isinstance(own, ByDocument) and own.is_needed)]
