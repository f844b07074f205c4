"""Sampling: the options, the choice of each token, and the end of an answer."""

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
    """Options that choose a token from a model's predictions."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw only from the most likely tokens that have this probability together (Holtzman et al.
    2020).
    """
    seed: int = 0
    """The draws of a prompt depend on this seed and on the prompt's number only."""
    top_k: int = 0
    """The number of most likely tokens to draw from; 0 for all."""
    plain_logps: bool = False
    """Log-probabilities are the model's own, without the temperature and limits above."""
    never: tuple[int, ...] = ()
    """Tokens that are not drawn."""


class Draws:
    """Draws each answer's next token from the logits after it.

    `generate(do_sample=True)` draws from torch's own random state: answers would depend on the
    others in their batch.

    Args:
        seeds: of the answers in the batch.
    Attributes:
        logps: log-probabilities of each call's tokens, float32 [B, 1]; none for greedy decoding
            without `plain_logps`.
    """

    def __init__(self, options: SamplingOptions, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._is_plain = options.plain_logps
        self._never = options.never
        temperature = float(options.temperature)
        self._is_greedy = not temperature and not self._is_plain
        # The order of transformers' own `generate`: top_p counts what temperature and top_k leave.
        self._warpers: list[LogitsProcessor] = []
        if temperature:
            self._warpers.append(TemperatureLogitsWarper(temperature))
        # At temperature 0 the likeliest token is the only one to draw.
        top_k = options.top_k if temperature else 1
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        # This warper sorts the whole vocabulary, so it is left out where it changes nothing.
        if options.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(options.top_p)))
        # Made at the first call, which shows the device of the logits.
        self._never_drawn: torch.Tensor | None = None
        self._sources: list[torch.Generator] = []
        self.logps: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each answer, int64 [B], on the device of the logits.

        logits: float32 [B, V].
        """
        scores = logits
        if self._never:
            scores = logits.index_fill(1, self._unwanted(logits), -torch.inf)
        if self._is_greedy:
            return scores.argmax(dim=-1)
        for warper in self._warpers:
            # The library's warpers that are used here read no ids.
            scores = warper(None, scores)
        if not self._sources:
            self._sources = [
                torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds
            ]
        noise = exponential_like(scores, self._sources)
        # The first of exponential variables whose rates are the probabilities, as in
        # torch.multinomial.
        probabilities = scores.softmax(dim=-1)
        drawn = torch.div(probabilities, noise, out=noise).argmax(dim=-1, keepdim=True)
        if self._is_plain:
            self.logps.append(logits.log_softmax(dim=-1).gather(1, drawn))
        else:
            self.logps.append(probabilities.gather(1, drawn).log())
        return drawn[:, 0]

    def _unwanted(self, logits: torch.Tensor) -> torch.Tensor:
        """The tokens that are not drawn, int64, on the device of the logits [B, V]."""
        if self._never_drawn is None:
            # A configuration may name tokens of other media that the model has no logits for.
            known = [token for token in self._never if 0 <= token < logits.shape[1]]
            self._never_drawn = torch.tensor(known, dtype=torch.long, device=logits.device)
        return self._never_drawn


def exponential_like(scores: torch.Tensor, sources: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw exponential variables, each row [V] from a generator of its own, float32 [B, V].

    So the draws of an answer do not depend on the batch that it is in.
    """
    if scores.device.type != "cpu":
        noise = torch.empty_like(scores)
        for row, source in zip(noise, sources, strict=True):
            row.exponential_(generator=source)
        return noise
    # torch's own function draws the same numbers one by one, in 2.5 times the time.
    uniform = torch.empty_like(scores, dtype=torch.float64)
    for row, source in zip(uniform, sources, strict=True):
        row.uniform_(generator=source)
    return uniform.neg_().log1p_().neg_().to(scores.dtype)


class Completion(NamedTuple):
    """The answer that a model writes to a prompt."""

    token_ids: list[int]
    """With the end token, if the answer ended by itself."""
    is_done: bool
    """Whether it ended by itself; otherwise it was cut at the maximum tokens."""
    logps: list[float] | None = None
    """The engine's own log-probability of each token, where tokens are drawn."""

    @property
    def finish(self) -> str:
        """Why it ended, in the word of OpenAI's API."""
        return "stop" if self.is_done else "length"


class Stops:
    """When an answer ends: at an end token, or at the text with which a template ends answers."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, text: str
    ) -> None:
        end_ids = getattr(model.generation_config, "eos_token_id", None)
        tokens = {tokenizer.eos_token_id}
        tokens.update(end_ids if isinstance(end_ids, list) else [end_ids])
        if text:
            # The first token of an end such as "<|end|>\n<|eos|>" ends an answer if it is an added
            # token of the tokenizer; ordinary text may have any other one.
            first = tokenizer(text, add_special_tokens=False)["input_ids"][:1]
            tokens.update(token for token in first if token in tokenizer.added_tokens_decoder)
        self.tokens: set[int] = {token for token in tokens if token is not None}
        self._tokenizer = tokenizer
        self.text = text

    def ends(self, tokens: list[int]) -> bool:
        """Whether an answer of these tokens has ended with the last one."""
        if tokens[-1] in self.tokens:
            return True
        if not self.text:
            return False
        # So many tokens hold the text, since each has a character or more. To decode all tokens at
        # each one of them would be quadratic.
        last = tokens[-len(self.text) - 1 :]
        return self.text in self._tokenizer.decode(last)

    def text_of(self, token_ids: list[int]) -> str:
        """The text of a completion, without what ended it."""
        text = str(self._tokenizer.decode(token_ids))
        if self.text and self.text in text:
            return text.partition(self.text)[0]
        # An end token that is not special would stay in the text.
        if token_ids and token_ids[-1] in self.tokens:
            token_ids = token_ids[:-1]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
