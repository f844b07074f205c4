"""Computes a teacher's top tokens for all rows, and writes them to files.

The pass runs before the student is loaded, or without a student (`fsdp-qlora teach`).
"""

import dataclasses
import gc
import logging
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

from safetensors import SafetensorError
from tqdm import tqdm

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.teacher_cache import (
    CACHE_FOLDER,
    TeacherCache,
    TopTokenArrays,
    Unusable,
    bytes_per_token,
    rounded,
)
from fsdp_qlora.data.batches.teacher_folder import TeacherFolder, key_of
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
    release_cached_memory,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.model.kernels.in_use import using_ways
from fsdp_qlora.planning.plan import build_plan, quantizer_options, read_model
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.planning.teacher import teacher_config
from fsdp_qlora.run.base import PlannedBase, teacher_base
from fsdp_qlora.run.build_trainer import build_forward
from fsdp_qlora.run.load_model import open_weights
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.run.session import Session, enter_rank, open_session
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.training.forward import ForwardPass, top_tokens_of_rows
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.server_teacher import ServerTeacher
from fsdp_qlora.training.teacher import CachedTeacher, Teacher
from fsdp_qlora.training.top_tokens import TopTokens
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import cache_folder, fingerprint_files, record_of, refusal_named
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.text import format_bytes, warn_from_any_rank

log = logging.getLogger("fsdp_qlora")

File = tuple[TeacherCache, int]
"""A file of a table, by its number."""


def teach(config: TrainConfig) -> None:
    """Write the teacher's probabilities for all rows to output_dir. Called on every rank."""
    ranks = enter_rank(config)
    output = Path(config.output_dir).expanduser()
    with open_session(ranks) as session:
        _teach_in_session(config, session, output)
    log.info("Done. Train with --teacher %s and the same rows and options", output)


def _teach_in_session(config: TrainConfig, session: Session, output: Path) -> None:
    ranks = session.ranks
    with session.kept_until_all_connect():
        run = prepare_run(config, ranks, session.store)
        if run.plan.teacher is None:
            raise UserError(
                "teach needs --objective distill and --teacher NAME, the model to load."
            )
        teacher_base(run.config, run.plan.teacher, session).fetch()
        kernels = TriedKernels.of(run.config, run.plan.teacher.model)
    session.start_group(run.plan.placed.layout)
    with using_ways(kernels.choose()):
        open_teacher(run.config, run.plan, ranks, Control(), output)


def open_teacher(
    config: TrainConfig, plan: Plan, ranks: Ranks, control: Control, output: Path | None = None
) -> Teacher | None:
    """Return the teacher: its files, which are computed if they are missing, or its server.

    None without a separate teacher. Called on every rank, with the teacher's files on this machine.
    The teacher leaves memory before this returns.

    Args:
        output: folder for the computed files, instead of the cache.
    Raises:
        UserError: --teacher is a folder of `teach` that lacks files of these rows, or has other
            options.
    """
    vocabulary = plan.model.meta.model.get_input_embeddings().num_embeddings
    top_tokens = TopTokens(min(config.top_k, vocabulary), vocabulary)
    if config.teacher_url:
        server = Server(config.teacher_url, [config.teacher], config.hang_seconds)
        return ServerTeacher(server, top_tokens.k, vocabulary, ranks, control)
    if not config.teacher:
        return None
    given = Path(config.teacher).expanduser()
    folder = TeacherFolder.read(given, "teacher")
    if folder:
        caches = _teacher_caches(plan, given, folder, vocabulary)
        # The folder must have all files: its teacher is not here to make one again.
        _missing([*caches.values()], ranks, config.teacher)
        _say_read(caches)
        return CachedTeacher(caches)
    if plan.teacher is None:
        return None
    return _computed(config, plan, ranks, control, top_tokens, output)


