"""Generates text with a sharded model: every rank its own prompts, all ranks the same number of forward passes.

transformers' `generate(synced_gpus=True)` gives the same answers, but it takes the first parameter's device for the
model's: with offloaded embeddings it would move each token to the host and back.
"""

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.generation.prompts import PromptFormat, Question
from fsdp_qlora.metrics.sinks import SAMPLES_FILE, read_records
from fsdp_qlora.model.models import can_skip_logits
from fsdp_qlora.model.precision import Precision
from fsdp_qlora.output.redact import redact_values
from fsdp_qlora.ranks.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.ranks.ranks import Ranks, derive_seed
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.vocabulary import shared_head_of, sharing_ranks
from fsdp_qlora.storage.files import staged_file

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")

SAMPLE_TOKENS = 128  # of each answer of a training run, at most


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen from a model's predictions.

    temperature: 0 takes the most likely token. top_p: only the most likely tokens with this probability together are
    drawn from (Holtzman et al. 2020). seed: of the draws; those of a prompt depend on it and the prompt's number only.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def generator(self, number: int) -> torch.Generator:
        """The source of the draws for one prompt; torch's own is not touched."""
        return torch.Generator().manual_seed(derive_seed("generate", self.seed, number))

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token from the logits [vocabulary] of the last position."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits.float() / self.temperature).softmax(dim=-1).cpu()
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=0) - ordered
        ordered[before >= self.top_p] = 0.0  # the first stays
        return int(tokens[torch.multinomial(ordered, 1, generator=generator)])


@dataclass
class Answer:
    """What is generated for one prompt. number: of the prompt. is_done: whether it has ended by itself."""

    number: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


class Stops:
    """When an answer ends: at a token, or where its text has come to an end that a template gives it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, text: str) -> None:
        named = getattr(model.generation_config, "eos_token_id", None)
        ends = named if isinstance(named, list) else [named]
        self.tokens = {token for token in (tokenizer.eos_token_id, *ends) if token is not None}
        self._tokenizer, self._text = tokenizer, text

    def ends(self, tokens: list[int]) -> bool:
        if tokens[-1] in self.tokens:
            return True
        return bool(self._text) and self._text in self._tokenizer.decode(tokens[-len(self._text) - 1 :])

    def text_of(self, answer: Answer) -> str:
        """The answer as text, without what ended it."""
        text = str(self._tokenizer.decode(answer.tokens))
        if self._text and self._text in text:
            return text.partition(self._text)[0]
        return str(self._tokenizer.decode(answer.tokens, skip_special_tokens=True))


class TextGenerator:
    """Generates with one loaded model. Afterwards it is sharded, and torch's random state is as before; a training step
    sets the mode itself."""

    def __init__(
        self, model: PreTrainedModel, ranks: Ranks, precision: Precision, stops: Stops, options: SamplingOptions
    ) -> None:
        self._model, self.ranks, self._precision = model, ranks, precision
        self.stops, self._options = stops, options
        self._skips = can_skip_logits(model)

    @torch.no_grad()
    def generate(
        self,
        answers: Sequence[Answer],
        show: Callable[[Answer], object] = lambda answer: None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Fill in the answers to this rank's prompts. Called on every rank, also on those without a prompt.

        A rank that has no prompts, or whose answers have ended, takes part until those of all ranks have.

        Args:
            show: called with an answer after each of its tokens. beat: called for each token of the longest answer.
        """
        self._model.eval()
        generators = [self._options.generator(answer.number) for answer in answers]
        state = _Batch(answers, self.ranks.device, self._model) if answers else None
        head = shared_head_of(self._model)
        try:
            for _ in range(self._options.max_new_tokens):
                beat()
                is_active = any(not answer.is_done for answer in answers)
                counts = gather_numbers([len(answers) * is_active], self.ranks.device).flatten().int().tolist()
                if not any(counts):
                    break
                if head:  # a rank without prompts computes one token
                    head.counts = [max(1, counts[rank]) for rank in sharing_ranks(self._model)]
                logits = self._forward(state if is_active else None)
                for index, answer in enumerate(answers):
                    if not answer.is_done:
                        answer.tokens.append(self._options.choose(logits[index], generators[index]))
                        answer.is_done = self.stops.ends(answer.tokens)
                        show(answer)
        finally:
            if head:
                head.counts = None
            reshard_all(self._model)

    def _forward(self, state: "_Batch | None") -> torch.Tensor:
        """The logits of the last position, [B, vocabulary]; without a state this rank only helps to gather weights."""
        device = self.ranks.device
        inputs = state.inputs() if state else {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=device)}
        last = {"logits_to_keep": 1} if self._skips else {}
        with torch.autocast(device.type, dtype=self._precision.compute_dtype, enabled=self._precision.autocast):
            logits: torch.Tensor = self._model(**inputs, use_cache=state is not None, **last).logits
        return logits[:, -1].float()


