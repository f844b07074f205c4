"""Trials of answers whose tokens are computed by CUDA graphs: the model's first block, with random
weights."""

import contextlib
from functools import partial

import torch
from transformers import DynamicCache, StaticCache

from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.kernels.in_use import GRAPHS, PLAIN, using_ways, ways_of_option
from fsdp_qlora.model.kernels.trial import PartTrials, Trial
from fsdp_qlora.run.graph_trials import BlockForm
from fsdp_qlora.training.generation.model_cache import cache_argument, static_cache
from fsdp_qlora.training.generation.token_graphs import TokenGraphs, why_not_graphed

_ANSWERS = 4
_PROMPT = 48  # tokens
_TOKENS = 4


def answer_trials(form: BlockForm, device: torch.device) -> PartTrials:
    """The trials of a block on a few tokens after a prompt."""
    make = partial(_trial, form, device)
    return PartTrials("answers", [GRAPHS], proofs=[make], timed=make, apart=[GRAPHS])


@torch.no_grad()
def _trial(form: BlockForm, device: torch.device) -> Trial:
    block = _Block(form, device)
    size = (_ANSWERS, _PROMPT + _TOKENS, block.hidden_size)
    hidden = torch.empty(size, dtype=block.dtype, device=device)
    hidden.normal_(generator=torch.Generator(device).manual_seed(0))
    prompt, *tokens = hidden.split([_PROMPT] + [1] * _TOKENS, dim=1)
    by_graphs = TokenGraphs(block.model, device)
    ways = {
        PLAIN: partial(block.following, None, block.after(prompt)),
        GRAPHS: partial(block.following, by_graphs, block.after(prompt)),
    }
    return Trial(ways, tuple(tokens))


class _Block:
    """A model of one block, which is given hidden states in the place of tokens.

    Raises:
        RuntimeError: its tokens have no graphs.
    """

    def __init__(self, form: BlockForm, device: torch.device) -> None:
        self.model = form.build(device).eval()
        reason = why_not_graphed(self.model, _PROMPT + _TOKENS)
        if reason:
            raise RuntimeError(reason)
        precision = PRECISIONS[form.precision]
        self.dtype = precision.param_dtype or torch.float32
        self._autocasting = partial(precision.autocasting, device)
        self._config = self.model.config.get_text_config(decoder=True)
        self._cache_name = cache_argument(self.model.base_model) or ""
        self._device = device

    @property
    def hidden_size(self) -> int:
        size: int = self._config.hidden_size
        return size

    def after(self, prompt: torch.Tensor) -> StaticCache:
        """The cache after prompts [B, T, hidden size]."""
        cache = DynamicCache(config=self._config)
        self._states(prompt, cache)
        # The model has one block.
        del cache.layers[1:]
        places = torch.arange(len(prompt), device=self._device)
        return static_cache(cache, self._config, places, _PROMPT, _PROMPT + _TOKENS)

    @torch.no_grad()
    def following(
        self, graphs: TokenGraphs | None, cache: StaticCache, *tokens: torch.Tensor
    ) -> list[torch.Tensor]:
        """The hidden states of tokens after the prompts, [B, 1, hidden size] each."""
        cache.layers[0].cumulative_length.fill_(_PROMPT)
        found = []
        for number, token in enumerate(tokens):
            in_use: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if graphs and number:
                in_use = graphs.in_use()
            with in_use:
                found.append(self._states(token, cache).clone())
        if graphs and graphs.failure:
            raise RuntimeError(graphs.failure)
        return found

    def _states(self, states: torch.Tensor, cache: DynamicCache | StaticCache) -> torch.Tensor:
        given = {"inputs_embeds": states, self._cache_name: cache}
        with using_ways(ways_of_option("auto")), self._autocasting():
            outputs = self.model.base_model(**given, use_cache=True)
        found: torch.Tensor = outputs[0]
        return found
