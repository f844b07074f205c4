"""Measurements of a run besides its losses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.planning.generation import Generation, weights_stay
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.run_plan import HeldOutPlan, Plan
from fsdp_qlora.run.facts import Measured
from fsdp_qlora.training.generation.answering import Answering
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.samples import SAMPLE_TOKENS, Samples
from fsdp_qlora.training.generation.sampling import SamplingOptions, Stops
from fsdp_qlora.training.image_inputs import image_inputs_of
from fsdp_qlora.training.rl.held_out import REWARD, HeldOutScores
from fsdp_qlora.training.setup import LOSS, Setup
from fsdp_qlora.training.trainer import Trainer


class ExtraMeasurements(NamedTuple):
    """Measurements besides the losses.

    They are generated texts, scores of answers, --eval_tasks, and a GPU's memory and speed,
    compared with the plan.
    """

    samples: Samples | None = None
    scores: HeldOutScores | None = None
    measure_tasks: Callable[..., dict[str, Any]] | None = None
    measured: Measured | None = None

    def close(self) -> None:
        """End the processes of the measurements."""
        if self.scores:
            self.scores.close()


def open_extra_measurements(
    config: TrainConfig, plan: Plan, setup: Setup, trainer: Trainer, folder: Path
) -> ExtraMeasurements:
    """Collect what the options and the device let a run measure beside its losses."""
    tokenizer = plan.model.tokenizer
    samples = measure_tasks = measured = None
    if setup.samples:
        answering = open_answering(
            plan.placed,
            trainer.ranks,
            setup.samples.stop_text,
            SAMPLE_TOKENS,
            plan.data.image_processor,
        )
        samples = Samples(setup.samples, answering, folder)
    scores = open_scores(
        config,
        plan.placed,
        plan.held_out,
        setup,
        trainer.ranks,
        trainer.control,
        plan.data.image_processor,
    )
    if setup.tasks:
        options: dict[str, Any] = {"batch_size": config.batch_size, "bootstrap_iters": 0}
        measure_tasks = partial(
            setup.tasks.measure,
            trainer.model,
            tokenizer,
            plan.model.precision,
            trainer.ranks,
            **options,
        )
    # Speed and reserved memory are planned for GPUs only.
    device = trainer.ranks.device
    if device.type == "cuda":
        measured = Measured(config, plan, gpu_of(torch.cuda.get_device_properties(device)))
    return ExtraMeasurements(samples, scores, measure_tasks, measured)


def open_scores(
    config: TrainConfig,
    placed: PlacedModel,
    held_out: HeldOutPlan | None,
    setup: Setup,
    ranks: Ranks,
    control: Control,
    image_processor: ImageProcessor | None,
) -> HeldOutScores | None:
    """Open the scores of answers to held-out prompts; None if none are planned."""
    if not held_out:
        return None
    longest = config.max_completion_length
    generation = held_out.generation
    return HeldOutScores(
        held_out.prompts,
        open_answering(placed, ranks, setup.stop_text, longest, image_processor, generation),
        setup.eval_scorer,
        control,
        chosen=REWARD if config.best_measure == LOSS else config.best_measure,
        chooses_best=config.best_measure != LOSS,
    )


def open_answering(
    placed: PlacedModel,
    ranks: Ranks,
    stop_text: str,
    longest: int,
    image_processor: ImageProcessor | None,
    generation: Generation | None = None,
) -> Answering:
    """Open the one way in which a loaded model answers prompts at evaluations: greedily.

    Args:
        stop_text: as of `PromptFormat`.
        longest: tokens of an answer, at most.
        image_processor: the model's; None if it takes no images.
        generation: how many prompts are answered at a time; else it is one on each rank, whose
            cache of keys and values must fit into the memory of the training.
    """
    model = placed.model.meta.model
    # No decoded ones without a plan: there is memory for a training step alone.
    kept = KeptWeights(are_in_place=weights_stay(placed))
    if generation:
        kept = KeptWeights(generation.decoded > 0, generation.stays)
    generator = TextGenerator(
        model,
        ranks,
        placed.model.precision,
        Stops(placed.model.tokenizer, model, stop_text),
        SamplingOptions(max_new_tokens=longest),
        kept,
        image_inputs_of(model, image_processor),
    )
    if generation is None:
        return Answering(generator)
    gathered = model if generation.gathered else None
    return Answering(generator, at_a_time=generation.at_a_time, gathered=gathered)
