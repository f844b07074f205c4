"""A teacher's pass over the rows, before the student is loaded: its likeliest tokens go to files. Or its server."""

import dataclasses
import gc
import json
import logging
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.taught import OfTargets, TaughtRows, target_numbers
from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers, release_cached_memory
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.planning.plan import build_plan, quantizer_options, read_model
from fsdp_qlora.planning.run_plan import Plan, teacher_config
from fsdp_qlora.run.load_model import build_forward, load_model, open_weights
from fsdp_qlora.training.divergence import Likeliest
from fsdp_qlora.training.forward import ForwardPass, likeliest_of_rows
from fsdp_qlora.training.rl.engine import Server, ServerTeacher
from fsdp_qlora.utils.files import fingerprint_files, record_of

log = logging.getLogger("fsdp_qlora")


def taught_by_teacher(config: TrainConfig, plan: Plan, ranks: Ranks, control: Control) -> OfTargets | None:
    """The teacher's likeliest tokens, read or computed, or told by its server; None if no other model teaches.

    Called on every rank, with the teacher's files here. Nothing of the teacher is left in memory.
    """
    own, vocabulary = teacher_config(config), plan.model.meta.model.get_input_embeddings().num_embeddings
    wanted = Likeliest(min(config.top_k, vocabulary), vocabulary)
    if config.teacher_url:
        server = Server(config.teacher_url, [config.teacher], config.hang_seconds)
        return ServerTeacher(server, *wanted, ranks, control)
    if not plan.teacher:
        return None
    [key, *_] = all_gather_strings(_key(own, plan, vocabulary) if ranks.is_rank_0 else "", ranks.device)
    tables = {table.digest: TaughtRows(table, key, wanted.k) for table in (plan.data.train, plan.data.evaluation)}
    missing = [(taught, number) for taught in tables.values() for number in _missing(taught, ranks)]
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
