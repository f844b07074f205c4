"""One rank's service from start to end.

It plans, loads, and then executes one command after the other until it is asked to stop.
"""

import dataclasses
import functools
import json
import logging
import threading
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import uvicorn

from fsdp_qlora.config.marks import save_times
from fsdp_qlora.config.options import RESULT_OPTIONS, TrainConfig
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.data.batches.rows import join_completions
from fsdp_qlora.data.batches.schedule import RowsInMemory, Schedule
from fsdp_qlora.data.longest_rows import longest_of_table
from fsdp_qlora.distributed.device import free_gpu_memory
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision import exits
from fsdp_qlora.distributed.supervision.stops import Control, Signals
from fsdp_qlora.distributed.supervision.watchdog import Watchdog
from fsdp_qlora.export.save_results import copy_for_server
from fsdp_qlora.model.architecture.config import at_most_positions
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.kernels.in_use import using_ways
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import (
    PlacedModel,
    adapter_bytes,
    check_resources,
    least_free,
    place,
)
from fsdp_qlora.planning.plan import plan_model
from fsdp_qlora.planning.report import PlanReport
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.teacher import TEACHER, teacher_config
from fsdp_qlora.run.base import FetchedBase, PlannedBase
from fsdp_qlora.run.build_trainer import build_trainer
from fsdp_qlora.run.load_model import result_form
from fsdp_qlora.run.session import SupervisedSession, enter_rank, open_supervised_session
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.service.access import (
    Access,
)
from fsdp_qlora.service.adapter_store import AdapterStore
from fsdp_qlora.service.app import make_app
from fsdp_qlora.service.client_requests import ClientRequests
from fsdp_qlora.service.command_reader import Base
from fsdp_qlora.service.commands import Sample, share
from fsdp_qlora.service.connections import Connections
from fsdp_qlora.service.failures import Failures
from fsdp_qlora.service.folder_identity import check_identity, note_ways, ways_before
from fsdp_qlora.service.messages import Limits
from fsdp_qlora.service.opening import Opened, ServeOptions, open_folder_and_port
from fsdp_qlora.service.reasons import reason_of
from fsdp_qlora.service.sample_server import SampleServer
from fsdp_qlora.service.sampler import RequestSampler
from fsdp_qlora.service.sampling import Drawing
from fsdp_qlora.service.scheduler import Scheduler
from fsdp_qlora.service.served_adapters import ServedAdapters
from fsdp_qlora.service.served_images import ServedImages
from fsdp_qlora.service.training import RequestTargets, RequestTrainer
from fsdp_qlora.service.worker import Worker
from fsdp_qlora.training.loop import gc_frozen
from fsdp_qlora.training.rl.client import Server, check_server
from fsdp_qlora.training.rl.server_answers import ServerAnswers
from fsdp_qlora.utils.errors import RunStopped, UserError
from fsdp_qlora.utils.run_files import ADAPTERS
from fsdp_qlora.utils.text import fit_line, format_bytes

log = logging.getLogger("fsdp_qlora")

# Of a token's hidden state, for each of its targets: chosen, in the compute dtype, its gradient.
_HIDDEN_COPIES = 3
_PAUSE_SECONDS = 0.5  # between two signs of life while nothing is to do
_BY_GLOO = torch.device("cpu")  # a GPU would be busy while ranks wait
_LESS_MEMORY = (
    "a smaller --context_length or --batch_size, --use_cpu_offload true, more or larger GPUs"
)


def serve(config: TrainConfig, options: ServeOptions) -> None:
    """Serve one base to many clients. Called on every rank.

    Raises:
        UserError: the options, the model, the folder or the port cannot be used.
        RunStopped: it was asked to stop. Others as of `run.train.run`.
    """
    ranks = enter_rank(config)
    if config.dry_run:
        _plan(config, ranks, None, options)
        return
    with open_supervised_session(ranks, Signals(), hang_minutes=config.hang_minutes) as session:
        _serve_in_session(config, options, session)


