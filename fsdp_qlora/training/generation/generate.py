"""Generates text with a sharded model: every rank its own prompts, all ranks the same number of
forward passes.

Prompts are in the format of a run: from a question to the token ids before the answer.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Fields,
    PromptContent,
    Rendered,
    Segment,
    prompt_text,
    texts_of,
)
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import (
    CHAT,
    TEMPLATE,
    TEXT,
    Renderer,
    prompt_record,
    recorded_template,
)
from fsdp_qlora.data.text.templates import TEMPLATES, find_template
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.sharding.vocabulary import shared_head_of, sharing_ranks
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named, staged_file
from fsdp_qlora.utils.records import read_records
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.run_files import SAMPLES_FILE

log = logging.getLogger("fsdp_qlora")

SAMPLE_TOKENS = 128  # of each answer of a training run, at most
_AS_INSTRUCTION = RequestedFormat(renames={"prompt": "instruction"})


class PromptFormat:
    """The text around a question.

    Args:
        record: of data/text/rendering.py.
    Attributes:
        stop_text: what ends an answer besides the tokenizer's end token; empty if nothing does.
        keeps_history: whether a prompt begins with earlier questions and answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kind = record["kind"]
        self._worker = TemplateWorker()
        self.keeps_history = self._kind == CHAT
        self._renderer = Renderer(
            tokenizer, recorded_template(record), "assistant", TEMPLATES["alpaca"], [self._worker]
        )
        try:
            self.stop_text = "" if self._kind == TEXT else self._renderer.after_answer().strip()
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def ids(self, question: PromptContent) -> list[int]:
        """The token ids before the answer. Raises UserError if the chat template refuses the
        conversation.
        """
        try:
            return encode_prompt(
                self._renderer.prompt(_of_kind(question, self._kind)), self._tokenizer
            )
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def close(self) -> None:
        """End the process that fills chat templates; the next prompt starts it again."""
        self._worker.close()


def _of_kind(row: PromptContent, kind: str) -> PromptContent:
    """The question in the form of the rows that a model was trained on, whatever form it was given
    in.
    """
    if kind == TEXT and isinstance(row, Fields | Chat):
        texts = (
            [row.system, row.instruction, row.context] if isinstance(row, Fields) else _texts(row)
        )
        return Rendered([Segment("\n".join(filter(None, texts)), learned=False)], "text")
    if kind == TEMPLATE and isinstance(row, Chat):
        return Fields(prompt_text(row), "", system="".join(_texts(row, "system")))
    return Fields(prompt_text(row), "") if kind != TEXT and isinstance(row, Rendered) else row


def _texts(chat: Chat, role: str = "") -> list[str]:
    """The texts of the messages, of one role or of all."""
    return [
        "".join(texts_of(message)) for message in chat.messages if role in ("", message["role"])
    ]


