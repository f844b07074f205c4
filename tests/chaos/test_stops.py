"""Signals and budgets: all ranks stop after the same step, say so, and resume from it as if nothing
had been.
"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.distributed.supervision import stops
from fsdp_qlora.utils.errors import TrainingError
from tests.chaos.harness import (
    Job,
    at_step,
    ended,
    finish,
    hang,
    numbers,
    run,
    status,
    steps_done,
    together,
    wait_for,
    write_slowly,
)
from tests.helpers.run import ROOT


@pytest.mark.parametrize(
    ("rank", "number", "state", "code", "more"),
    [
        (1, signal.SIGTERM, "preempted", 75, write_slowly),
        # not under nohup
        (0, signal.SIGHUP, "preempted", 75, partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)),
        (0, signal.SIGINT, "interrupted", 130, together),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    rank, number, state, code, more, reference, assert_same, tmp_path
):
    options = reference.same_but(tmp_path / "out", save_every=4)
    signalled = partial(
        together, more, partial(at_step, 4, partial(signal.raise_signal, number), rank)
    )
    job = finish(options, tmp_path / "logs0", [code, code], fault=signalled)
    found = status(tmp_path / "out")
    assert (found["state"], found["exit_code"], found["step"], found["saved_step"]) == (
        state,
        code,
        5,
        5,
    )
    assert list(checkpoint.published(tmp_path / "out" / "checkpoints")) == [4, 5]
    said = [
        f"Stopped after step 5 ({number.name}): the checkpoint of step 5" in log.read_text()
        for log in job.logs
    ]
    assert said == [True, False]  # once on a machine
    assert "Resuming at step 5 from" in run(options, tmp_path / "logs1")
    assert_same(tmp_path / "out")


def test_a_second_ctrl_c_ends_a_rank_at_once(reference, tmp_path):
    hangs = partial(at_step, 3, hang, 0, during="_prepare")  # in Python
    with ended(Job(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=hangs)) as job:
        wait_for(lambda: steps_done(tmp_path / "out") >= 3)
        job.kill(0, signal.SIGINT)
        time.sleep(1)
        assert job.is_alive()
        job.kill(0, signal.SIGINT)
        assert job.wait()[0] == 130


_WAITS_IN_C = """
import ctypes, threading
from fsdp_qlora.distributed.supervision import stops

stops._END_SECONDS = 0.5
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with stops.Signals(ends_process=True).handled():
    threading.Timer(0.5, print, ["waits"], {"flush": True}).start()
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # the second never returns, and Python calls no handler
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_that_waits_in_cpp_code(number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS_IN_C], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        process.send_signal(number)
        try:
            assert process.wait(timeout=60) == code
        finally:
            process.kill()


def lose_output() -> None:
    """Let nobody read what rank 0 prints from the fourth step on, and close the terminal that nohup
    has left.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def close() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(writer, stream.fileno())
        signal.raise_signal(signal.SIGHUP)

    at_step(3, close, 0)


def test_a_forked_child_process_can_be_terminated():
    """As a reward function does with the code of an answer that runs too long."""
    signals = stops.Signals()
    with signals.handled():
        signals.is_starting = False
        context = multiprocessing.get_context("fork")
        began = context.Event()
        # the child is not to finalize what earlier tests left, whose threads it does not have
        gc.collect()
        child = context.Process(target=lambda: (began.set(), time.sleep(600)))
        child.start()
        try:
            began.wait()
            child.terminate()
            child.join(60)
            assert child.exitcode == -signal.SIGTERM and not signals.requested
        finally:
            child.kill()


def test_a_run_continues_when_its_output_is_closed(reference, assert_same, tmp_path):
    run(reference.same_but(tmp_path / "out"), tmp_path / "logs", fault=lose_output)
    assert_same(tmp_path / "out")
    assert status(tmp_path / "out")["output"] == "lost: Broken pipe"


def take_ten_seconds_per_step() -> None:
    """Let the clock that budgets are measured by stand still but for the steps."""
    from types import SimpleNamespace

    from fsdp_qlora.distributed.supervision import clock, stops
    from fsdp_qlora.training.trainer import Trainer

    now = 0.0
    stops.clock = SimpleNamespace(  # type: ignore[assignment]
        elapsed=lambda: now, awake=lambda: now, Longest=clock.Longest
    )
    begin = stops.Control.__init__
    original = Trainer.train_step

    def begin_now(self: stops.Control, **options: object) -> None:
        begin(self, **{**options, "started": None})  # type: ignore[arg-type]

    def train_step(self: Trainer, *args: object) -> object:
        nonlocal now
        now += 10
        return original(self, *args)  # type: ignore[arg-type]

    stops.Control.__init__ = begin_now  # type: ignore[method-assign]
    Trainer.train_step = train_step  # type: ignore[method-assign, assignment]


def test_max_hours_stops_with_a_checkpoint_and_can_be_raised(reference, assert_same, tmp_path):
    options = reference.same_but(tmp_path / "out", save_every="none", max_hours=80 / 3600)
    output = run(options, tmp_path / "logs0", [3, 3], fault=take_ten_seconds_per_step)
    about = status(tmp_path / "out")
    # Two steps' time is kept for another step and the checkpoint.
    assert (about["state"], about["step"], about["seconds"]) == ("over_budget", 6, 60)
    assert "(--max_hours is used up)" in output
    output = run(options, tmp_path / "logs1", [3, 3])  # what was used is remembered
    assert "Not started: --max_hours is used up by this run's earlier starts" in output
    run({**options, "max_hours": 1}, tmp_path / "logs2")
    assert_same(tmp_path / "out")


def test_a_stop_during_an_evaluation_does_not_wait_for_its_end(reference, assert_same, tmp_path):
    options = reference.same_but(tmp_path / "out")
    stopped = partial(at_step, 4, partial(signal.raise_signal, signal.SIGTERM), during="evaluate")
    run(options, tmp_path / "logs0", [75, 75], fault=stopped)
    assert [record for record in numbers(tmp_path / "out") if record["step"] == 4][-1].get(
        "eval_loss"
    ) is None
    run(options, tmp_path / "logs1")
    assert_same(tmp_path / "out")


def test_ranks_make_equal_decisions_and_detect_different_steps():
    ranks = [stops.Control(is_rank_0=rank == 0) for rank in range(3)]
    ranks[2].signals.requested = stops._STOP_OF_SIGNAL[15]
    flags = torch.tensor([rank.flags(4) for rank in ranks], dtype=torch.float64)
    for rank in ranks:
        rank.agree(flags)
        assert rank.stop == stops.Stop("preempted", "SIGTERM")
    flags[1, 0] = 5
    with pytest.raises(TrainingError, match=r"different steps \(ranks 0, 1, ...: 4, 5, 4"):
        ranks[0].agree(flags)


def test_time_budget_includes_earlier_starts():
    budget = stops.Budget(max_hours=2, used_seconds=3600)
    assert not budget.is_used_up(3599) and budget.is_used_up(3600)
