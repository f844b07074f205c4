"""Under the real torchrun, and under train.py's own launcher: restarts, orphans, signals to the
agent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_qlora.distributed.supervision.launch import is_from_an_agent
from tests.chaos.conftest import Reference
from tests.chaos.harness import (
    HANG_SECONDS,
    Job,
    ended,
    is_gone,
    run,
    status,
    steps_done,
    wait_for,
)
from tests.helpers.run import ROOT, flags

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def reference(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One of 20 steps, so that a signal from outside comes before its end."""
    folder = tmp_path_factory.mktemp("longer")
    options = {**reference.options, "num_epochs": 4}
    run({**options, "output_dir": folder / "out"}, folder / "logs")
    return Reference(options, folder / "out")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a command; whatever of it is left at the end is killed."""
    environment = {name: value for name, value in os.environ.items() if not is_from_an_agent(name)}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    started: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str]) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def log(tmp_path: Path) -> str:
    return (tmp_path / "log").read_text(errors="replace")


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    started = psutil.Process(process.pid).children()
    return [
        child for child in started if {"fsdp_qlora", str(ROOT / "train.py")} & set(child.cmdline())
    ]


def wait_for_step(
    output_dir: Path, step: int, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    def reached() -> bool:
        assert process.poll() is None, log(tmp_path)
        return steps_done(output_dir) >= step

    wait_for(reached)


@pytest.mark.slow
def test_a_run_restarted_by_torchrun_gives_the_same_bytes(reference, assert_same, start, tmp_path):
    argv = flags(**reference.same_but(tmp_path / "out"))
    process = start([*TORCHRUN, "--max-restarts", "3", "-m", "fsdp_qlora", "train", *argv])
    wait_for_step(tmp_path / "out", 4, process, tmp_path)
    victims = workers(process)
    victims[0].kill()
    wait_for(lambda: all(is_gone(victim.pid) for victim in victims))
    assert process.wait(HANG_SECONDS) == 0, log(tmp_path)
    assert log(tmp_path).count("Resuming at step") == 1
    assert_same(tmp_path / "out")


@pytest.mark.slow
def test_workers_end_when_torchrun_is_killed(reference, assert_same, start, tmp_path):
    options = reference.same_but(tmp_path / "out")
    process = start([*TORCHRUN, str(ROOT / "train.py"), *flags(**options)])
    wait_for_step(tmp_path / "out", 1, process, tmp_path)
    orphans = workers(process)
    for worker in orphans:
        worker.suspend()  # still there, as far as a second launch can tell
    with ended(Job(options, tmp_path / "logs0")) as job:
        # the other rank waits for it, until torchrun would end it
        job.processes[0].join(HANG_SECONDS)
        assert job.processes[0].exitcode == 2, job.output()
    assert f"out is in use by another run (process {orphans[0].pid} on " in job.output()
    process.kill()
    process.wait()
    for worker in orphans:
        worker.resume()
    wait_for(lambda: all(is_gone(orphan.pid) for orphan in orphans))
    assert (f"Resuming at step {status(tmp_path / 'out')['saved_step']} from") in run(
        options, tmp_path / "logs1"
    )
    assert_same(tmp_path / "out")


@pytest.mark.slow
def test_torchrun_passes_sigterm_on_and_exits_as_documented(
    reference, assert_same, start, tmp_path
):
    options = reference.same_but(tmp_path / "out", save_every="none")
    process = start([sys.executable, str(ROOT / "train.py"), *flags(**options, nproc_per_node=2)])
    wait_for_step(tmp_path / "out", 3, process, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 75, log(tmp_path)
    about = status(tmp_path / "out")
    assert about["state"] == "preempted" and about["saved_step"] == about["step"] < 20
    stopped = f"Stopped after step {about['step']} (SIGTERM)"
    assert log(tmp_path).count(stopped) == 1 and f"error: {stopped}" not in log(tmp_path)
    run(options, tmp_path / "logs")
    assert_same(tmp_path / "out")


# Stands for train.py, in which silence and pauses count sooner.
IMPATIENT = """
import os, sys, time
import train
from fsdp_qlora.distributed.supervision.launch import relaunch_if_needed
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.distributed.supervision import presence
from fsdp_qlora.distributed.supervision import watchdog
from tests.chaos.harness import at_step, be_impatient

if "RANK" not in os.environ:
    os.setpgrp()  # as a shell's job
status = relaunch_if_needed(parse_train_config(sys.argv[1:]), sys.argv[1:], ("-u", __file__))
if status is not None:
    sys.exit(status)
be_impatient()
presence.PAUSE_SECONDS = watchdog.PAUSE_SECONDS = 2.0
for step in range(20):
    at_step(step, lambda: time.sleep(0.3))
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTSTP, marks=pytest.mark.nightly), signal.SIGSTOP]
)
def test_a_paused_launcher_does_not_end_the_run(number, reference, assert_same, start, tmp_path):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    argv = flags(**reference.same_but(tmp_path / "out", nproc_per_node=2))
    process = start([sys.executable, str(tmp_path / "impatient.py"), *argv])
    wait_for_step(tmp_path / "out", 3, process, tmp_path)
    launcher = psutil.Process(process.pid)
    launcher.send_signal(number)
    time.sleep(8)  # three times as long as a rank may be silent, without a sign of life
    launcher.send_signal(signal.SIGCONT)
    assert process.wait(HANG_SECONDS) == 0, log(tmp_path)
    assert_same(tmp_path / "out")


