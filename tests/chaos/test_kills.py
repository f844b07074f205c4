"""kill -9 of a rank at any moment: the run resumes, and its results are the same."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest

from fsdp_qlora.checkpointing import checkpoint
from fsdp_qlora.commands.expand import expand_model
from fsdp_qlora.config.train_types import TRAIN_TYPES
from tests.chaos.conftest import Reference
from tests.chaos.harness import KILLED, RANKS, Job, Same, at_step, ended, numbers, on, run, steps_done, wait_for
from tests.tiny import make_rows, write_rows


def test_random_kills_change_nothing(reference: Reference, assert_same: Same, tmp_path: Path) -> None:
    kills, seed = int(os.environ.get("CHAOS_KILLS", 4)), int(os.environ.get("CHAOS_SEED", time.time()))
    print(f"CHAOS_SEED={seed}")
    chance = random.Random(seed)
    options = reference.same_but(tmp_path / "out")
    for kill in range(kills):
        with ended(Job(options, tmp_path / f"logs{kill}")) as job:
            # Somewhere in a start, or between here and 8 steps on.
            before, further = steps_done(tmp_path / "out"), chance.choice([0, 1, 2, 4, 8])
            wait_for(lambda: not job.is_alive() or steps_done(tmp_path / "out") >= before % 20 + further)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
            if job.is_alive():
                job.kill(chance.randrange(RANKS))
            job.wait()
            for folder in checkpoint.published(tmp_path / "out" / "checkpoints").values():
                checkpoint.verify(folder)
    run(options, tmp_path / "logs")
    assert_same(tmp_path / "out")


def die_at(call: str, count: int) -> None:
    """Let this rank be killed at the count-th call of an os function that touches a checkpoint."""
    if not on(0):
        return
    original, seen = getattr(os, call), 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal seen
        where = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
        if "/checkpoints" in where:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, call, counted)


# Of the second checkpoint (5 calls of fsync each: tensors, state, manifest, folder, parent), before and after its
# rename; then of the fourth, whose publication makes the oldest go.
PHASES = [("fsync", 6), ("fsync", 7), ("fsync", 8), ("fsync", 9), ("rename", 2), ("fsync", 10), ("rename", 5)]


def test_a_kill_in_any_phase_of_a_save_leaves_whole_checkpoints_only(
    reference: Reference, assert_same: Same, tmp_path: Path
) -> None:
    options = reference.same_but(tmp_path / "out", save_total_limit=2)
    for number, phase in enumerate(PHASES):
        run(options, tmp_path / f"logs{number}", [-signal.SIGKILL, ANY], fault=die_at, arguments=phase)
        folders = checkpoint.published(tmp_path / "out" / "checkpoints")
        assert folders
        for folder in folders.values():
            checkpoint.verify(folder)
    run(options, tmp_path / "logs")
    assert_same(tmp_path / "out")
    # What is left: the newest two, and the best by held-out loss.
    losses = {record["step"]: record["eval_loss"] for record in numbers(tmp_path / "out") if "eval_loss" in record}
    best = min(set(losses) - {0}, key=losses.__getitem__)
    left = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert left == {f"step_{step:06d}" for step in (best, 18, 20)}


KINDS: dict[str, dict[str, object]] = {
    **{train_type: {"train_type": train_type} for train_type in ("full", "bnb_llama_pro", "hqq_dora", "int8_lora")},
    # Rows are taken up again in the middle of a block. 41 rows, 4 a step: the second epoch begins in step 11.
    "streaming": {"streaming": True, "shuffle_buffer": 15, "max_steps": 22, "num_epochs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_resumes_to_the_same_bytes(kind: str, reference: Reference, tmp_path: Path) -> None:
    options = {**reference.options, "num_epochs": 1, "eval_fraction": 0, "eval_steps": 0, **KINDS[kind]}
    train_type = TRAIN_TYPES[str(options.get("train_type", "qlora"))]
    if not train_type.has_adapter:
        options = {name: value for name, value in options.items() if not name.startswith("lora")}
    if train_type.trains_new_blocks:
        expand_model(str(options["model_name"]), tmp_path / "expanded", expansion_rate=0.5)
        options["model_name"] = tmp_path / "expanded"
    if kind == "streaming":
        (tmp_path / "rows").mkdir()
        for name, part in (("a", make_rows(41)[:25]), ("b", make_rows(41)[25:])):
            write_rows(tmp_path / "rows" / f"{name}.jsonl", part)
        options["dataset"] = tmp_path / "rows"
    whole, out = tmp_path / "whole", tmp_path / "out"
    run({**options, "output_dir": whole}, tmp_path / "logs")
    run({**options, "output_dir": out}, tmp_path / "logs0", ANY, fault=partial(at_step, 8, KILLED, 1))
    newest = list(checkpoint.published(out / "checkpoints").values())[-1]
    # Each rank writes its rows of a whole model; an adapter is small enough for rank 0.
    assert len(list(newest.glob("*.safetensors"))) == (1 if train_type.has_adapter else RANKS)
    assert "Resuming at step 6" in run({**options, "output_dir": out}, tmp_path / "logs1")
    name = "adapter_model.safetensors" if train_type.has_adapter else "model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes() and numbers(out) == numbers(whole)
