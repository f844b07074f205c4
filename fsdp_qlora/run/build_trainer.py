"""Builds the trainer of a loaded model, and opens the source of its rows."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.checkpoint.start import Start
from fsdp_qlora.config.marks import OF_ADAPTER
from fsdp_qlora.config.objectives import LossSettings, Reference
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.data.batches.cache import add_reference
from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.graph_lengths import filled_length
from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import RowsInMemory, RowSource, Schedule
from fsdp_qlora.data.batches.target_values import TargetValues
from fsdp_qlora.data.longest_rows import longest_rows
from fsdp_qlora.data.prompts import rows_of_answers
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.context import join_context
from fsdp_qlora.distributed.device import shares_host_memory
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.export.save_results import save_adapter
from fsdp_qlora.export.values import LiveValues
from fsdp_qlora.model.architecture.attention import reads_bounds
from fsdp_qlora.model.architecture.token_mixers import layers_apart
from fsdp_qlora.model.kernels.in_use import GRAPHS, ways_in_use
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.planning.fit import fit_on_gpu
from fsdp_qlora.planning.plan import quantizer_options
from fsdp_qlora.planning.reading import warn_of_padded_rope
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.host_link import describe_link
from fsdp_qlora.sharding.graphed import GraphedBlocks
from fsdp_qlora.sharding.optimizer import ShardedOptimizer
from fsdp_qlora.sharding.recompute import (
    ReferencePass,
    keeps_attention,
    reserve_host_memory,
    set_graphs,
    set_keeps_attention,
)
from fsdp_qlora.sharding.vocabulary import sharing_ranks
from fsdp_qlora.training.episodes.play import Episodes
from fsdp_qlora.training.forward import ForwardPass, log_probabilities, token_logprobs
from fsdp_qlora.training.generation.generator import KeptWeights
from fsdp_qlora.training.generation.sampling import SamplingOptions, Stops
from fsdp_qlora.training.image_inputs import image_inputs_of
from fsdp_qlora.training.image_probe import probe_images
from fsdp_qlora.training.image_reference import check_image_reference
from fsdp_qlora.training.objective import make_objective
from fsdp_qlora.training.probes import Probed, check_context, probe_packing
from fsdp_qlora.training.rl.ahead import (
    Ahead,
    prompts_of_generation,
    versions_of_checkpoints,
)
from fsdp_qlora.training.rl.answerer import Answerer
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.own_engine import OwnEngine, Room
from fsdp_qlora.training.rl.server_engine import ServerEngine
from fsdp_qlora.training.rl.server_requests import ImageSender
from fsdp_qlora.training.rl.source import Rollouts
from fsdp_qlora.training.setup import Setup
from fsdp_qlora.training.teacher import Teacher
from fsdp_qlora.training.trainer import Trainer, TrainerOptions
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.run_files import ADAPTERS, CHECKPOINTS, EPISODES_FILE, ROLLOUTS_FILE

log = logging.getLogger("fsdp_qlora")


def build_trainer(
    config: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    control: Control | None = None,
    target_values: TargetValues | None = None,
) -> Trainer:
    """The trainer of a loaded model, with its optimizer.

    Called on every rank. target_values: as in `Collator`.
    """
    control = control or Control()
    forward = build_forward(config, plan, ranks, control, target_values)
    decided = config.objective_row.decided(config)
    optimizer = ShardedOptimizer(
        forward.model,
        config.optimizer,
        lr=decided.lr,
        weight_decay=config.wd,
        lr_ratio_B=config.loraplus_lr_ratio,
    )
    options = config.pick(
        TrainerOptions,
        learning_rate=decided.lr,
        warmup_steps=plan.warmup_steps,
        total_steps=plan.schedule.total_steps,
        max_grad_norm=config.grad_norm or math.inf,
        num_replicas=plan.placed.layout.num_replicas,
        sync_every_micro_batch=not plan.placed.placement.accumulates,
    )
    settings = config.pick(
        LossSettings,
        beta=decided.beta,
        loss_type=decided.loss_type,
        epsilon=decided.epsilon,
    )
    return Trainer(
        forward,
        optimizer,
        make_objective(config.objective, settings, forward.context),
        options,
        control,
    )


def build_forward(
    config: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    control: Control,
    target_values: TargetValues | None = None,
) -> ForwardPass:
    """The forward pass of a loaded model, which tries a few tokens. Called on every rank."""
    model: PreTrainedModel = plan.model.meta.model
    quantizer = config.kind.quantizer
    is_exact = quantizer is None or QUANTIZERS[quantizer].linear.is_exact
    probed = Probed(model, plan.model.documents, ranks, plan.model.precision, is_exact)
    schedule = plan.schedule
    if config.batching != "padded":
        schedule = padded_if_needed(config, plan, probed)
    context = join_context(ranks, plan.placed.layout.context_size)
    if context.size > 1:
        check_context(probed, context)
    objective = config.objective_row
    row_kind = objective.kind_of_rows(config)
    collator = Collator(
        schedule,
        # No token attends to the padding, so any id of the vocabulary will do; the pad token may be
        # outside it.
        pad_token_id=plan.model.tokenizer.eos_token_id,
        rank=ranks.rank,
        context_size=context.size,
        sharing_ranks=sharing_ranks(model),
        fills_up=ways_in_use().blocks == GRAPHS,
        has_teacher=row_kind.has_teacher,
        target_values=target_values,
        image_inputs=image_inputs(plan),
    )
    collator = padded_if_images_need_it(plan, probed, collator)
    shares = row_kind.shares_prompts and shares_prompts(plan, collator.schedule, probed)
    collator = dataclasses.replace(collator, shares_prompts=shares)
    if collator.schedule.padding:
        # It was planned before the loaded model was tried.
        set_keeps_attention(model, False)
    has_reference = objective.reference_beside(config) is not Reference.NONE
    forward = ForwardPass(
        model,
        ranks,
        collator,
        plan.model.precision,
        attention=None if collator.schedule.padding else plan.model.documents,
        reference=ReferencePass(model, towers_of(plan)) if has_reference else None,
        temperature=config.temperature,
        context=context,
        heartbeat=control.heartbeat,
        towers=towers_of(plan),
        neftune_alpha=config.neftune_alpha,
    )
    _try_forward(forward, plan.data)
    if ways_in_use().blocks == GRAPHS:
        longest = filled_length(plan.placed.step.num_tokens)
        by_bounds = reads_bounds(model.config, forward.attention)
        set_graphs(model, GraphedBlocks(longest, by_bounds=by_bounds))
    return forward


def _try_forward(forward: ForwardPass, data: RunData) -> None:
    """Find how a model's loss and its reference can be computed, before a step depends on it."""
    forward.probe()
    if forward.reference and data.have_images:
        table = _rows_with_images(data, has_teacher=forward.collator.has_teacher)
        check_image_reference(forward, table)