class _Batch:
    """Prompts of any lengths with their cache; the shorter ones are padded in front."""

    def __init__(self, answers: Sequence[Answer], device: torch.device, model: PreTrainedModel) -> None:
        self._answers, self._device = answers, device
        longest = max(len(answer.prompt) for answer in answers)
        self._padding = [longest - len(answer.prompt) for answer in answers]
        self._cache = DynamicCache(config=model.config)
        # transformers 5.24 renamed it.
        arguments = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in arguments else "past_key_values"
        self._seen = 0

    def inputs(self) -> dict[str, object]:
        """The model's arguments for what it has not seen yet."""
        columns = [
            [0] * pad + answer.prompt + answer.tokens for pad, answer in zip(self._padding, self._answers, strict=True)
        ]
        length = max(map(len, columns))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in columns], device=self._device)
        inputs: dict[str, object] = {"input_ids": ids[:, self._seen :], self._name: self._cache}
        if any(self._padding):
            places = (
                torch.arange(length, device=self._device) - torch.tensor(self._padding, device=self._device)[:, None]
            )
            inputs["attention_mask"] = (places >= 0).long()
            inputs["position_ids"] = places.clamp_min(0)[:, self._seen :]
        self._seen = length
        return inputs


def gather_answers(answers: Sequence[Answer], describe: Callable[[Answer], T], device: torch.device) -> list[T]:
    """What `describe` says, in JSON's values, of the answers of all ranks, in the order of their prompts."""
    text = json.dumps([[answer.number, describe(answer)] for answer in answers])
    everything = [pair for part in all_gather_strings(text, device) for pair in json.loads(part)]
    return [described for _, described in sorted(everything, key=lambda pair: int(pair[0]))]


class Samples:
    """Answers the same prompts at each evaluation of a training run, and keeps the answers in a file of its folder."""

    def __init__(
        self, questions: Sequence[Question], prompt_format: PromptFormat, generator: TextGenerator, folder: Path
    ) -> None:
        self._questions, self._generator = questions, generator
        self._prompts = [prompt_format.ids(asked) for asked in questions]
        self._path = folder / SAMPLES_FILE

    def write(self, step: int, beat: Callable[[], object]) -> None:
        """Answer all prompts after `step` steps. Called on every rank.

        Args:
            beat: called for each token.
        """
        ranks = self._generator.ranks
        mine = range(ranks.rank, len(self._prompts), ranks.world_size)
        most = -(-len(self._prompts) // ranks.world_size)
        answers = [Answer(number, self._prompts[number]) for number in mine]
        for turn in range(most):  # one at a time: the memory is that of the training
            self._generator.generate(answers[turn : turn + 1], beat=beat)
        texts = gather_answers(answers, self._generator.stops.text_of, ranks.device)
        records = [
            {"step": step, "prompt": asked.messages[-1]["content"], "text": text}
            for asked, text in zip(self._questions, texts, strict=True)
        ]
        if ranks.is_rank_0:
            self._keep(step, redact_values(records))

    def _keep(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write the records after those of earlier steps. Those of later steps, which a killed start wrote, go."""
        try:
            earlier = [record for record in read_records(self._path) if record["step"] < step]
            with staged_file(self._path) as partial:
                lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in (*earlier, *records)]
                partial.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written (%s).", self._path.name, error.strerror or error)
