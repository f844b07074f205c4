"""Generates text with a base and its adapter, in the precision and on the GPUs of the training."""

import contextlib
import dataclasses
import datetime
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.content import Chat, PromptContent
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.tokenizer import load_tokenizer
from fsdp_qlora.model.kernels.in_use import use_ways
from fsdp_qlora.planning.generation import plan_generation
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import PlacedModel, place
from fsdp_qlora.planning.plan import plan_model
from fsdp_qlora.run.base import PlannedBase, open_base
from fsdp_qlora.run.session import Session
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.sharding.groups import kept_gathered
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.prompt_format import PromptFormat, chosen_format
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.utils.files import read_json, refusal_named, staged_file
from fsdp_qlora.utils.text import plural

log = logging.getLogger("fsdp_qlora")

_IDLE = datetime.timedelta(days=7)  # how long a chat waits for its user


def load_trained(
    config: TrainConfig,
    session: Session,
    folder: Path | None,
    prepare: Callable[[PlacedModel], object] = lambda _: None,
) -> PlacedModel:
    """Load a model as it was trained, and log in one line which it is. Called on every rank.

    Args:
        folder: of the adapter or the trained model, with its tokenizer; None for a base.
        prepare: called before weights are fetched and ranks wait for each other.
    """
    ranks = session.ranks
    level = log.level
    if not config.verbose:
        log.setLevel(logging.WARNING)  # loading messages are noise here

    def plan_base() -> PlannedBase:
        plan = plan_model(config, Machine.of(config, ranks), session.store)
        if folder is not None and (folder / "tokenizer_config.json").is_file():
            tokenizer = load_tokenizer(
                folder, str(folder), trust_remote_code=config.trust_remote_code
            )
            plan = dataclasses.replace(plan, tokenizer=tokenizer)
        placed = place(config, plan, store=session.store)
        prepare(placed)
        return PlannedBase(config, placed, session.store)

    placed = open_base(plan_base, session).placed
    plan = placed.model
    # It may name more tokens that end an answer than the tokenizer does.
    if (plan.folder / "generation_config.json").is_file():
        plan.meta.model.generation_config = GenerationConfig.from_pretrained(plan.folder)
    log.setLevel(level)
    adapter = f" with {folder}" if folder and config.adapter else ""
    processes = plural(ranks.world_size, "process", ending="es")
    log.info("%s%s (%s, %s)", config.model_name, adapter, config.train_type, processes)
    return placed


