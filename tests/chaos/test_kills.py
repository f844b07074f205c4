"""Faults at any moment, kill -9 in any phase of a save: the run resumes, and its results are the
same.
"""

import contextlib
import ctypes
import errno
import os
import random
import re
import shutil
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.export.expand import expand_model
from fsdp_qlora.export.model_folder import quantize_model
from tests.chaos.harness import (
    INJECTED,
    KILLED,
    RANKS,
    Fault,
    Job,
    at_step,
    ended,
    fill_disk,
    numbers,
    on,
    run,
    steps_done,
    together,
    wait_for,
    write_slowly,
)
from tests.helpers.run import all_slow_but

# Linux's; Python has no names for them
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27

# --- random faults ---


def fail_reads(rank: int) -> None:
    """Let no file of a checkpoint be read, as on a network disk that is away."""
    original = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if on(rank) and mode == "rb" and path.parent.name.startswith("step_"):
            print(INJECTED, flush=True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return original(path, mode, *args, **options)

    Path.open = opened  # type: ignore[method-assign, assignment]


def links() -> list[socket.socket]:
    """This process's connections to the other ranks and the store."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            link = socket.socket(fileno=os.dup(descriptor))
            if link.family != socket.AF_UNIX and not link.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.append(link)
    return found


def drop_links() -> None:
    """Close the connections to the other ranks, as a network that fails does."""
    print(INJECTED, flush=True)
    for link in links():
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def stall_links() -> None:
    """Lose every packet from the other ranks for 3 s: longer than a step takes, for less than one
    may be silent.
    """
    # a filter of the kernel: return 0
    lose = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    stalled = links()
    for link in stalled:
        link.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(lose))
        )

    def carry_on() -> None:
        for link in stalled:
            link.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    timer = threading.Timer(3, carry_on)
    timer.daemon = True
    timer.start()
    print(INJECTED, flush=True)


class Disturbance(NamedTuple):
    """What is put into the ranks before a start, for (a step, a rank, the run's folder), or done to
    one meanwhile.
    """

    fault: Callable[[int, int, Path], Fault] | None = None
    action: Callable[[Job, int], None] | None = None
    statuses: frozenset[int] = frozenset()  # besides 0


# Of a rank that was stopped or has lost the others. One that still waits for them after a minute is
# told to end.
LOST = frozenset({1, 75, -signal.SIGKILL, -signal.SIGTERM})
DISTURBANCES = {
    "kill": Disturbance(action=Job.kill, statuses=LOST),
    "stop": Disturbance(action=partial(Job.kill, number=signal.SIGTERM), statuses=LOST),
    "stalled link": Disturbance(lambda step, rank, out: partial(at_step, step, stall_links, rank)),
    "full disk": Disturbance(lambda step, rank, out: partial(fill_disk, out / "checkpoints", 1)),
    "failing reads": Disturbance(
        lambda step, rank, out: partial(fail_reads, 0), statuses=frozenset({75})
    ),
    "dropped link": Disturbance(
        lambda step, rank, out: partial(at_step, step, drop_links, rank), statuses=LOST
    ),
}


@pytest.mark.slow
def test_a_run_with_random_faults_gives_the_same_bytes(reference, assert_same, tmp_path):
    """One of each kind in one run; with CHAOS_MINUTES, as many as come in that time, in as many
    runs as it takes.
    """
    seed = int(os.environ.get("CHAOS_SEED", time.time()))
    minutes = float(os.environ.get("CHAOS_MINUTES", 0))
    print(f"CHAOS_SEED={seed}")
    chance = random.Random(seed)
    counts = Counter[str]()
    injected = Counter[str]()
    num_runs = 0
    out = tmp_path / "out"
    end = time.monotonic() + 60 * minutes
    options = reference.same_but(out)
    while len(counts) < len(DISTURBANCES) or time.monotonic() < end:
        kind = min(chance.sample(sorted(DISTURBANCES), 6), key=counts.__getitem__)
        counts[kind] += 1
        fault, action, statuses = DISTURBANCES[kind]
        more = chance.choice([together, write_slowly])
        before = steps_done(out) % 10
        further = chance.choice([0, 1, 2, 4, 8])
        rank = chance.randrange(RANKS)
        logs = tmp_path / f"logs{counts.total()}"
        put_in = partial(together, more, fault(before + further, rank, out) if fault else together)
        with ended(Job(options, logs, fault=put_in)) as job:
            # Somewhere in a start, or between here and 8 steps on.
            wait_for(lambda: not job.is_alive() or steps_done(out) >= before + further)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
            if is_hit := bool(action) and job.is_alive():
                action(job, rank)  # type: ignore[misc]
            found = set(job.wait())
            injected[kind] += is_hit or INJECTED in job.output()
        assert found <= {0, *statuses}, f"{kind}: {found}\n{job.output()[-6000:]}"
        for folder in checkpoint.published(out / "checkpoints").values():
            checkpoint.verify(folder)
        assert not checkpoint.quarantined(out / "checkpoints")
        if found == {0}:
            assert_same(out)
            shutil.rmtree(out)
            num_runs += 1
    run(options, tmp_path / "logs")
    assert_same(out)
    print(
        f"{num_runs + 1} runs, {counts.total()} starts ended as the undisturbed one; faults: "
        f"{dict(injected)}"
    )
    assert not minutes or all(injected.values())


# --- kills at chosen moments, and kinds of training ---


def die_at(call: str, count: int) -> None:
    """Let this rank be killed at the count-th call of an os function that touches a checkpoint."""
    if not on(0):
        return
    original = getattr(os, call)
    seen = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal seen
        where = (
            os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
        )
        if "/checkpoints" in where:
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, call, counted)


# Of the second checkpoint (5 calls of fsync each: tensors, state, manifest, folder, parent), before
# and after its rename; then of the fourth, whose publication makes the oldest go.
PHASES = {
    "few": [("fsync", 6), ("fsync", 8), ("rename", 2), ("rename", 5)],
    "more": [("fsync", 7), ("fsync", 9), ("fsync", 10)],
}


@pytest.mark.parametrize("phases", all_slow_but("", PHASES, nightly=["more"]))
def test_a_kill_during_a_save_leaves_only_complete_checkpoints(
    phases, reference, assert_same, tmp_path
):
    options = reference.same_but(tmp_path / "out", save_total_limit=2, save_every=1)
    for number, phase in enumerate(PHASES[phases]):
        run(
            options,
            tmp_path / f"logs{number}",
            [-signal.SIGKILL, ANY],
            fault=die_at,
            arguments=phase,
        )
        folders = checkpoint.published(tmp_path / "out" / "checkpoints")
        assert folders
        for folder in folders.values():
            checkpoint.verify(folder)
    run(options, tmp_path / "logs")
    assert_same(tmp_path / "out")
    # What is left: the newest two, and the best by held-out loss.
    losses = {
        record["step"]: record["eval_loss"]
        for record in numbers(tmp_path / "out")
        if "eval_loss" in record
    }
    best = min(set(losses) - {0}, key=losses.__getitem__)
    left = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert left == {f"step_{step:06d}" for step in (best, 9, 10)}


KINDS: dict[str, dict[str, object]] = {
    **{
        train_type: {"train_type": train_type}
        for train_type in ("full", "bnb_llama_pro", "hqq_dora", "int8_lora")
    },
    "full, in the background": {"train_type": "full"},
    # of a base in this format
    **{
        f"merge-aware, {form}": {"merge_aware": True, "lora_dropout": 0}
        for form in ("nvfp4", "nf4")
    },
}


@pytest.mark.parametrize("kind", all_slow_but("full", KINDS, nightly=["bnb_llama_pro", "hqq_dora"]))
def test_every_kind_of_training_resumes_to_the_same_bytes(kind, reference, tmp_path):
    options = {
        **reference.options,
        "max_steps": 10,
        "eval_fraction": 0,
        "eval_steps": 0,
        **KINDS[kind],
    }
    train_type = TRAIN_TYPES[str(options.get("train_type", "qlora"))]
    if not train_type.adapter:
        options = {name: value for name, value in options.items() if not name.startswith("lora")}
    if train_type.trains_new_blocks:
        expand_model(str(options["model_name"]), tmp_path / "expanded", expansion_rate=0.5)
        options["model_name"] = tmp_path / "expanded"
    if "merge_aware" in options:
        form = kind.split()[-1]
        quantize_model(
            str(options["model_name"]),
            tmp_path / "base",
            quant_type=form,
            double_quant=True,
        )
        options["model_name"] = tmp_path / "base"
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    is_slow = "background" in kind
    output = run(
        {**options, "output_dir": whole}, tmp_path / "logs", fault=write_slowly if is_slow else None
    )
    # Training goes on while a checkpoint is written.
    assert (output.index("Checkpoint of step 3") > output.index("step  4/")) == is_slow
    fault = partial(together, write_slowly if is_slow else together, partial(at_step, 8, KILLED, 1))
    run({**options, "output_dir": out}, tmp_path / "logs0", ANY, fault=fault)
    newest = list(checkpoint.published(out / "checkpoints").values())[-1]
    # Each rank writes its rows of a whole model; an adapter is small enough for rank 0.
    assert len(list(newest.glob("*.safetensors"))) == (1 if train_type.adapter else RANKS)
    found = re.search(
        r"Resuming at step (\d)",
        run({**options, "output_dir": out}, tmp_path / "logs1"),
    )
    assert found and int(found[1]) in ((3, 6) if is_slow else (6,))
    name = "adapter_model.safetensors" if train_type.adapter else "model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes() and numbers(out) == numbers(
        whole
    )
