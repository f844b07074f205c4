"""The forward passes of a model that answers prompts: one over the prompts, then one a token.

A prompt with several answers is computed once, and its keys and values are copied for each of them.

Shapes: P distinct prompts; B answers; T tokens of the longest prompt; V tokens of the vocabulary.
"""

import contextlib
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.sharding.vocabulary import shared_head_of
from fsdp_qlora.training.generation.model_cache import (
    cache_argument,
    is_filled,
    make_roomy,
    shares_prompts,
    static_cache,
)
from fsdp_qlora.training.generation.prompt_images import NONE_SHOWN, ShownImages
from fsdp_qlora.training.generation.token_graphs import TokenGraphs


class Batch(NamedTuple):
    """The distinct prompts of answers, and the place among them of each answer's prompt."""

    prompts: list[tuple[int, ...]]
    places: list[int]
    images: Sequence[RowImages] = ()
    """The images of each prompt; empty if none has any."""

    @property
    def has_images(self) -> bool:
        return any(map(len, self.images))

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        *,
        shares_prompts: bool,
        images: Sequence[RowImages] = (),
    ) -> "Batch":
        """Find prompts of equal tokens and images.

        Args:
            shares_prompts: if False, each answer has a prompt of its own.
            images: of each prompt; empty if none has any.
        """
        all_prompts = [tuple(prompt) for prompt in prompts]
        if not shares_prompts:
            return cls(all_prompts, [*range(len(all_prompts))], images)
        # All images of one size have the same tokens.
        shown = [each.names.tobytes() for each in images] or [b""] * len(all_prompts)
        keys = [*zip(all_prompts, shown, strict=True)]
        distinct = [*dict.fromkeys(keys)]
        place_of = {key: place for place, key in enumerate(distinct)}
        places = [place_of[key] for key in keys]
        # Equal keys have equal images, so any of theirs will do.
        image_of = dict(zip(places, images, strict=False))
        own_images = [image_of[place] for place in range(len(distinct))] if images else ()
        return cls([prompt for prompt, _ in distinct], places, own_images)


class Passes:
    """The passes of one batch. All ranks that share weights call them equally often.

    Args:
        counts: distinct prompts and answers of each of `sharing_ranks`.
        most: tokens of an answer, for passes by graphs; None for passes without. The model must
            allow them (`why_not_graphed`).
        shown: how the model computes images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        device: torch.device,
        counts: Sequence[tuple[int, int]],
        most: int | None = None,
        shown: ShownImages = NONE_SHOWN,
    ) -> None:
        self._model = model
        self._head = shared_head_of(model)
        self._prompt_counts = [num_prompts for num_prompts, _ in counts]
        self._answer_counts = [num_answers for _, num_answers in counts]
        self._places = batch.places
        self._has_copies = batch.places != [*range(len(batch.prompts))]
        # Padded on the left, so that every prompt's next token is in the last column.
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        # Logits follow the ids. Where embeddings are offloaded, model.device is the CPU.
        prompts = [torch.tensor(prompt, device=device) for prompt in batch.prompts]
        self._ids = padded(prompts)
        self._mask = padded([torch.ones_like(prompt) for prompt in prompts])
        self._shown = shown
        self._images, positions = shown.arguments(prompts, batch.images, self._ids)
        if positions is None:
            positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        # int64 [B, T], or [axes, B, T] where images have places on several axes.
        self._positions = positions
        self._is_padded = len({len(prompt) for prompt in batch.prompts}) > 1
        self._parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = cache_argument(model)
        self._most = most
        self._graphs: TokenGraphs | None = None
        self._has_token = False
        self._cache: Any = None
        if shares_prompts(model):
            self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))

    def prompts(self) -> torch.Tensor:
        """The logits after each answer's prompt, float32 [B, V]."""
        with self._shown.gathered(self._model, is_used=bool(self._images)):
            logits = self._pass(self._prompt_counts, is_first_iteration=True, **self._images)
        # What follows reads the images' keys and values in the cache.
        self._images = {}
        places = torch.tensor(self._places, device=logits.device)
        is_static = self._most is not None and is_filled(self._cache)
        if is_static:
            self._make_static(places)
        elif self._has_copies:
            self._cache.reorder_cache(places)
        if isinstance(self._cache, DynamicCache):
            make_roomy(self._cache)
        if not self._has_copies:
            return logits
        self._ids = self._ids[places]
        self._mask = self._mask[places]
        self._positions = self._positions[..., places, :]
        return logits[places]

    def _make_static(self, places: torch.Tensor) -> None:
        """Prepare for graphs, once the prompts are known."""
        assert self._most is not None
        num_known = self._ids.shape[1]
        config = self._model.config.get_text_config(decoder=True)
        self._cache = static_cache(self._cache, config, places, num_known, num_known + self._most)
        self._graphs = TokenGraphs(self._model, self._ids.device)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after a further token of each answer, float32 [B, V].

        tokens: int64 [B].
        """
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._positions = torch.cat([self._positions, _following(self._positions)], dim=-1)
        # A model without a cache computes all tokens again.
        latest = {"next_sequence_length": 1} if self._cache_name else {}
        graphs: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # Without a graph for the first token: libraries get ready in it.
        if self._graphs and self._has_token:
            graphs = self._graphs.in_use()
        with graphs:
            logits = self._pass(self._answer_counts, **latest)
        self._has_token = True
        return logits

    def _pass(self, counts: Sequence[int], **options: Any) -> torch.Tensor:
        if self._head:
            # The head then computes the logits of last tokens alone, and is not gathered.
            self._head.counts = counts
        inputs = self._inputs() | options
        prepared = self._model.prepare_inputs_for_generation(self._ids, **inputs)
        outputs = self._model(**prepared, return_dict=True)
        if self._cache_name:
            self._cache = outputs.get(self._cache_name, self._cache)
        # A copy in any case: a view would keep the logits of all tokens.
        return outputs.logits[:, -1].to(torch.float32, copy=True)

    def _inputs(self) -> dict[str, Any]:
        """The arguments that the model's own preparation of inputs reads."""
        inputs: dict[str, Any] = {"use_cache": self._cache_name is not None}
        # Without padding, attention takes faster kernels.
        inputs["attention_mask"] = self._mask if self._is_padded else None
        if "position_ids" in self._parameters:
            inputs["position_ids"] = self._positions
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = 1
        if self._cache_name:
            inputs[self._cache_name] = self._cache
        return inputs


def _following(positions: torch.Tensor) -> torch.Tensor:
    """The positions [.., B, 1] of tokens that follow those at positions [.., B, T]."""
    if positions.dim() == 2:
        return positions[:, -1:] + 1
    # An image reaches less far on some axes. The next token is behind it on all of them.
    behind = positions.amax(dim=(0, 2)) + 1
    return behind[None, :, None].expand(len(positions), -1, -1)