def towers_of(plan: Plan) -> list[nn.Module]:
    """The parts of the model that compute images."""
    return [*plan.model.meta.parts.towers.values()]


def image_inputs(plan: Plan) -> ImageInputs | None:
    """Makes the arguments for images of the plan's model, if it takes any."""
    return image_inputs_of(plan.model.meta.model, plan.data.image_processor)


def precompute_reference(
    config: TrainConfig, plan: Plan, trainer: Trainer, facts: Mapping[str, Any]
) -> Plan:
    """Add to the plan's rows their log-probabilities under the model that training starts from.

    Called on every rank, with the facts of the run's identity on rank 0, before a checkpoint is
    loaded.
    """
    data = plan.data
    # The key names all that the first model depends on: other runs of it use the same file.
    names = sorted({"train_type", "quant_type", *quantizer_options(config, config.kind.quantizer)})
    # A new LoRA adapter has B = 0 and changes nothing at first, so its options do not count.
    if config.adapter or config.init_lora_weights != "true":
        names += ["seed", *names_marked(OF_ADAPTER)]
    model_facts = dict(facts) | {
        "rows": None,  # of each table by themselves
        "options": {name: getattr(config, name) for name in names},
    }
    # Rank 0 alone knows the hashes of the weights, and the ranks must agree which rows are missing.
    [key, *_] = all_gather_strings(json.dumps(model_facts), trainer.ranks.device)
    tables = [data.train]
    if data.evaluation is not data.train:
        tables.append(data.evaluation)
    compute = partial(log_probabilities, trainer.forward)
    tables = [
        add_reference(table, [key], partial(compute, table), trainer.ranks) for table in tables
    ]
    data = dataclasses.replace(data, train=tables[0], evaluation=tables[-1])
    return dataclasses.replace(plan, data=data)


