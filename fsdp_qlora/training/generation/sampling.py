"""How an answer's tokens are chosen, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class SamplingOptions:
    """Options that choose a token from a model's predictions.

    temperature: 0 takes the most likely token. top_p: only the most likely tokens with this
    probability together are drawn from (Holtzman et al. 2020). seed: of the draws; those of a
    prompt depend on it and the prompt's number only. top_k: only so many tokens are drawn from, 0
    for all. plain_logps: log-probabilities are the model's own, whatever the temperature and which
    tokens are drawn from.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    plain_logps: bool = False


class Draws:
    """A logits processor that keeps one drawn token for each prompt.

    `generate(do_sample=True)` draws from torch's own random state: answers would depend on the
    others in their batch.

    Args:
        seeds: of the prompts in the batch.
    Attributes:
        logps: log-probabilities of each call's tokens, float32 [B, 1].
    """

    def __init__(self, options: SamplingOptions, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._is_plain = options.plain_logps
        temperature = float(options.temperature)
        self._warpers: list[LogitsProcessor] = (
            [TemperatureLogitsWarper(temperature)] if temperature else []
        )
        top_k = options.top_k if temperature else 1  # the likeliest
        self._warpers += [TopKLogitsWarper(top_k)] if top_k else []
        # it sorts
        self._warpers += [TopPLogitsWarper(float(options.top_p))] if options.top_p < 1 else []
        self._sources: list[torch.Generator] = []
        self.logps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        plain = scores
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        self._sources = self._sources or [
            torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds
        ]
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, own in zip(noise, self._sources, strict=True):
            row.exponential_(generator=own)
        # The first of exponential variables whose rates are the probabilities, as in
        # torch.multinomial.
        probabilities = scores.float().softmax(dim=-1)
        drawn = (probabilities / noise).argmax(dim=-1, keepdim=True)
        logps = plain.float().log_softmax(dim=-1).gather(1, drawn) if self._is_plain else None
        self.logps.append(probabilities.gather(1, drawn).log() if logps is None else logps)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


class Completion(NamedTuple):
    """The answer that a model writes to a prompt.

    token_ids: with the end token, if it ended by itself. is_done: whether it did; otherwise it was
    cut at the most tokens. logps: the engine's own log-probability of each token, where it was
    drawn.
    """

    token_ids: list[int]
    is_done: bool
    logps: list[float] | None = None

    @property
    def finish(self) -> str:
        """Why it ended, in the word of OpenAI's API."""
        return "stop" if self.is_done else "length"


class Stops:
    """When an answer ends: at a token, or where its text has come to an end that a template gives
    it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, text: str
    ) -> None:
        named = getattr(model.generation_config, "eos_token_id", None)
        ends = named if isinstance(named, list) else [named]
        # of "<|end|>\n<|eos|>"
        first = tokenizer(text, add_special_tokens=False)["input_ids"][:1] if text else []
        marks = [token for token in first if token in tokenizer.added_tokens_decoder]
        self.tokens = {
            token for token in (tokenizer.eos_token_id, *ends, *marks) if token is not None
        }
        self._tokenizer = tokenizer
        self.text = text

    def ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self.tokens:
            return True
        return bool(self.text) and self.text in self._tokenizer.decode(
            tokens[-len(self.text) - 1 :]
        )

    def text_of(self, token_ids: list[int]) -> str:
        """The text of a completion, without what ended it."""
        text = str(self._tokenizer.decode(token_ids))
        if self.text and self.text in text:
            return text.partition(self.text)[0]
        # perhaps by one that is not special
        has_ended = bool(token_ids) and token_ids[-1] in self.tokens
        return str(
            self._tokenizer.decode(
                token_ids[:-1] if has_ended else token_ids, skip_special_tokens=True
            )
        )