@pytest.mark.nightly
def test_a_closed_terminal_stops_torchrun_with_a_checkpoint_unless_told(
    reference, assert_same, start, tmp_path
):
    argv = [
        "-m",
        "fsdp_qlora",
        "train",
        *flags(**reference.same_but(tmp_path / "out", save_every="none")),
    ]
    process = start(["nohup", *TORCHRUN, *argv])
    wait_for_step(tmp_path / "out", 3, process, tmp_path)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_SECONDS) != 0
    about = status(tmp_path / "out")
    assert about["state"] == "preempted" and 3 <= about["saved_step"] == about["step"] < 20, log(
        tmp_path
    )
    process = start(["nohup", *TORCHRUN, "--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT", *argv])
    wait_for_step(tmp_path / "out", about["step"] + 1, process, tmp_path)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_SECONDS) == 0, log(tmp_path)
    assert_same(tmp_path / "out")


def test_bad_input_is_shown_ends_all_and_is_not_restarted(reference, start, tmp_path):
    argv = flags(**reference.same_but(tmp_path / "out", dataset=tmp_path / "absent.jsonl"))
    process = start([*TORCHRUN, "--max-restarts", "1", str(ROOT / "train.py"), *argv])
    assert process.wait(HANG_SECONDS) != 0
    assert "not restarted, since the previous attempt ended for good: " in log(tmp_path)
    assert f"{tmp_path}/absent.jsonl" in log(tmp_path)
    assert 'train.py", line' not in log(tmp_path)  # the only traceback is torchrun's own
    assert not (tmp_path / "out").exists()


# Stands for train.py: what each start does is a line of PLAN, the state it leaves and its exit
# status.
FAKE = """
line=$(sed -n "1p" PLAN); sed -i 1d PLAN; echo start >> STARTS
set -- $line
n=$(wc -l < STARTS)
[ "$1" != note ] || { echo "[$2, \\"bad input\\"]" > "$FSDP_QLORA_NOTE_FILE"; exit $3; }
[ "$1" = - ] ||
    printf '  "state": "%s",\\n  "exit_code": %s,\\n  "n": %s\\n' $1 $2 $n > out/status.json
exit $3
"""


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (["running null 137", "preempted 75 1", "failed 1 1", "finished 0 0"], 0),
        (["over_budget 3 1"], 3),  # torchrun's own status is always 1
        (["running null 137", "no_progress 4 1"], 4),
        (["- - 2"], 2),
        (["- - 1", "- - 1", "- - 1"], 1),
    ],
)
def test_run_forever_restarts_runs_that_can_still_finish(plan, code, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "PLAN").write_text("\n".join([*plan, "finished 0 99"]) + "\n")
    (tmp_path / "fake.sh").write_text(FAKE)
    command = ["bash", str(ROOT / "scripts/run_forever.sh"), "out", "bash", "fake.sh"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "RUN_FOREVER_PAUSE": "0"}, capture_output=True
    )
    assert result.returncode == code, result.stderr
    assert (tmp_path / "STARTS").read_text().count("start") == len(plan)


def test_run_forever_waits_while_another_machine_has_the_folder(tmp_path):
    (tmp_path / "PLAN").write_text("- - 1\n" * 4 + "- - 0\n")
    (tmp_path / "fake.sh").write_text(FAKE)
    command = ["bash", str(ROOT / "scripts/run_forever.sh"), "out", "bash", "fake.sh"]
    # each start has been long enough
    environment = {**os.environ, "RUN_FOREVER_PAUSE": "0", "RUN_FOREVER_EARLY": "0"}
    assert (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 0
    )


def test_run_forever_once_ends_with_the_status_of_the_run(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "PLAN").write_text("preempted 75 1\nbad_input 2 1\nfinished 0 0\n- - 1\nnote 2 1\n")
    (tmp_path / "fake.sh").write_text(FAKE)
    command = ["bash", str(ROOT / "scripts/run_forever.sh"), "--once", "out", "bash", "fake.sh"]
    assert [
        subprocess.run(command, cwd=tmp_path, capture_output=True).returncode for _ in range(5)
    ] == [75, 2, 0, 1, 2]


def test_run_forever_can_be_stopped_in_its_pause(tmp_path):
    (tmp_path / "PLAN").write_text("- - 1\n" * 3)
    (tmp_path / "fake.sh").write_text(FAKE)
    command = ["bash", str(ROOT / "scripts/run_forever.sh"), "out", "bash", "fake.sh"]
    environment = {**os.environ, "RUN_FOREVER_PAUSE": "3600"}
    script = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert script.stderr is not None and "started again in 3600 s" in script.stderr.readline()
    script.terminate()
    assert script.wait(HANG_SECONDS) == 1
    assert (tmp_path / "STARTS").read_text().count("start") == 1