def _serve_in_session(
    config: TrainConfig, options: ServeOptions, session: SupervisedSession
) -> None:
    """Plan, load and work, until the ranks agree to stop. Nothing of the models is left then."""
    ranks = session.ranks
    store = session.store
    with session.kept_until_all_connect():
        # First of all: a port or a folder that is in use is no reason to plan for minutes.
        opened = open_folder_and_port(options) if ranks.is_rank_0 else None
        if opened is not None and options.rollout_url is not None:
            check_server(options.rollout_url, (config.model_name, config.base_name))
        planned = _plan(config, ranks, store, options)
        for base in planned:
            check_resources(base.config, base.placed)
        # Only when all fit: a download may take an hour.
        bases = [base.fetch() for base in planned]
        before = None
        if opened is not None:
            before = ways_before(opened.records)
            check_identity(opened.records, options.folder, bases[0])
        planned_models = [base.placed.model for base in bases]
        kernels = TriedKernels.of(bases[0].config, *planned_models, graphed=["answers"])
    # The group owns the store from then on, so what else needs a part of it takes it before.
    failures = Failures(session.store_of("commands"), ranks)
    session.start_group(bases[0].placed.layout)
    # The folder is rank 0's, and all ranks compute in the same ways.
    of_rank_0 = all_gather_strings(json.dumps(before), kernels.device)[0]
    ways = kernels.choose(json.loads(of_rank_0))
    if opened is not None:
        note_ways(opened.records, ways)
    with using_ways(ways):
        _load_and_work(bases, opened, options, session, failures)


def _load_and_work(
    bases: list[FetchedBase],
    opened: Opened | None,
    options: ServeOptions,
    session: SupervisedSession,
    failures: Failures,
) -> None:
    """Load the base, and the teacher if there is one; then do the work of clients."""
    config = bases[0].config
    ranks = session.ranks
    scheduler = None
    control = Control(is_rank_0=ranks.is_rank_0, signals=session.signals)
    with exits.loading_explained(ranks.rank, _LESS_MEMORY):
        workers = [_loaded(base, control) for base in bases]
    free = least_free(Machine.of(config, ranks), "the memory for answers", session.store)
    for worker in workers:
        worker.sampling.free = free
        # A request is refused by the limits of rank 0, so they must be those of the fullest rank.
        own = [worker.limits.targets_at_once, worker.limits.image_values]
        targets, values = gather_numbers(own, _BY_GLOO).amin(0).tolist()
        worker.limits = dataclasses.replace(
            worker.limits, targets_at_once=int(targets), image_values=int(values)
        )
    if opened is not None:
        sample_server = None
        if options.rollout_url is not None:
            sample_server = _sample_server(workers[0], config, options)
        described = [*map(_described, bases, workers)]
        scheduler = _start_server(described, opened, config, options, sample_server)
    watchdog = Watchdog(
        control.heartbeat,
        session.presence,
        hang_minutes=config.hang_minutes,
        output_dir=options.folder,
    )
    session.signals.is_starting = False
    with exits.reporting_failures(watchdog, memory_settings=_LESS_MEMORY), watchdog.watching():
        _work(workers, scheduler, control, failures)


