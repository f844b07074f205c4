"""Generates text with a base and its adapter, in the precision and on the GPUs of the training."""

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.text.image_processor import NO_FILES, ImageProcessor
from fsdp_qlora.model.architecture.tokenizer import load_tokenizer
from fsdp_qlora.model.kernels.in_use import use_ways
from fsdp_qlora.planning.generation import AnswerSize, plan_generation
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import PlacedModel, place
from fsdp_qlora.planning.plan import ModelPlan, plan_model
from fsdp_qlora.run.base import PlannedBase, open_base
from fsdp_qlora.run.session import Session
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.sharding.groups import kept_gathered
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.prompt_format import (
    EncodedPrompt,
    PromptFormat,
    Question,
    chosen_format,
)
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.image_inputs import image_inputs_of
from fsdp_qlora.utils.files import read_json, refusal_named, staged_file
from fsdp_qlora.utils.text import plural

log = logging.getLogger("fsdp_qlora")


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
        questions: prompts to answer; more may come.
        at_a_time: prompts that a rank answers at a time.
    Attributes:
        prompts: the questions in the format of the training.
    Raises:
        UserError: one of the questions cannot be asked. No weights are read before.
    """

    format: PromptFormat

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        sampling: SamplingOptions,
        folder: Path | None,
        questions: Sequence[Question] = (),
        *,
        at_a_time: int = 1,
    ) -> None:
        tried: list[TriedKernels] = []
        processors: list[ImageProcessor | None] = []

        def prepare(placed: PlacedModel) -> None:
            processors.append(_image_processor(config, placed.model))
            self.format = open_format(config, placed.model, folder, processors[0])
            self.prompts = [self.format.encode(each.content, each.origin) for each in questions]
            tried.append(TriedKernels.of(config, placed.model, graphed=["answers"]))

        placed = load_trained(config, session, folder, prepare)
        use_ways(tried[0].choose())
        plan = placed.model
        ranks = session.ranks
        self.ranks = ranks
        self.sampling = sampling
        model = plan.meta.model
        self._model = model
        self.stops = Stops(plan.tokenizer, model, self.format.stop_text)
        most_new = sampling.max_new_tokens
        lengths = [len(prompt.ids) + most_new for prompt in self.prompts]
        longest = max([config.longest_row, 2 * most_new, *lengths])
        values = [int(prompt.images.num_values.max(initial=0)) for prompt in self.prompts]
        size = AnswerSize(longest, most_new, max(values, default=0))
        generation = plan_generation(placed, at_a_time * ranks.world_size, size, free=None)
        # Beside fewer prompts than are asked for at a time there is room that they will take.
        has_room = generation.at_a_time == at_a_time
        self._keeps_gathered = has_room and generation.gathered > 0
        is_in_place = has_room and generation.stays
        kept = KeptWeights(has_room and generation.decoded > 0, is_in_place)
        self.generator = TextGenerator(
            model,
            ranks,
            plan.precision,
            self.stops,
            sampling,
            kept,
            image_inputs_of(model, processors[0]),
        )

    def kept_gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keep gathered weights from token to token in this block, where there is room."""
        if self._keeps_gathered:
            return kept_gathered(self._model)
        return contextlib.nullcontext()

    def stream(self, prompt: EncodedPrompt | None, index: int, output: Any) -> str:
        """Answer one prompt on rank 0, which streams the text; returns the answer there.

        prompt: on rank 0; not used on others.
        """
        prompts: dict[int, list[int]] = {}
        images: dict[int, RowImages] = {}
        if self.ranks.is_rank_0 and prompt is not None:
            prompts[index] = prompt.ids
            images[index] = prompt.images
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
            completions = self.generator.generate(prompts, show, images=images)
        if not completions:  # on the other ranks
            return ""
        text = self.stops.text_of(completions[index].token_ids)
        print(text[printed:], file=output, flush=True)
        return text


def _image_processor(config: TrainConfig, plan: ModelPlan) -> ImageProcessor | None:
    """The model's processor of images; None if it takes none."""
    if not plan.meta.parts.towers:
        return None
    return ImageProcessor.find(plan.folder, config.model_name)


def open_format(
    config: TrainConfig, plan: ModelPlan, folder: Path | None, processor: ImageProcessor | None
) -> PromptFormat:
    """The format of a model's prompts.

    folder: as for `load_trained`.
    """
    trained_prompt = None
    # Prompts have the form of the training, unless the user asks for another.
    if folder is not None and config.prompt_template is None:
        trained_prompt = read_json(folder / "training.json").get("prompt")
    record = trained_prompt or chosen_format(
        config.dataset_format, config.prompt_template, plan.tokenizer
    )
    if plan.meta.parts.towers and processor is None:
        return PromptFormat(plan.tokenizer, record, None, f"the model's folder {NO_FILES}")
    return PromptFormat(plan.tokenizer, record, processor)


def answer_file(
    model: LoadedModel, questions: Sequence[Question], out: Path, batch_size: int
) -> None:
    """Answer the rows of a file, which the model was given.

    `out` holds each row with a completion, and appears when it is complete.

    Raises:
        UserError: it cannot be written.
    """
    with model.kept_gathered():
        completions = model.generator.answer_all(
            [prompt.ids for prompt in model.prompts],
            batch_size,
            images=[prompt.images for prompt in model.prompts],
            shows_progress=sys.stderr.isatty(),
        )
    if model.ranks.is_rank_0:
        with refusal_named("out", out), staged_file(out) as partial:
            lines = []
            for question, completion in zip(questions, completions, strict=True):
                row = question.row | {
                    "completion": model.stops.text_of(completion.token_ids),
                    "num_tokens": len(completion.token_ids),
                    "finish": completion.finish,
                }
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            partial.write_text("".join(lines), encoding="utf-8")
        log.info("Saved: %s (%d prompts)", out, len(questions))