def padded_if_needed(config: TrainConfig, plan: Plan, probed: Probed) -> Schedule:
    """The schedule, with padding if the loaded model needs it. Called on every rank."""
    reason = probe_packing(probed)
    apart = ", ".join(layers_apart(probed.model))
    if config.objective_row.kind_of_rows(config).has_teacher and (reason or apart):
        raise UserError(
            f"--objective {config.objective}: in this model a teacher's tokens cannot follow the "
            f"student's: {reason or apart}."
        )
    if reason is None:
        if apart:
            log.info(
                "Rows are computed apart in layers that mix tokens without attention: %s.", apart
            )
        return dataclasses.replace(plan.schedule, batching=config.batching)
    if plan.placed.layout.context_size > 1:
        name = type(probed.model).__name__
        raise UserError(
            f"--context_parallel_size cannot divide {name}, whose rows must be padded: {reason}."
        )
    return _padded(dataclasses.replace(plan.schedule, batching=config.batching), plan, reason)


def padded_if_images_need_it(plan: Plan, probed: Probed, collator: Collator) -> Collator:
    """The collator, with padding if the loaded model needs it for rows with images.

    Called on every rank.
    """
    data = plan.data
    if collator.schedule.padding or not data.have_images:
        return collator
    reason = probe_images(probed, collator, _rows_with_images(data), towers_of(plan))
    if reason is None:
        return collator
    if collator.has_teacher:
        raise UserError(
            "A teacher's tokens follow the student's without padding, and with images this model "
            f"needs padding: {reason}."
        )
    return dataclasses.replace(collator, schedule=_padded(collator.schedule, plan, reason))


def _rows_with_images(data: RunData, *, has_teacher: bool = False) -> TokenizedRows:
    """A table of the run of which rows have images: of prompts with a short answer each.

    has_teacher: whether rows of prompts have a teacher's document, too.
    """
    tables = [table for table in (data.train, data.evaluation) if len(table.images)]
    if tables:
        return tables[0]
    places = np.flatnonzero(data.prompts.rows.images.counts)
    shortest = places[np.argsort(data.prompts.rows.lengths[places], kind="stable")[:2]]
    return rows_of_answers([*data.prompts.chosen(shortest)], 1, has_teacher=has_teacher)


def _padded(schedule: Schedule, plan: Plan, reason: str) -> Schedule:
    """The schedule with padding, and a line that says why."""
    no_packing = ""
    if schedule.batching == "packed":
        no_packing = ", and --batching packed has no effect"
    log.info("Rows are padded with this model%s: %s.", no_packing, reason)
    # Otherwise the plan has padded rows, and has said it when it read them.
    if plan.model.documents is not None and not plan.schedule.padding:
        warn_of_padded_rope(plan.model, plan.data)
    return dataclasses.replace(schedule, batching="padded")


def shares_prompts(plan: Plan, schedule: Schedule, probed: Probed) -> bool:
    """Whether the shared prompt of a pair, or of answers, can be computed once.

    Logs the answer. Called on every rank.
    """
    in_rows = len(plan.data.known_rows.splits) > 0
    reason: str | None = schedule.why_apart(in_rows=in_rows)
    if not reason:
        # With the tolerance of bfloat16: a prompt that is computed once is summed in another order.
        reason = probe_packing(probed._replace(is_exact=False), num_shared=3)
        context_size = plan.placed.layout.context_size
        if context_size > 1 and not plan.placed.model.shares_tokens(context_size):
            reason = reason or "ranks that share a row have one state for a document"
    if reason:
        log.info("A prompt is computed with each of its answers: %s.", reason)
    elif not in_rows:
        log.info("A prompt is computed once for its answers in a micro-batch.")
    else:
        data = plan.data.train
        useful = len(data.input_ids) / data.computed(shares_prompts=True).own.sum()
        log.info(
            "The prompt of a pair is computed once: %.2f tokens of both answers per token "
            "computed.",
            useful,
        )
    return reason is None


def open_source(
    config: TrainConfig,
    plan: Plan,
    setup: Setup,
    trainer: Trainer,
    folder: Path,
    run_id: str,
    teacher: Teacher | None,
) -> RowSource:
    """Return the run's rows: the dataset, or completions that the model generates."""
    if not plan.data.prompts:
        return RowsInMemory(plan.data.train, plan.data.train_rows)
    stops = Stops(plan.model.tokenizer, trainer.model, setup.stop_text)
    if setup.tool_turns:
        stops.tokens |= setup.tool_turns.end_ids
    # Answers of an earlier version of the adapter are weighed by how likely that one found them.
    looks_back = config.num_iterations > 1 or config.rollout_url
    adapters = folder / ADAPTERS / run_id
    ahead = None
    episodes = None
    if config.rollout_ahead:
        ahead = Ahead(
            open_server(config, plan, trainer, stops, adapters),
            partial(prompts_of_generation, plan.data, trainer.schedule),
            partial(versions_of_checkpoints, folder / CHECKPOINTS, config.num_iterations),
        )
        complete = ahead.complete
    else:
        engine = open_engine(config, plan, trainer, stops, adapters)
        complete = engine.complete
        if setup.environments:
            path = folder / EPISODES_FILE
            stage = setup.stage(config.max_turns, config.max_completion_length, path)
            rewards = setup.environments.rewards
            episodes = Episodes(engine.play, stage, trainer.ranks, rewards)
    return Rollouts(
        data=plan.data,
        answerer=Answerer(complete, stops.text_of, ahead, episodes),
        scorer=setup.scorer,
        path=folder / ROLLOUTS_FILE,
        ranks=trainer.ranks,
        control=trainer.control,
        logprobs=partial(token_logprobs, trainer.forward) if looks_back else None,
        scale_rewards=config.scale_rewards,
        next_check=1 if config.rollout_url else None,
        teacher=teacher,
    )