def _plan(
    config: TrainConfig, ranks: Ranks, store: dist.Store | None, options: ServeOptions
) -> list[PlannedBase]:
    """Plan the base, and the teacher in the memory that the base leaves of a GPU."""
    machine = Machine.of(config, ranks)
    bases = [_planned(config, machine, store)]
    placed = bases[0].placed
    # Other adapters change more than A and B, which is all that the service keeps.
    plain = (
        config.kind.adapter,
        config.rank_pattern,
        config.use_rslora,
        config.init_lora_weights,
        config.merge_aware,
        config.adapter,
    )
    if plain != ("lora", (), False, "true", False, None) or placed.model.trains_whole_modules:
        raise UserError(
            "serve trains new, plain LoRA adapters only: give --train_type qlora, lora, int8_lora "
            "or hqq_lora."
        )
    size = format_bytes(adapter_bytes(placed))
    line = "Adapters: of rank %d at most, each of the %d in memory takes %s of a rank's host memory"
    log.info(line, config.lora_rank, options.max_models, size)
    if options.teacher:
        log.info("%s", fit_line("Teacher: ", options.teacher))
        # Both are planned before either is loaded, so the base's memory still counts as free.
        if machine.gpu_memory:
            left = machine.gpu_memory[0] - placed.memory.reserved
            machine = dataclasses.replace(machine, free=max(0, left))
        teacher_options = teacher_config(dataclasses.replace(config, teacher=options.teacher))
        # The trainer needs one, which has no work: nothing of the teacher trains.
        teacher_options = dataclasses.replace(teacher_options, optimizer="sgd")
        teacher_store = dist.PrefixStore(TEACHER, store) if store else None
        bases.append(_planned(teacher_options, machine, teacher_store))
    return bases


def _planned(config: TrainConfig, machine: Machine, store: dist.Store | None) -> PlannedBase:
    """Plan a step of rows as long as the options or the model allow, and log it."""
    plan = plan_model(config, machine, store)
    if config.context_length == "auto":
        config = dataclasses.replace(
            config, context_length=at_most_positions(plan.config, config.longest_row)
        )
    placed = place(config, plan, store=store)
    for line in PlanReport.of(placed).lines():
        log.info("%s", line)
    return PlannedBase(config, placed, store)


def _loaded(base: FetchedBase, control: Control) -> Worker:
    """Load a base; on a GPU its longest rows are tried."""
    config = base.config
    placed = base.placed
    plan = placed.model
    ranks = placed.model.machine.ranks
    size = config.batch_size
    images = ServedImages(config, plan)
    mesh = base.load().mesh
    schedule = Schedule(
        num_rows=1,
        batch_size=size,
        global_batch_size=1,
        data_size=placed.layout.data_size,
        num_epochs=1,
        max_steps=1,
        seed=config.seed,
        batching=config.batching,
        context_length=config.longest_row,
    )
    targets = RequestTargets()
    with images.trial() as rows_with_images:
        trainer = build_trainer(
            config,
            Plan(placed, rows_with_images, schedule, warmup_steps=0),
            ranks,
            control,
            targets,
        )
    # A pass of the largest request that is allowed: a lack of memory shows now, not in a request.
    if ranks.device.type == "cuda":
        row = np.zeros(config.longest_row, np.int32)
        table = join_completions([row[:1]] * size, [row[1:]] * size, np.arange(size))
        rows = RowsInMemory(table, np.arange(size))
        trainer.try_longest(longest_of_table(rows, trainer.collator))
    options = {
        name: value for name, value in resolved_options(config).items() if name in RESULT_OPTIONS
    }
    adapters = AdapterStore(trainer, mesh, result_form(config, plan), options)
    limits = _limits(config, placed, images)
    beat = functools.partial(control.heartbeat.beat, 0, "compute")
    return Worker(
        RequestTrainer(adapters, targets),
        RequestSampler(adapters, placed, limits.vocabulary, beat),
        limits,
        images,
    )


