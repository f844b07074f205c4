"""Prepares a run before a weight is read.

It sets up rewards and prompts, plans the model, and reads and schedules the rows.
"""

import dataclasses
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fsdp_qlora.checkpoint.decisions import agree_on_decisions
from fsdp_qlora.checkpoint.run_folder import is_finished
from fsdp_qlora.config.objectives import TEXTS
from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.data.batches.tokenization import describe_sample
from fsdp_qlora.data.learning_model import LearningModel, options_for, say_prompts
from fsdp_qlora.data.run_data import read_rows
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.export.upload import check_uploads
from fsdp_qlora.model.adapters.token_rows import with_token_rows
from fsdp_qlora.model.architecture.config import most_positions
from fsdp_qlora.observability.metric_log import refuse_sinks
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.plan import ModelPlan, plan_model, read_model, with_new_tokens
from fsdp_qlora.planning.reading import (
    earlier_run,
    needed_of,
    pick_data,
    read_held_out,
    read_planned_rows,
    say_kept_learning,
    with_kept_rows,
)
from fsdp_qlora.planning.run_plan import Plan, make_plan
from fsdp_qlora.planning.teacher import refuse_whole_logits
from fsdp_qlora.sharding.optimizer import check_optimizer
from fsdp_qlora.training.episodes.example import example_episode
from fsdp_qlora.training.episodes.own_rows import keep_rows
from fsdp_qlora.training.rl.client import check_server, check_takes_images
from fsdp_qlora.training.setup import Setup, SetupOptions, open_setup
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import fit_line

log = logging.getLogger("fsdp_qlora")

_SAMPLES = 3  # rows that --dry_run samples shows


class PreparedRun(NamedTuple):
    """A run that can be loaded. config: with the options that auto replaces."""

    config: TrainConfig
    setup: Setup
    plan: Plan


def check_services(config: TrainConfig, folder: Path) -> None:
    """Ask the hub and the servers that the run needs whether they will have it. For rank 0 only.

    Raises:
        UserError: one of them will not. RankError: it does not answer.
    """
    check_uploads(config)
    # A finished run asks no server: the same command says that there is nothing to do.
    if config.rollout_url and not is_finished(folder):
        check_server(config.rollout_url, (config.model_name, config.base_name))
    if config.teacher_url and not is_finished(folder):
        check_server(config.teacher_url, [config.teacher], "teacher_url")


def check_images(config: TrainConfig, plan: Plan, folder: Path) -> None:
    """Ask the server of rollouts whether it takes images, if prompts have some. For rank 0 only.

    Raises RankError: it takes none.
    """
    if config.rollout_url and plan.data.have_images and not is_finished(folder):
        check_takes_images(config.rollout_url, (config.model_name, config.base_name))


def refuse_new_tokens(config: TrainConfig, model: ModelPlan) -> None:
    """Raise UserError for an adapter with new tokens where the objective is not one of texts.

    The head's gradient of these rows has one factor for all tokens, and a reference would have the
    rows as they train.
    """
    if config.objective_row.kind_of_rows(config) != TEXTS and with_token_rows(model.meta.model):
        raise UserError(
            f"--objective {config.objective} trains an adapter on a frozen model, but --adapter "
            f"{config.adapter} has rows of new tokens. Merge it first: fsdp-qlora merge --adapter "
            f"{config.adapter} --out FOLDER. Then start from --model_name FOLDER."
        )


def with_own_rows(config: TrainConfig, setup: Setup) -> TrainConfig:
    """The options; where no dataset is given, the rows of the environment are the dataset."""
    rows = setup.environments.rows if setup.environments else ()
    if not rows or config.dataset != DEFAULTS.dataset:
        return config
    log.info("Dataset: the %s tasks of the environment", f"{len(rows):,}")
    return dataclasses.replace(config, dataset=(str(keep_rows(rows)),))


def prepare_run(config: TrainConfig, ranks: Ranks, store: dist.Store | None) -> PreparedRun:
    """Build the model without weights, read the rows, and describe the run. Called on every rank.

    What needs no long work comes first, so that wrong options are refused at once.

    Args:
        store: of the session; None for a dry run, which is one process.
    """
    machine = Machine.of(config, ranks)
    # Is refused if the ranks cannot be divided so.
    data_size = machine.data_size(config.context_size)
    check_optimizer(config.optimizer, machine.device)
    refuse_sinks(config.log_to)
    setup = open_setup(config.pick(SetupOptions), ranks, store)
    config = with_own_rows(config, setup)
    # A run that continues keeps what was decided about its rows at its beginning.
    decisions = agree_on_decisions(earlier_run(config, machine.world_size), ranks, store)
    asked = config
    config = with_kept_rows(asked, decisions)
    model = plan_model(config, machine, store)
    refuse_new_tokens(config, model)
    # Distributions of student and teacher are compared in chunks of tokens.
    if config.objective_row.distills:
        refuse_whole_logits(model)
    # Before the process group starts, so that no collective waits for the tokenizer.
    config, data = read_planned_rows(config, model, decisions, setup.tools, data_size=data_size)
    say_kept_learning(asked, config, model.tokenizer)
    held_out = read_held_out(config, model, data, decisions)
    setup = setup.with_rows(data, held_out, model.tokenizer)
    say_prompts(data, model.tokenizer, setup.stop_text, is_default=config.prompt_template is None)
    config, plan = make_plan(config, model, data, store, decisions.settings, held_out)
    if not config.dry_run:
        log.info(fit_line("Output: ", config.output_dir))
    return PreparedRun(config, setup, plan)


def show_samples(config: TrainConfig, ranks: Ranks) -> str:
    """The first rows as the model sees them. Only the model's tokenizer is needed."""
    setup = open_setup(config.pick(SetupOptions), ranks, None)
    config = with_own_rows(config, setup)
    decisions = agree_on_decisions(earlier_run(config), ranks, None)
    asked = config
    config = with_kept_rows(asked, decisions)
    folder, model_config, tokenizer = read_model(config)
    tokenizer, _ = with_new_tokens(config, model_config, tokenizer)
    model = LearningModel(config.model_name, folder, tokenizer)
    picked = pick_data(config, tools=setup.tools)
    needed = None
    if config.max_steps > 0:
        data_size = Machine.of(config, ranks).data_size(config.context_size)
        needed = needed_of(config, decisions, data_size)
    data = read_rows(
        tokenizer,
        options_for(picked, model, keeps_template=decisions.fills_template),
        vocab_size=len(tokenizer),
        longest=most_positions(model_config),
        needed=needed,
    )
    say_kept_learning(asked, config, tokenizer)
    sides = ("student", "teacher") if config.objective == "distill" else ()
    # NO_COLOR turns colours off: https://no-color.org.
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    num_samples = int(str(config.dry_run).partition("=")[2] or _SAMPLES)
    shown = partial(describe_sample, tokenizer=tokenizer, sides=sides, in_colour=in_colour)
    rows = [int(row) for row in data.train_rows[:num_samples]]
    setup = setup.with_rows(data, {}, tokenizer)
    if setup.environments and setup.environments.processes and setup.tool_turns:
        show = partial(example_episode, setup.environments.processes, setup.tool_turns)
        episodes = [show(data.prompts[row]) for row in rows]
        setup.environments.processes.close()
        return "\n\n".join(shown(episode, 0) for episode in episodes)
    return "\n\n".join(shown(data.known_rows, row) for row in rows)
