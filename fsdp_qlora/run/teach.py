"""A teacher's pass over the rows, before the student is loaded or without one: its likeliest tokens go to files."""

import dataclasses
import gc
import json
import logging
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.taught import TEACHER, OfTargets, TaughtRows, target_numbers
from fsdp_qlora.distributed.device import configure_kernels
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    process_group_closed,
    release_cached_memory,
    start_process_group,
)
from fsdp_qlora.distributed.ranks import Ranks, read_ranks, set_up_logging
from fsdp_qlora.distributed.store import connect, kept_until_all_connect
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.planning.plan import build_plan, quantizer_options, read_model
from fsdp_qlora.planning.run_plan import Plan, make_plan, teacher_config
from fsdp_qlora.run.load_model import build_forward, fetch_weights, load_model, open_weights
from fsdp_qlora.training.divergence import Likeliest
from fsdp_qlora.training.forward import ForwardPass, likeliest_of_rows
from fsdp_qlora.training.rl.engine import Server, ServerTeacher
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import cache_folder, fingerprint_files, read_json, record_of, refusal_named, staged_file

log = logging.getLogger("fsdp_qlora")


def teach(config: TrainConfig) -> None:
    """Leave what the teacher says of the rows in output_dir. Called on every rank."""
    configure_kernels()
    ranks, output = read_ranks(config.device), Path(config.output_dir).expanduser()
    set_up_logging(ranks, verbose=config.verbose)
    with process_group_closed():
        store = connect(ranks)
        with kept_until_all_connect(store, ranks):
            plan = make_plan(config, ranks, store)
            if plan.teacher is None:
                raise UserError("teach needs --objective distill and --teacher NAME, which is loaded here.")
            fetch_weights(teacher_config(config), plan.teacher.model, ranks, store)
        start_process_group(ranks, store, layout=plan.placed.layout)
        taught_by_teacher(dataclasses.replace(config, **plan.chosen), plan, ranks, Control(), output)
    log.info("Taught: give --teacher %s to a run with the same rows and options", output)


def taught_by_teacher(
    config: TrainConfig, plan: Plan, ranks: Ranks, control: Control, output: Path | None = None
) -> OfTargets | None:
    """The teacher's likeliest tokens, read or computed, or told by its server; None if no other model teaches.

    Called on every rank, with the teacher's files here. Nothing of the teacher is left in memory.

    Args:
        output: where its files go, if not to the cache.
    Raises:
        UserError: --teacher is such a folder, and lacks files of these rows or is of other options.
    """
    own, vocabulary = teacher_config(config), plan.model.meta.model.get_input_embeddings().num_embeddings
    wanted = Likeliest(min(config.top_k, vocabulary), vocabulary)
    if config.teacher_url:
        server = Server(config.teacher_url, [config.teacher], config.hang_seconds)
        return ServerTeacher(server, *wanted, ranks, control)
    kept, root = read_json(Path(config.teacher or "").expanduser() / TEACHER), output or cache_folder() / "taught"
    if kept and config.teacher:
        key, wanted, root = kept["key"], wanted._replace(k=kept["top_k"]), Path(config.teacher).expanduser()
    elif plan.teacher:
        [key, *_] = all_gather_strings(_key(own, plan, vocabulary) if ranks.is_rank_0 else "", ranks.device)
    else:
        return None
    if output and ranks.local_rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        with refusal_named("output_dir", output), staged_file(output / TEACHER) as partial:
            partial.write_text(json.dumps({"key": key, "top_k": wanted.k, "teacher": config.teacher}))
    filled = filter(len, (plan.data.train, plan.data.evaluation))
    tables = {table.digest: TaughtRows(table, root, key, wanted.k) for table in filled}
    missing = [(taught, number) for taught in tables.values() for number in _missing(taught, ranks)]
    if kept and (missing or json.loads(key)[-2:] != [config.temperature, vocabulary]):
        raise UserError(
            f"--teacher {config.teacher} has other rows, or is of another --temperature or vocabulary: {len(missing)} "
            "files are missing. Run `fsdp-qlora teach` to its end, with the same options of rows and student."
        )
    if missing:
        forward = _load(own, plan, ranks, control)
        for taught, number in tqdm(missing, "Teacher", unit=" files", disable=not ranks.is_rank_0):
            found = likeliest_of_rows(forward, taught.table, taught.files[number], wanted)
            if ranks.local_rank == 0:
                taught.write(number, found)
            gather_numbers([0], ranks.device)  # now it is there
            assert taught.read(number)
        del forward
        gc.collect()  # modules and hooks know each other
        release_cached_memory(ranks.device)
    else:
        log.info("The teacher's probabilities are read from %s", next(iter(tables.values())).folder)
    return lambda table, rows: tables[table.digest].of_targets(table, rows)


def _key(own: TrainConfig, plan: Plan, vocabulary: int) -> str:
    """All that the teacher's probabilities depend on, besides the rows. own: the teacher's options."""
    assert plan.teacher is not None
    weights = fingerprint_files(open_weights(plan.teacher.model).files.files.values())
    adapter = record_of(read_adapter(Path(own.adapter).expanduser()).weights).sha256 if own.adapter else None
    options = {"quantizer": own.kind.quantizer, **quantizer_options(own, own.kind.quantizer)}
    return json.dumps([weights, adapter, options, plan.teacher.model.precision.name, own.temperature, vocabulary])


def _missing(taught: TaughtRows, ranks: Ranks) -> list[int]:
    """The files that a machine lacks; the same on every rank."""
    lacks = [not taught.read(number) for number in range(len(taught.files))]
    return np.flatnonzero(gather_numbers(lacks, ranks.device).any(dim=0)).tolist() if lacks else []


def _load(own: TrainConfig, plan: Plan, ranks: Ranks, control: Control) -> ForwardPass:
    """The teacher as it was planned, built once more: the plan's own would stay in memory."""
    assert plan.teacher is not None
    model = build_plan(own, plan.teacher.model.machine, *read_model(own))
    placed = dataclasses.replace(plan.teacher, model=model)
    load_model(own, placed, open_weights(model), ranks)
    release_cached_memory(ranks.device)
    return build_forward(own, dataclasses.replace(plan, placed=placed), ranks, control, target_numbers)