def _limits(config: TrainConfig, placed: PlacedModel, images: ServedImages) -> Limits:
    """The limits of a request.

    It may have as many targets at once, and as many values of images, as fit into half of what the
    loaded model leaves.
    """
    plan = placed.model
    machine = plan.machine
    if machine.device.type == "cuda":
        free, _ = free_gpu_memory(machine.device)
    else:
        free = psutil.virtual_memory().available // machine.ranks.local_world_size
    hidden_bytes = block_shapes(plan.config)[0].hidden * plan.precision.compute_dtype.itemsize
    targets = free // 2 // (_HIDDEN_COPIES * hidden_bytes)
    tokens = config.batch_size * config.longest_row
    vocabulary = plan.meta.model.get_input_embeddings().num_embeddings
    values = int(free // 2 / images.value_bytes)
    return Limits(vocabulary, config.longest_row - 1, tokens, max(tokens, targets), values)


def _described(base: FetchedBase, worker: Worker) -> Base:
    """The base's description for clients."""
    config = base.config
    here = Path(base.config.model_name).expanduser()
    names = [*dict.fromkeys(filter(None, (config.base_name, config.model_name, here.name)))]
    tokenizer = str(here.resolve()) if here.is_dir() else config.model_name
    return Base(names, tokenizer, worker.limits, worker.images.base)


def _sample_server(worker: Worker, config: TrainConfig, options: ServeOptions) -> SampleServer:
    """The server that draws the samples of the trained base."""
    assert options.rollout_url is not None
    server = Server(options.rollout_url, (config.model_name, config.base_name), config.hang_seconds)
    sampler = worker.sampling
    copy_adapter = functools.partial(copy_for_server, worker.adapters.trainer.model)

    def answers_of(drawing: Drawing) -> ServerAnswers:
        stops = sampler.stops(drawing)
        return ServerAnswers(server, stops, stops.texts, drawing.options(), sampler.vocabulary)

    adapters = ServedAdapters(server, copy_adapter, options.folder / ADAPTERS)
    return SampleServer(server, adapters, sampler.checks, answers_of)


def _start_server(
    bases: list[Base],
    opened: Opened,
    config: TrainConfig,
    options: ServeOptions,
    sample_server: SampleServer | None,
) -> Scheduler:
    """Answer requests in a thread of rank 0; returns the scheduler that has the work."""
    steps, minutes = save_times(config.save_every)
    scheduler = Scheduler(
        opened.records,
        options.folder,
        bases,
        max_rank=config.lora_rank,
        max_models=options.max_models,
        save_times=(steps, 60 * minutes),
        server=sample_server,
    )
    requests = ClientRequests(scheduler)
    scheduler.results.on_done = requests.waiting.wake
    connections = Connections()
    access = Access(make_app(requests), opened.key, options.host, on_allowed=connections.trust)
    settings = uvicorn.Config(
        access,
        http=connections.protocol(),
        ws="none",
        proxy_headers=False,  # an address is that of the connection
        log_level="warning",
    )
    server = uvicorn.Server(settings)
    threading.Thread(target=server.run, kwargs={"sockets": [opened.listening]}, daemon=True).start()
    host, port, *_ = opened.listening.getsockname()
    names = " and ".join(base.names[0] for base in bases)
    log.info(
        "Serving %s at http://%s:%d. Ctrl-C ends it, and the same command continues.",
        names,
        host,
        port,
    )
    return scheduler


@gc_frozen()
def _work(
    workers: list[Worker], scheduler: Scheduler | None, control: Control, failures: Failures
) -> None:
    """Execute the commands of rank 0 on all ranks, until they agree to stop."""
    ranks = workers[0].adapters.trainer.ranks
    while True:
        # Rank 0 decides for all: the others have no queue, and wait in the collectives below.
        command = scheduler.take(_PAUSE_SECONDS) if scheduler is not None else None
        control.heartbeat.beat(0, "rows")
        control.agree(gather_numbers(control.flags(0), _BY_GLOO))
        if control.stop:
            raise RunStopped(control.stop.state, f"The service has ended ({control.stop.reason}).")
        command = share(command, ranks)
        if command is None:
            continue
        worker = workers[command.base if isinstance(command, Sample) else 0]
        lost = list[str]()
        try:
            results = worker.execute(command)
        except UserError as error:  # on every rank, and nothing is in between
            reason = str(error)
        except Exception as error:
            if not failures.are_of_all_ranks(error):
                raise
            reason = reason_of(error, "done")
            lost = worker.recover()
        else:
            if scheduler is not None:
                scheduler.finish(results)
            continue
        if scheduler is not None:
            scheduler.refuse(reason, lost)