def open_server(
    config: TrainConfig, plan: Plan, trainer: Trainer, stops: Stops, adapters: Path
) -> ServerEngine:
    """The server that answers prompts. adapters: as of `open_engine`."""
    assert config.rollout_url is not None
    model = trainer.model
    adapter = plan.model.adapter
    assert adapter is not None
    # Every rank takes part in gathering the adapter's values; rank 0 writes them.
    values = LiveValues(keeps=trainer.ranks.is_rank_0)
    processor = plan.data.image_processor
    return ServerEngine(
        Server(config.rollout_url, (config.model_name, config.base_name), config.hang_seconds),
        lambda folder: save_adapter(model, adapter, folder, values=values, for_server=True),
        adapters,
        trainer.ranks,
        trainer.control,
        stops,
        sampling_options(config, plan),
        vocab_size=model.get_input_embeddings().num_embeddings,
        image_sender=ImageSender(processor) if processor else None,
    )


def sampling_options(config: TrainConfig, plan: Plan) -> SamplingOptions:
    """How answers are sampled.

    Where prompts have images, no answer has a token at which the model would look for one.
    """
    processor = plan.data.image_processor
    never = processor.image_ids if processor and plan.data.have_images else ()
    return SamplingOptions(
        config.max_completion_length,
        config.temperature,
        seed=config.seed,
        never=tuple(sorted(never)),
    )


def open_engine(
    config: TrainConfig, plan: Plan, trainer: Trainer, stops: Stops, adapters: Path
) -> ServerEngine | OwnEngine:
    """The engine that answers prompts.

    adapters: folder of adapters for a server, with the beginning of their names.
    """
    options = sampling_options(config, plan)
    model = trainer.model
    generation = plan.generation
    if config.rollout_url:
        return open_server(config, plan, trainer, stops, adapters)
    assert generation is not None
    return OwnEngine(
        model,
        trainer.ranks,
        trainer.control,
        plan.model.precision,
        stops,
        options,
        Room(generation.at_a_time, int(plan.data.lengths.max())),
        KeptWeights(generation.decoded > 0, generation.stays),
        keeps_gathered=generation.gathered > 0,
        image_inputs=image_inputs(plan),
    )


def try_memory(config: TrainConfig, plan: Plan, trainer: Trainer, start: Start) -> None:
    """Try the longest rows on the GPU. How many blocks must recompute is found if that is open."""
    longest = longest_rows(plan.data, trainer.collator)
    if keeps_attention(trainer.model) and (start.failed_starts or start.too_few is not None):
        log.info("Attention is computed again, since an earlier start ended or ran out of memory.")
        set_keeps_attention(trainer.model, False)
    if config.recompute != "auto":
        if config.recompute == "host":
            device = trainer.ranks.device
            describe_link(config, plan, device)
            size = plan.placed.memory.host.get("activations", 0)
            # Before a pass, in which other ranks would wait for one whose memory cannot be pinned.
            reserve_host_memory(trainer.model, size, device)
        trainer.try_longest(longest)
    elif start.failed_starts:
        # The trial itself may have ended it: the safest setting comes before the fastest.
        log.info("Recompute: all blocks, since the last start ended before it made progress.")
        trainer.try_longest(longest)
    elif ways_in_use().blocks == GRAPHS:
        log.info("Recompute: all blocks, which run as CUDA graphs.")
        trainer.try_longest(longest)
    else:
        memory = plan.placed.memory
        moved_bytes = memory.block + memory.block_input
        if shares_host_memory(trainer.ranks.device):
            moved_bytes = 0
        fit_on_gpu(
            trainer,
            longest,
            block_bytes=memory.block,
            moved_bytes=moved_bytes,
            too_few=start.too_few,
        )
