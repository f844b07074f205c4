"""Layers with a convolution and a state, such as Mamba, for documents that are concatenated.

transformers keeps documents apart if GPU kernels are installed (flash-linear-attention,
causal-conv1d, mamba-ssm). Otherwise such a layer, and only it, gets the documents as separate rows,
in batches of about equal length.

If a document lies on several ranks, each rank hands the state behind its tokens to the next rank.
Layers continue from a state that they find in a cache, since a prompt may be computed in parts:
`CarriedState` is that cache.

Shapes: hidden states [1, T, H] of all documents.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fsdp_qlora.distributed.context import ContextGroup, Tied
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.shared_tokens import copy_shared

# Largest share of padding in a group of documents. 16 documents of 20 to 150 tokens are then 6
# groups instead of 15. Each group decodes the layer's weights and launches its kernels again; more
# padding costs more than it saves.
_MAX_PADDING = 0.1

# Relative difference of a layer's output: rounding stays below, the effect of another document is
# far above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# RuntimeErrors that say nothing about documents
_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)
# The arguments from `data.batches.micro_batch.describe_documents`.
DESCRIPTION = {
    "position_ids",
    "context_group",
    "document_lengths",
    "document_ends",
    "own_tokens",
    "own_ends",
    "places",
    "shared_tokens",
    "copies",
}
DESCRIPTION |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}

# transformers' names of the argument for a cache, which differ by model and by version
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
# Packages whose kernels transformers' code of such layers calls, by the names that it imports.
KERNELS = {
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
}


@dataclass
class CarriedState:
    """The cache of a layer for a piece of a document that other ranks have pieces of.

    before, after: whether the rank before and the next one have tokens of the document. trains:
    whether gradients go back.
    initial: memory for the state before the piece, float32; None at a document's start and in
    layers without one. final: the state behind it.
    """

    context: ContextGroup
    before: bool
    after: bool
    trains: bool = False
    initial: torch.Tensor | None = None
    final: torch.Tensor | None = None

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """None, so that a layer computes one token in the same way as several."""

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Memory for the state before the piece, which arrives in `update_conv_state`."""
        # Layers ask for it before they call `update_conv_state`, and read it after that.
        return self.initial

    def update_conv_state(
        self, inputs: torch.Tensor, *_: Any, conv_kernel_size: int, **__: Any
    ) -> torch.Tensor:
        """The convolution's inputs [1, C, L], with the inputs before them that it looks back to."""
        # A convolution of width K looks back to K - 1 tokens.
        length = conv_kernel_size - 1
        if self.before:
            last = inputs.new_empty(*inputs.shape[:2], length)
            inputs = torch.cat([self.context.take_over(last, trains=self.trains), inputs], dim=-1)
        if self.after:
            # Zeros stand before a document that is shorter than that, as the layer pads it itself.
            last = F.pad(inputs, (max(length - inputs.shape[-1], 0), 0))[..., -length:]
            # `Tied` makes the backward pass of what was sent part of that of `inputs`.
            inputs = Tied.apply(inputs, self.context.hand_on(last, trains=self.trains))
        # Behind the convolution's inputs: the rank before sends both in this order.
        if self.initial is not None:
            self.context.take_over(self.initial, trains=self.trains)
        return inputs

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        """Keep the state behind the piece."""
        self.final = self.context.hand_on(state.float(), trains=self.trains) if self.after else None

    # transformers 5.17 asks for the same in another way.
    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.before

    @property
    def layers(self) -> dict[int, Any]:
        states = {"record_past": True, "conv_states": [None], "recurrent_states": [self.initial]}
        # the same for each index, since a cache is made for one layer
        return defaultdict(lambda: SimpleNamespace(**states))