class LoadedModel:
    """A model that answers. Every rank makes one, and calls the same methods.

    Args:
        folder: as for `load_trained`, with the format of its prompts.
        at_a_time: prompts that a rank answers at a time.
    """

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        sampling: SamplingOptions,
        folder: Path | None,
        *,
        at_a_time: int = 1,
    ) -> None:
        tried: list[TriedKernels] = []

        def try_kernels(placed: PlacedModel) -> None:
            tried.append(TriedKernels.of(config, placed.model, graphed=["answers"]))

        placed = load_trained(config, session, folder, try_kernels)
        use_ways(tried[0].choose())
        plan = placed.model
        ranks = session.ranks
        self.ranks = ranks
        self.sampling = sampling
        trained_prompt = None
        # Prompts have the form of the training, unless the user asks for another.
        if folder is not None and config.prompt_template is None:
            trained_prompt = read_json(folder / "training.json").get("prompt")
        tokenizer = plan.tokenizer
        model = plan.meta.model
        self._model = model
        record = trained_prompt or chosen_format(
            config.dataset_format, config.prompt_template, tokenizer
        )
        self.format = PromptFormat(tokenizer, record)
        self.stops = Stops(tokenizer, model, self.format.stop_text)
        most_new = sampling.max_new_tokens
        generation = plan_generation(
            placed,
            at_a_time * ranks.world_size,
            max(config.longest_row, 2 * most_new),
            most_new,
            free=None,
        )
        # Beside fewer prompts than are asked for at a time there is room that they will take.
        has_room = generation.at_a_time == at_a_time
        self._keeps_gathered = has_room and generation.gathered > 0
        is_in_place = has_room and generation.stays
        kept = KeptWeights(has_room and generation.decoded > 0, is_in_place)
        self.generator = TextGenerator(model, ranks, plan.precision, self.stops, sampling, kept)

    def kept_gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keep gathered weights from token to token in this block, where there is room."""
        if self._keeps_gathered:
            return kept_gathered(self._model)
        return contextlib.nullcontext()

    def stream(self, question: PromptContent, index: int, output: Any) -> str:
        """Answer one question on rank 0, which streams the text; returns the answer there."""
        prompts = {index: self.format.ids(question)} if self.ranks.is_rank_0 else {}
        printed = 0
        held = len(self.format.stop_text)

        def show(completion: Completion) -> None:
            nonlocal printed
            text = self.stops.text_of(completion.token_ids)
            # What may still change is held back: bytes of a character that is not complete, and as
            # much as the text has that ends an answer.
            ready = max(printed, len(text.rstrip("\ufffd")) - held)
            if completion.is_done:
                ready = len(text)
            print(text[printed:ready], end="", file=output, flush=True)
            printed = ready

        with self.kept_gathered():
            completions = self.generator.generate(prompts, show)
        if not completions:  # on the other ranks
            return ""
        text = self.stops.text_of(completions[index].token_ids)
        print(text[printed:], file=output, flush=True)
        return text


def answer_file(
    model: LoadedModel,
    rows: Sequence[tuple[dict[str, Any], PromptContent]],
    out: Path,
    batch_size: int,
) -> None:
    """Answer the rows of a file.

    `out` holds each row with a completion, and appears when it is complete.

    Raises:
        UserError: it cannot be written.
    """
    prompts = [model.format.ids(question) for _, question in rows]
    with model.kept_gathered():
        completions = model.generator.answer_all(
            prompts, batch_size, shows_progress=sys.stderr.isatty()
        )
    if model.ranks.is_rank_0:
        with refusal_named("out", out), staged_file(out) as partial:
            for (row, _), completion in zip(rows, completions, strict=True):
                row |= {
                    "completion": model.stops.text_of(completion.token_ids),
                    "num_tokens": len(completion.token_ids),
                    "finish": completion.finish,
                }
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row, _ in rows]
            partial.write_text("".join(lines), encoding="utf-8")
        log.info("Saved: %s (%d prompts)", out, len(rows))


def chat(model: LoadedModel, system: str) -> None:
    """Answer each line typed on rank 0 until the input ends.

    A model that was trained on chats sees earlier turns.
    """
    is_terminal = sys.stdin.isatty()
    # A group of its own waits for the user: no other collective takes long. On gloo, a GPU would be
    # busy meanwhile.
    waiting = dist.new_group(timeout=_IDLE, backend="gloo")
    first = [{"role": "system", "content": system}] if system else []
    messages = first
    turn = 0
    if model.ranks.is_rank_0 and is_terminal:
        print("Ctrl-D ends the chat, an empty line clears its history.", file=sys.stderr)
    while True:
        line = _read_line(model.ranks, is_terminal, waiting)
        if line is None:
            return
        if not line:
            messages = first
            continue
        question = Chat([*messages, {"role": "user", "content": line}])
        text = model.stream(question, turn, sys.stdout)
        turn += 1
        if model.format.keeps_history:
            messages = [*question.messages, {"role": "assistant", "content": text}]


def _read_line(ranks: Ranks, is_terminal: bool, waiting: dist.ProcessGroup) -> str | None:
    """A line that was typed on rank 0, on every rank; None at the end."""
    line = ""
    if ranks.is_rank_0:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    line = all_gather_strings(line, torch.device("cpu"), waiting)[0]
    return line.strip() if line else None