def chosen_format(
    dataset_format: str, prompt_template: str | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The format by the options, for a model without a record of its training: a chat if the
    tokenizer has a template.

    Raises:
        UserError: there is no such template.
    """
    chosen = find_template(prompt_template)
    if dataset_format in FORMATS or chosen.prompt:
        return prompt_record(dataset_format if dataset_format in FORMATS else "alpaca", chosen)
    return prompt_record("", chosen, is_chat=bool(chosen.is_chat or tokenizer.chat_template))


def read_questions(path: Path) -> list[tuple[dict[str, Any], PromptContent]]:
    """The rows of a file of prompts: .jsonl with an object or a text in each line, or text with a
    prompt in each line.

    Returns:
        (the row, its question) of each.
    Raises:
        UserError: it cannot be read, or a row has no question.
    """
    try:
        # splitlines() would split within strings of JSON
        lines = read_named(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error})."
        ) from error
    questions = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix in (".jsonl", ".json") else line
            row = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise BadRow("not an object or a text")
            has_context = bool(row.get("input") or row.get("context"))
            is_instruction = has_context and row.keys() & {"instruction", "question", "prompt"} == {
                "prompt"
            }
            requested = _AS_INSTRUCTION if is_instruction else RequestedFormat()
            questions.append((row, requested.prompt(row)[1]))
        except BadRow as reason:
            why = str(reason).partition("; --columns")[0]  # an option of training
            raise UserError(
                f"{path}:{line_number} has no question that can be asked: {why}."
            ) from reason
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}:{line_number} is not JSON ({error}). Give one object in each line."
            ) from error
    if not questions:
        raise UserError(f"{path} has no prompts.")
    return questions


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


class TextGenerator:
    """Generates with one loaded model. Afterwards it is sharded, and torch's random state is as
    before; a training step sets the mode itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks,
        precision: Precision,
        stops: Stops,
        options: SamplingOptions,
    ) -> None:
        self._model = model
        self.ranks = ranks
        self._precision = precision
        self.stops = stops
        self._options = options

    def generate(
        self,
        prompts: Mapping[int, Sequence[int]],
        show: Callable[[Completion], object] = lambda completion: None,
        beat: Callable[[], object] = lambda: None,
        seeds: Mapping[int, int] | None = None,
    ) -> dict[int, Completion]:
        """Complete this rank's prompts. Called on every rank: one that has none takes part until
        all have ended.

        Args:
            prompts: index -> token ids. seeds: of their draws, else as the options say. show:
            called with a completion after each of its tokens. beat: called after each forward pass,
                on every rank; may raise, if on all of them.
        """
        model = self._model
        device = self.ranks.device
        batch = prompts or {0: [0]}
        made = {index: Completion([], is_done=not prompts) for index in batch}
        # Logits follow the ids. Where embeddings are offloaded, model.device is the CPU, and
        # transformers warns.
        inputs = [torch.tensor(ids, device=device) for ids in batch.values()]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")

        def follow(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            """Take each completion's next token; returns which have ended."""
            for index, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
                if not made[index].is_done:
                    made[index].token_ids.append(token)
                    made[index] = made[index]._replace(
                        is_done=self.stops.ends(made[index].token_ids)
                    )
                    show(made[index])
            return torch.tensor([made[index].is_done for index in batch], device=input_ids.device)

        def beaten(*_: Any) -> None:
            beat()

        draws = self._draws([*batch], seeds or {})
        beating = model.register_forward_hook(beaten)
        counts = gather_numbers([len(batch)], device).flatten().int().tolist()
        # The model's own one may ask for sampling or penalties.
        model_config = model.generation_config
        model.generation_config = GenerationConfig()
        head = shared_head_of(model)
        try:
            if head:
                head.counts = [counts[rank] for rank in sharing_ranks(model)]
            with (
                warnings.catch_warnings(action="ignore", category=UserWarning),
                self._precision.autocasting(device),
            ):
                model.eval().generate(
                    padded(inputs),
                    attention_mask=padded([torch.ones_like(ids) for ids in inputs]),
                    max_new_tokens=self._options.max_new_tokens,
                    logits_processor=LogitsProcessorList(draws),
                    stopping_criteria=StoppingCriteriaList([follow]),
                    synced_gpus=True,
                )
        finally:
            model.generation_config = model_config
            beating.remove()
            if head:
                head.counts = None
            reshard_all(model)
        for drawn in draws:
            for index, logps in zip(batch, torch.cat(drawn.logps, dim=1).tolist(), strict=True):
                made[index] = made[index]._replace(logps=logps[: len(made[index].token_ids)])
        return made if prompts else {}

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        at_a_time: int,
        beat: Callable[[], object] = lambda: None,
        seeds: Sequence[int] | None = None,
        *,
        shows_progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts, each on one rank. Called on every rank with all of them, and returns
        all completions.

        Args:
            at_a_time: of a rank in one batch, which shares its cache. beat, seeds: as for
                `generate`. shows_progress: a bar on rank 0.
        """
        number_of_ranks = self.ranks.world_size
        own = dict[int, Completion]()
        places = range(self.ranks.rank, len(prompts), number_of_ranks)
        rounds = range(0, -(-len(prompts) // number_of_ranks), at_a_time)  # as often on every rank
        for first in tqdm(
            rounds, unit=" batches", disable=not (shows_progress and self.ranks.is_rank_0)
        ):
            chosen = places[first : first + at_a_time]
            own_seeds = {place: seeds[place] for place in chosen} if seeds else None
            own |= self.generate(
                {place: prompts[place] for place in chosen}, beat=beat, seeds=own_seeds
            )
        parts = all_gather_strings(json.dumps([*own.items()]), torch.device("cpu"))
        gathered = [pair for part in parts for pair in json.loads(part)]
        return [
            Completion(*values) for _, values in sorted(gathered, key=lambda pair: int(pair[0]))
        ]

    def _draws(self, numbers: Sequence[int], seeds: Mapping[int, int]) -> list[Draws]:
        """One if tokens are drawn, or their log-probabilities wanted."""
        own = [
            seeds.get(number, derive_seed("generate", self._options.seed, number))
            for number in numbers
        ]
        return (
            [Draws(self._options, own)]
            if self._options.temperature or self._options.plain_logps
            else []
        )


class Samples:
    """Answers the same prompts at each evaluation of a training run, and keeps the answers in a
    file of its folder.
    """

    def __init__(
        self,
        questions: Sequence[PromptContent],
        prompt_format: PromptFormat,
        generator: TextGenerator,
        folder: Path,
    ) -> None:
        self._questions = questions
        self._generator = generator
        self._prompts = [prompt_format.ids(question) for question in questions]
        self._path = folder / SAMPLES_FILE

    def write(self, step: int, beat: Callable[[], object]) -> None:
        """Answer all prompts after `step` steps.

        Called on every rank. beat: called for each token.
        """
        # at a time: the memory is that of the training
        said = self._generator.answer_all(self._prompts, 1, beat)
        records = [
            {
                "step": step,
                "prompt": prompt_text(question),
                "text": self._generator.stops.text_of(completion.token_ids),
            }
            for question, completion in zip(self._questions, said, strict=True)
        ]
        if self._generator.ranks.is_rank_0:
            self._keep(step, redact_values(records))

    def _keep(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write the records after those of earlier steps. Those of later steps, which a killed
        start wrote, go.
        """
        try:
            earlier = [record for record in read_records(self._path) if record["step"] < step]
            with staged_file(self._path) as partial:
                lines = [
                    json.dumps(record, ensure_ascii=False) + "\n" for record in (*earlier, *records)
                ]
                partial.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written (%s).", self._path.name, error.strerror or error)