class ByDocument:
    """Replaces the forward method of a layer, and computes each document as if it were alone.

    documents: the block's arguments that describe the documents; empty if rows are padded.
    is_needed: whether the layer's own code mixes documents; None until the first batch of several
        documents, for which the layer runs twice to find out.
    state_shape: of the layer's state, empty without one; None until its first document on several
        ranks.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.layer_forward = layer.forward
        self.state_shape: torch.Size | None = None
        self.documents: Mapping[str, Any] = {}
        self.is_needed: bool | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.documents:
            return self.layer_forward(hidden_states, *args, **kwargs)
        context = self.documents.get("context_group")
        if context:
            return self._forward_part(context, hidden_states, *args, **kwargs)
        lengths = self.documents["document_lengths"]
        has_shared = "places" in self.documents
        is_alone = len(lengths) == 1
        # One document cannot be mixed with others, and tensors on the meta device have no values
        # to compare.
        if self.is_needed is None and not (has_shared or is_alone or hidden_states.is_meta):
            self.is_needed = self._mixes_documents(hidden_states, *args, **kwargs)
        # Documents that share their first tokens are no plain row, which kernels would need.
        if self.is_needed is False and not has_shared:
            return self.layer_forward(hidden_states, *args, **kwargs)
        return self._forward_apart(lengths, hidden_states, *args, **kwargs)

    def _forward_part(
        self, context: ContextGroup, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The tokens of one of the ranks that share a row."""
        assert "places" not in self.documents, "a state of several documents"
        lengths, before, after = context.pieces(self.documents["document_lengths"])
        # The row is a piece that the rank before has begun, whole documents, and a piece that the
        # next rank continues; a single piece may be both, and then counts as the first.
        whole = lengths[before : max(len(lengths) - after, before)]
        first_size = lengths[0] if before else 0
        inner_size = sum(whole)
        last_size = x.shape[1] - first_size - inner_size
        first, inner, last = x.split([first_size, inner_size, last_size], dim=1)
        # Last to first: the next rank waits for the state of the last piece, and this rank may have
        # to wait for that of the first.
        outputs: list[torch.Tensor] = []
        if last_size:
            carried = CarriedState(context, before=False, after=True)
            outputs.append(self._forward_piece(carried, last, *args, **kwargs))
        if whole:
            outputs.append(self._forward_apart(whole, inner, *args, **kwargs))
        if before:
            carried = CarriedState(context, before=True, after=after and len(lengths) == 1)
            outputs.append(self._forward_piece(carried, first, *args, **kwargs))
        return torch.cat(outputs[::-1], dim=1)

    def _forward_piece(
        self, carried: CarriedState, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A piece of a document of which the rank before or the next one has others."""
        forward = partial(self.layer_forward, **_without_documents(kwargs))
        if self.state_shape is None:
            # A rank has to know how large the state is before it receives one. Its own first 64
            # tokens tell, in a group of its own, which sends nothing.
            with torch.no_grad():
                alone = CarriedState(ContextGroup(), before=False, after=True)
                forward(x[:, :64], *args, **_cache_argument(self.layer, alone))
            self.state_shape = torch.Size() if alone.final is None else alone.final.shape
        if carried.before and self.state_shape:
            carried.initial = x.new_empty(self.state_shape, dtype=torch.float32)
        trained = (tensor.requires_grad for tensor in (x, *self.layer.parameters()))
        carried.trains = torch.is_grad_enabled() and any(trained)
        # A layer may compute a token alone as if it had been generated. Padding behind the last
        # token changes no output, and no rank gets the state.
        is_single = x.shape[1] == 1 and not carried.after
        padded = F.pad(x, (0, 0, 0, 1)) if is_single else x
        padded_output = forward(padded, *args, **_cache_argument(self.layer, carried))
        output: torch.Tensor = padded_output[:, : x.shape[1]]
        return output if carried.final is None else Tied.apply(output, carried.final)

    def _forward_apart(
        self, lengths: list[int], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The layer's output [1, T, H], computed in batches of documents as separate rows."""
        kwargs = _without_documents(kwargs)
        places = self.documents.get("places")
        # Documents that share their first tokens each get a copy of them.
        tokens = x[0] if places is None else copy_shared(x[0], self.documents, dim=0)
        grouped = list(groups(lengths))
        parts = tokens.split([sum(group) for group in grouped])
        outputs: list[torch.Tensor] = []
        for group, part in zip(grouped, parts, strict=True):
            batch = pad_sequence(part.split(group), batch_first=True)
            rows = self.layer_forward(batch, *args, **kwargs)
            if not isinstance(rows, torch.Tensor):
                raise NotImplementedError(
                    "a layer that mixes tokens returns more than hidden states"
                )
            # The layer is causal, so padding at the end changes no document. One split, since the
            # gradient of each slice would be as large as the whole tensor.
            sizes: list[int] = []
            for length in group:
                sizes += [length, max(group) - length]
            outputs += rows.flatten(0, 1).split(sizes)[::2]
        joined = torch.cat(outputs)
        if places is not None:
            joined = joined.index_select(0, self.documents["own_tokens"])
        return joined[None]

    @torch.no_grad()
    def _mixes_documents(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        """Whether in the layer's own code documents affect each other, or several are refused.

        Raises:
            NotImplementedError: the layer cannot compute documents as separate rows either.
        """
        try:
            together = self.layer_forward(hidden_states, *args, **kwargs)
        except _FAILURES:
            raise
        # transformers raises ValueError, kernels the others
        except (RuntimeError, TypeError, ValueError):
            return True
        try:
            apart = self._forward_apart(
                self.documents["document_lengths"], hidden_states, *args, **kwargs
            ).float()
        except _FAILURES:
            raise
        # another argument has a value for each token
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotImplementedError(
                f"a layer with a convolution cannot separate documents: {error}"
            ) from error
        # The largest difference of a token, since it may be only a few that documents change.
        difference = (together.float() - apart).norm(dim=-1).max() / apart.norm(dim=-1).mean()
        # `not <=` rather than `>`, so that NaN counts as a difference
        return not difference <= _TOLERANCE[together.dtype]


def _without_documents(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in (*DESCRIPTION, "seq_idx")}


def _cache_argument(layer: nn.Module, cache: CarriedState) -> dict[str, CarriedState]:
    parameters = inspect.signature(type(layer).forward).parameters
    return {name: cache for name in CACHE_ARGUMENTS if name in parameters}


def groups(lengths: list[int]) -> Iterator[list[int]]:
    """Group neighbouring documents of about equal length, for batches with little padding."""
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
    """Replace the forward method of the blocks' layers that convolve tokens by `ByDocument`."""
    for block in find_blocks(model):
        layers = []
        for module in block.modules():
            if not has_convolution(module):
                continue
            if "hidden_states" in inspect.signature(module.forward).parameters:
                module.forward = ByDocument(module)
                layers.append(module.forward)
        # A hook, since not every block passes its arguments on to such layers.
        if layers:
            block.register_forward_pre_hook(partial(pass_documents, layers), with_kwargs=True)


def pass_documents(
    layers: list[ByDocument], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a block's description of the documents to its layers.

    Kernels get it as the argument `seq_idx`, int32 [1, T], the index of each token's document.
    """
    documents: dict[str, Any] = {}
    if "document_lengths" in kwargs:
        documents = {name: kwargs[name] for name in DESCRIPTION & kwargs.keys()}
    for layer in layers:
        layer.documents = documents
    bounds = documents.get("cu_seq_lens_q")
    if bounds is not None:
        # The length from the host, and the bounds as they are: no value of the GPU is waited for.
        num_tokens = sum(documents["document_lengths"])
        starts = torch.zeros(num_tokens, dtype=torch.int32, device=bounds.device)
        starts[bounds[1:-1].long()] = 1
        kwargs = kwargs | {"seq_idx": starts.cumsum(0, dtype=torch.int32)[None]}
    return args, kwargs


def can_continue(layer: nn.Module) -> bool:
    """Whether a layer can continue several tokens from a `CarriedState`; a probe finds the rest."""
    # By the source code, since whether a layer asks a cache for its state depends on its arguments.
    # `update_conv_state` is the call that exchanges states here. A layer with a recurrent state
    # also has to start from it, which kernels of linear attention take as `initial_state`;
    # otherwise the layer uses the state only when it generates a single token.
    source = inspect.getsource(type(layer))
    has_recurrent_state = "recurrent_state" in source
    return "update_conv_state" in source and (not has_recurrent_state or "initial_state" in source)


def missing_kernels(model: nn.Module) -> list[str]:
    """The packages that are not installed, whose kernels the layers of a model would use."""
    # transformers' modules name in a string each package whose kernels they would import.
    mixers = {type(module).__module__ for module in model.modules() if has_convolution(module)}
    source = "".join(inspect.getsource(sys.modules[name]) for name in mixers)
    return [
        package
        for name, package in KERNELS.items()
        if f'"{name}"' in source and find_spec(name) is None
    ]


def layers_apart(model: nn.Module) -> list[str]:
    """The names of the layers for which `ByDocument` is needed, each name once."""
    names: list[str] = []
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        name = path.split(".")[-1]
        if isinstance(forward, ByDocument) and forward.is_needed and name not in names:
            names.append(name)
    return names
