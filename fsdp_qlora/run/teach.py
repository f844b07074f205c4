"""A teacher's pass over the rows, before the student is loaded: its likeliest tokens go to files."""

import dataclasses
import gc
import json
import logging
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.taught import TaughtRows, target_numbers
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers, release_cached_memory
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.planning.plan import build_plan, quantizer_options, read_model
from fsdp_qlora.planning.run_plan import Plan, Teaching, teacher_config
from fsdp_qlora.run.load_model import build_forward, load_model, open_weights
from fsdp_qlora.training.divergence import Likeliest
from fsdp_qlora.training.forward import ForwardPass, likeliest_of_rows
from fsdp_qlora.utils.files import fingerprint_files, record_of

log = logging.getLogger("fsdp_qlora")


def taught_by_teacher(config: TrainConfig, plan: Plan, ranks: Ranks, control: Control) -> Plan:
    """The plan with what the teacher finds of its rows, read or computed. Called on every rank, with the files here.

    Nothing of the teacher is left in memory.
    """
    assert plan.teacher is not None and plan.teacher.placed is not None
    embedding = plan.model.meta.model.get_input_embeddings()
    wanted = Likeliest(min(config.top_k, embedding.num_embeddings), embedding.num_embeddings)
    [key, *_] = all_gather_strings(_key(config, plan, wanted) if ranks.is_rank_0 else "", ranks.device)
    tables = {table.digest: TaughtRows(table, key, wanted.k) for table in (plan.data.train, plan.data.evaluation)}
    missing = {digest: _missing(taught, ranks) for digest, taught in tables.items()}
    if any(missing.values()):
        forward = _load(config, plan, ranks, control)
        for digest, numbers in missing.items():
            _compute(forward, tables[digest], numbers, wanted)
        del forward
        gc.collect()  # modules and hooks know each other
        release_cached_memory(ranks.device)
    else:
        log.info("The teacher's probabilities are read from %s", next(iter(tables.values())).folder)
    teaching = Teaching(None, lambda table, rows: tables[table.digest].of_targets(table, rows))
    return dataclasses.replace(plan, teacher=teaching)


def _key(config: TrainConfig, plan: Plan, wanted: Likeliest) -> str:
    """All that the teacher's probabilities depend on, besides the rows."""
    own = teacher_config(config)
    assert plan.teacher is not None and plan.teacher.placed is not None
    weights = open_weights(plan.teacher.placed.model).files.files.values()
    adapter = record_of(read_adapter(Path(own.adapter).expanduser()).weights).sha256 if own.adapter else None
    options = {"quantizer": own.kind.quantizer, **quantizer_options(own, own.kind.quantizer)}
    precision = plan.teacher.placed.model.precision.name
    return json.dumps([fingerprint_files(weights), adapter, options, precision, config.temperature, wanted.vocabulary])


def _missing(taught: TaughtRows, ranks: Ranks) -> list[int]:
    """The files that a machine lacks; the same on every rank."""
    lacks = [not taught.read(number) for number in range(len(taught.files))]
    return np.flatnonzero(gather_numbers(lacks, ranks.device).any(dim=0)).tolist() if lacks else []


def _load(config: TrainConfig, plan: Plan, ranks: Ranks, control: Control) -> ForwardPass:
    """The teacher as it was planned, built once more: the plan's own would stay in memory."""
    own, teacher = teacher_config(config), plan.teacher
    assert teacher is not None and teacher.placed is not None
    placed = dataclasses.replace(teacher.placed, model=build_plan(own, teacher.placed.model.machine, *read_model(own)))
    load_model(own, placed, open_weights(placed.model), ranks)
    release_cached_memory(ranks.device)
    return build_forward(
        own, dataclasses.replace(plan, placed=placed, teacher=Teaching(None, target_numbers)), ranks, control
    )


def _compute(forward: ForwardPass, taught: TaughtRows, numbers: list[int], wanted: Likeliest) -> None:
    """Write these files, one after the other; a machine's first rank does, and the others read them."""
    for number in tqdm(numbers, "Teacher", unit=" files", disable=not forward.ranks.is_rank_0):
        found = likeliest_of_rows(forward, taught.table, taught.files[number], wanted)
        if forward.ranks.local_rank == 0:
            taught.write(number, found)
        gather_numbers([0], forward.ranks.device)  # now it is there
        assert taught.read(number)