def _computed(
    config: TrainConfig,
    plan: Plan,
    ranks: Ranks,
    control: Control,
    top_tokens: TopTokens,
    output: Path | None,
) -> CachedTeacher:
    """Compute the files that are missing, with the teacher that is planned."""
    assert plan.teacher is not None and config.teacher is not None
    vocabulary = top_tokens.vocabulary
    in_teacher = plan.teacher.model.meta.model.get_input_embeddings().num_embeddings
    top_tokens = dataclasses.replace(top_tokens, k=min(top_tokens.k, in_teacher))
    root = output or cache_folder() / CACHE_FOLDER
    teacher_options = teacher_config(config)
    # The key has hashes of all weights, which rank 0 computes for all.
    own_key = _key(teacher_options, plan, vocabulary) if ranks.is_rank_0 else ""
    [key, *_] = all_gather_strings(own_key, ranks.device)
    folder = TeacherFolder(key, top_tokens.k, config.teacher)
    caches = _teacher_caches(plan, root, folder, vocabulary)
    missing = _begin(caches, root, folder, ranks, output)
    if missing:
        # The teacher has no name here, so that it leaves memory with the call.
        _compute(missing, _load(teacher_options, plan, ranks, control), top_tokens, ranks)
        gc.collect()  # modules and hooks know each other
        release_cached_memory(ranks.device)
    else:
        _say_read(caches)
    return CachedTeacher(caches)


def _teacher_caches(
    plan: Plan, root: Path, folder: TeacherFolder, vocabulary: int
) -> dict[str, TeacherCache]:
    """The teacher's files for each table of a run's rows, by the table's digest."""
    return {
        table.digest: TeacherCache(table, root, folder.key, folder.k, vocabulary)
        for table in (plan.data.train, plan.data.evaluation)
        if len(table)
    }


def _say_read(caches: Mapping[str, TeacherCache]) -> None:
    [first, *_] = caches.values()
    log.info("The teacher's probabilities are read from %s", first.folder)


def _begin(
    caches: Mapping[str, TeacherCache],
    root: Path,
    folder: TeacherFolder,
    ranks: Ranks,
    output: Path | None,
) -> list[File]:
    """Look for the files that are there, and make room for the others; returns these.

    Raises:
        UserError: the folder is another teacher's, or too small; the same on every rank.
    """
    if output:
        with raise_on_all_ranks(UserError, ranks.device):
            _refuse_another(output, folder)
    missing = _missing([*caches.values()], ranks, None)
    with raise_on_all_ranks(UserError, ranks.device):
        # Each machine has its own disk, and its files are written by one of its ranks.
        if ranks.local_rank == 0:
            _check_room(root, missing)
            if output:
                _enter(output, folder)
    return missing


def _compute(
    missing: Sequence[File], forward: ForwardPass, top_tokens: TopTokens, ranks: Ranks
) -> None:
    """Compute the missing files one after another. Each is written before the next begins.

    So an interrupted pass continues at the file where it stopped.
    """
    for cache, number in tqdm(missing, "Teacher", unit=" files", disable=not ranks.is_rank_0):
        arrays = top_tokens_of_rows(forward, cache.table, cache.files[number], top_tokens)
        _keep(cache, number, rounded(arrays, top_tokens.k), ranks)


def _key(teacher_options: TrainConfig, plan: Plan, vocabulary: int) -> str:
    """A hash of all that the teacher's probabilities depend on, besides the rows."""
    assert plan.teacher is not None
    adapter = None
    if teacher_options.adapter:
        adapter = read_adapter(Path(teacher_options.adapter).expanduser()).weights
    # The same weights in another quantization give other probabilities.
    quantizer = teacher_options.kind.quantizer
    quantization = {"quantizer": quantizer} | quantizer_options(teacher_options, quantizer)
    return key_of(
        {
            "weights": fingerprint_files(open_weights(plan.teacher.model).files.files.values()),
            "adapter": record_of(adapter).sha256 if adapter else None,
            "quantization": quantization,
            "precision": plan.teacher.model.precision.name,
            "temperature": teacher_options.temperature,
            "vocabulary": vocabulary,
        }
    )


def _refuse_another(output: Path, new: TeacherFolder) -> None:
    """Raise UserError if the folder is of another teacher, or of this one with other settings."""
    earlier = TeacherFolder.read(output, "output_dir")
    differences = ", ".join(earlier.differences(new.settings)) if earlier else ""
    if earlier and differences:
        raise UserError(
            f"--output_dir {output} has the probabilities of {earlier.teacher} with other "
            f"settings: {differences}. Give another folder, or remove this one."
        )


