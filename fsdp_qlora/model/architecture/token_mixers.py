"""Keeps the documents of a row apart in layers with a convolution and a state, such as Mamba and linear attention.

transformers does it if GPU kernels are installed (flash-linear-attention, causal-conv1d, mamba-ssm). Otherwise such a
layer, and only it, gets the documents as separate rows, in batches of about equal length.

Shapes: hidden states [1, T, H] of all documents.
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

# Largest share of padding in a group of documents. 16 documents of 20 to 150 tokens are then 6 groups instead of 15.
# Each group decodes the layer's weights and launches its kernels again; more padding costs more than it saves.
_MAX_PADDING = 0.1

# Relative difference of a layer's output: rounding stays below, the effect of another document is far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors that say nothing about documents
# The arguments from `data.batches.micro_batch.describe_documents`.
_DESCRIPTION = {"position_ids", "document_lengths", "document_ends", "own_tokens", "places"}
_DESCRIPTION |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}


class ByDocument:
    """Replaces the forward method of a layer, and computes each document as if it were alone.

    documents: the block's arguments that describe the documents; empty if rows are padded.
    is_needed: whether the layer's own code mixes documents; None until the first batch of several documents, for which
        the layer runs twice to find out.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer_forward = layer.forward
        self.documents: Mapping[str, Any] = {}
        self.is_needed: bool | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.documents:
            return self.layer_forward(hidden_states, *args, **kwargs)
        has_shared, is_alone = "places" in self.documents, len(self.documents["document_lengths"]) == 1
        if self.is_needed is None and not (has_shared or is_alone or hidden_states.is_meta):
            self.is_needed = self._mixes_documents(hidden_states, *args, **kwargs)
        if self.is_needed is False and not has_shared:
            return self.layer_forward(hidden_states, *args, **kwargs)
        return self._forward_apart(hidden_states, *args, **kwargs)

    def _forward_apart(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = {name: value for name, value in kwargs.items() if name not in (*_DESCRIPTION, "seq_idx")}
        tokens, places = hidden_states[0], self.documents.get("places")
        if places is not None:
            tokens = tokens.index_select(0, places)
        lengths_of_groups = list(groups(self.documents["document_lengths"]))
        outputs: list[torch.Tensor] = []
        for lengths, part in zip(lengths_of_groups, tokens.split(list(map(sum, lengths_of_groups))), strict=True):
            rows = self.layer_forward(pad_sequence(part.split(lengths), batch_first=True), *args, **kwargs)
            if not isinstance(rows, torch.Tensor):
                raise NotImplementedError("a layer that mixes tokens returns more than hidden states")
            # The layer is causal, so padding at the end changes no document.
            sizes = [size for length in lengths for size in (length, max(lengths) - length)]
            outputs += rows.flatten(0, 1).split(sizes)[::2]
        joined = torch.cat(outputs)
        return (joined if places is None else joined.index_select(0, self.documents["own_tokens"]))[None]

    @torch.no_grad()
    def _mixes_documents(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        """Whether in the layer's own code a document changes another one, or several are refused.

        Raises:
            NotImplementedError: the layer cannot compute documents as separate rows either.
        """
        try:
            together = self.layer_forward(hidden_states, *args, **kwargs)
        except _FAILURES:
            raise
        except (RuntimeError, TypeError, ValueError):  # transformers raises ValueError, kernels the others
            return True
        try:
            apart = self._forward_apart(hidden_states, *args, **kwargs).float()
        except _FAILURES:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # another argument has a value for each token
            raise NotImplementedError(f"a layer with a convolution cannot separate documents: {error}") from error
        difference = (together.float() - apart).norm(dim=-1).max() / apart.norm(dim=-1).mean()
        return not difference <= _TOLERANCE[together.dtype]  # True for NaN


def groups(lengths: list[int]) -> Iterator[list[int]]:
    """Group neighbouring documents of about equal length, so that a padded batch of a group has little padding."""
    group: list[int] = []
    for length in lengths:
        joined = [*group, length]
        if sum(joined) < (1 - _MAX_PADDING) * max(joined) * len(joined):
            yield group
            joined = [length]
        group = joined
    yield group


def has_convolution(module: nn.Module) -> bool:
    """Whether a module has a convolution over tokens as a direct child."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def keep_documents_apart(model: PreTrainedModel) -> None:
    """Replace the forward methods of layers with a convolution over tokens in decoder blocks by `ByDocument`."""
    for block in find_blocks(model):
        layers = []
        for module in block.modules():
            if has_convolution(module) and "hidden_states" in inspect.signature(module.forward).parameters:
                module.forward = ByDocument(module)
                layers.append(module.forward)
        if layers:  # a hook, since not every block passes its arguments on to them
            block.register_forward_pre_hook(partial(pass_documents, layers), with_kwargs=True)


def pass_documents(
    layers: list[ByDocument], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a block's description of the documents to its layers.

    Kernels get it as the argument `seq_idx`, int32 [1, T], the index of each token's document.
    """
    documents = {name: kwargs[name] for name in _DESCRIPTION & kwargs.keys() if "document_lengths" in kwargs}
    for layer in layers:
        layer.documents = documents
    if (bounds := documents.get("cu_seq_lens_q")) is not None:
        starts = torch.zeros(sum(documents["document_lengths"]), dtype=torch.int32, device=bounds.device)
        starts[bounds[1:-1].long()] = 1
        kwargs = {**kwargs, "seq_idx": starts.cumsum(0, dtype=torch.int32)[None]}
    return args, kwargs


def layers_apart(model: nn.Module) -> list[str]:
    """The names of the layers for which `ByDocument` is needed, each name once."""
    forwards = {path: vars(module).get("forward") for path, module in model.named_modules()}
    needed = [path for path, layer in forwards.items() if isinstance(layer, ByDocument) and layer.is_needed]
    return [*dict.fromkeys(path.split(".")[-1] for path in needed)]
