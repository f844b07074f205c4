"""Measurements of a run besides its losses."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.planning.generation import weights_stay
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.facts import Measured
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.prompt_format import PromptFormat
from fsdp_qlora.training.generation.samples import SAMPLE_TOKENS, Samples
from fsdp_qlora.training.generation.sampling import SamplingOptions, Stops
from fsdp_qlora.training.setup import Setup
from fsdp_qlora.training.trainer import Trainer


class ExtraMeasurements(NamedTuple):
    """Measurements besides the losses.

    They are generated texts, --eval_tasks, and a GPU's memory and speed, compared with the plan.
    """

    samples: Samples | None = None
    measure_tasks: Callable[..., dict[str, Any]] | None = None
    measured: Measured | None = None


def open_extra_measurements(
    config: TrainConfig, plan: Plan, setup: Setup, trainer: Trainer, folder: Path
) -> ExtraMeasurements:
    """Collect what the options and the device let a run measure beside its losses."""
    model = trainer.model
    ranks = trainer.ranks
    tokenizer = plan.model.tokenizer
    precision = plan.model.precision
    samples = measure_tasks = measured = None
    if config.sample_prompts:
        prompt_format = PromptFormat(tokenizer, plan.data.provenance["prompt"])
        stops = Stops(tokenizer, model, prompt_format.stop_text)
        sampling = SamplingOptions(max_new_tokens=SAMPLE_TOKENS)
        # No decoded ones: there is memory for a training step alone.
        kept = KeptWeights(are_in_place=weights_stay(plan.placed))
        generator = TextGenerator(model, ranks, precision, stops, sampling, kept)
        samples = Samples(setup.questions, prompt_format, generator, folder)
        # The questions are token ids now, and need no template any more.
        prompt_format.close()
    if setup.tasks:
        options: dict[str, Any] = {"batch_size": config.batch_size, "bootstrap_iters": 0}
        measure_tasks = partial(setup.tasks.measure, model, tokenizer, precision, ranks, **options)
    # Speed and reserved memory are planned for GPUs only.
    if ranks.device.type == "cuda":
        measured = Measured(config, plan, gpu_of(torch.cuda.get_device_properties(ranks.device)))
    return ExtraMeasurements(samples, measure_tasks, measured)