def _missing(caches: Sequence[TeacherCache], ranks: Ranks, given: str | None) -> list[File]:
    """The files that a machine lacks; the same on every rank.

    Args:
        given: the folder that --teacher names. It must have all of them.
    Raises:
        UserError: it lacks some, or one of them cannot be learned from; the same on every rank.
    """
    files = [(cache, number) for cache in caches for number in range(len(cache.files))]
    with raise_on_all_ranks(UserError, ranks.device):
        lacks = [not _read(cache, number, given) for cache, number in files]
    # A file that one machine lacks is made again on all: the pass is a collective of all ranks.
    is_missing = gather_numbers(lacks, ranks.device).any(dim=0).tolist() if lacks else []
    missing = list(compress(files, is_missing))
    if given and missing:
        raise UserError(
            f"--teacher {given} lacks {len(missing)} of the {len(files)} files of these rows, such "
            f"as {missing[0][0].path(missing[0][1])}. Its rows, --temperature or vocabulary "
            "differ, or `fsdp-qlora teach` was interrupted: run it again with the same rows and "
            "options."
        )
    return missing


def _read(cache: TeacherCache, number: int, given: str | None) -> bool:
    """Read a file; an unusable file counts as missing if the teacher can compute it again."""
    try:
        return cache.read(number)
    except Unusable as error:
        path = cache.path(number)
        if given:
            raise UserError(
                f"--teacher {given}: {path} cannot be learned from: {error}. Copy the folder once "
                "more, or write another one with `fsdp-qlora teach`."
            ) from error
        warn_from_any_rank(
            f"The teacher's probabilities in {path} are damaged ({error}): making them again."
        )
        return False


def _check_room(root: Path, missing: Sequence[File]) -> None:
    """Raise UserError if files do not fit on the disk."""
    needed = sum(cache.num_targets(number) * bytes_per_token(cache.k) for cache, number in missing)
    free = free_disk(root)
    if needed > free:
        raise UserError(
            _no_room(
                root, f"it has {format_bytes(free)} free, and {format_bytes(needed)} are needed"
            )
        )


def _no_room(root: Path, reason: str) -> str:
    advice = "Free disk space: the same command continues with the files that are there."
    if cache_folder() in root.parents:
        advice += " The environment variable FSDP_QLORA_CACHE names another folder."
    return f"The teacher's probabilities cannot be written to {root}: {reason}. {advice}"


def _enter(output: Path, folder: TeacherFolder) -> None:
    """Make the folder, and write its settings into it. Raises UserError."""
    with refusal_named("output_dir", output):
        output.mkdir(parents=True, exist_ok=True)
        folder.write(output)


def _keep(cache: TeacherCache, number: int, arrays: TopTokenArrays, ranks: Ranks) -> None:
    """Write a file on each machine, and read it on every rank.

    Raises:
        TrainingError: the probabilities cannot be learned. UserError: the file cannot be written.
            The same on every rank.
    """
    try:
        cache.check(number, arrays)
    except Unusable as error:
        raise TrainingError(
            f"The teacher's probabilities cannot be learned from: {error}. Try --precision bf16 or "
            "fp32."
        ) from error
    with raise_on_all_ranks(UserError, ranks.device):
        if ranks.local_rank == 0:
            try:
                cache.write(number, arrays)
            except (OSError, SafetensorError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                size = format_bytes(len(arrays.ids) * bytes_per_token(cache.k))
                raise UserError(
                    _no_room(cache.folder, f"{reason}, with {size} to write")
                ) from error
    # Read back at once, as the student will: a bad disk is found before hours have gone by.
    with raise_on_all_ranks(UserError, ranks.device):
        try:
            is_there = cache.read(number)
        except Unusable as error:
            raise UserError(
                f"{cache.path(number)} was just written, and is damaged: {error}."
            ) from error
        if not is_there:
            raise UserError(
                f"{cache.path(number)} was just written, and is not there. Give all "
                "ranks the same disk."
            )


def _load(options: TrainConfig, plan: Plan, ranks: Ranks, control: Control) -> ForwardPass:
    """Load the planned teacher. It is built once more, since the plan's copy stays in memory."""
    assert plan.teacher is not None
    model = build_plan(options, plan.teacher.model.machine, *read_model(options))
    placed = dataclasses.replace(plan.teacher, model=model)
    PlannedBase(options, placed).opened().load()
    return build_forward(options, dataclasses.replace(plan, placed=placed), ranks, control)
