"""How many processes a start makes, and how their end comes back. The workers here do not import
torch.
"""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed import store
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import connect
from fsdp_qlora.distributed.supervision import launch, restarts
from fsdp_qlora.distributed.supervision.launch import is_from_an_agent
from fsdp_qlora.utils.errors import ENDINGS, LostRank, RunStopped, UserError, print_error
from stand_in.environment import free_port
from tests.chaos.harness import is_gone, wait_for
from tests.helpers.run import ROOT

# Stands for train.py: --name says what a worker does.
ENTRY = """
import os, signal, sys, time
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.distributed.supervision.launch import relaunch_if_needed

config = parse_train_config(sys.argv[1:])
try:
    status = relaunch_if_needed(config, sys.argv[1:], ("-u", __file__))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
if status is not None:
    sys.exit(status)
rank = os.environ.get("RANK", "0")
name = "".join(word for word in config.log_to if "=" in word).partition("=")[2]
line = f"worker {rank} of {os.environ.get('WORLD_SIZE', '1')} pid {os.getpid()} name {name}"
os.write(1, (line + chr(10)).encode())
if name == "fail" and rank == "1":
    print("this is the reason", file=sys.stderr)
    sys.exit(2)
if name in ("fail", "sleep"):
    time.sleep(3600)
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Stands for torchrun: the same command line as its, and one worker.
FAKE_TORCHRUN = """
import os, subprocess, sys
script = next(i for i, word in enumerate(sys.argv) if word.endswith("entry.py"))
alone = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
sys.exit(subprocess.call([sys.executable, *sys.argv[script:]], env={**alone, **os.environ}))
"""


@pytest.fixture
def entry(tmp_path):
    (tmp_path / "entry.py").write_text(ENTRY)
    return str(tmp_path / "entry.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """This one, without the GPUs and without the variables of a torchrun that may have started
    pytest.
    """
    for name in filter(is_from_an_agent, list(os.environ)):
        monkeypatch.delenv(name)
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def start(
    command: list[str], environment: dict[str, str], output: Path, **how: Any
) -> subprocess.Popen[bytes]:
    """A process whose output goes to a file; returned when its two workers are there."""
    with output.open("w") as stream:
        launcher = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, **how)
    try:
        wait_for(lambda: len(pids_of_workers(output.read_text())) == 2)
    except AssertionError:
        launcher.terminate()
        raise
    return launcher


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of a store that ranks are told of, on this machine."""
    found = free_port()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def rank_of(world_size: int, rank: int = 0, **others: int) -> Ranks:
    """A rank on the CPU, by itself the first on its machine."""
    device = torch.device("cpu")
    given = {"local_rank": 0, "local_world_size": world_size, **others}
    return Ranks(rank=rank, world_size=world_size, device=device, **given)


def pids_of_workers(output: str) -> list[int]:
    words = [line.split() for line in output.splitlines() if line.startswith("worker")]
    return [int(line[line.index("pid") + 1]) for line in words]


def test_the_launcher_returns_the_first_failed_workers_status(entry, environment):
    result = run([sys.executable, entry, "--nproc_per_node", "2", "--name", "fail"], environment)
    assert result.returncode == 2
    assert result.stdout.splitlines()[0] == "Starting 2 processes, as requested."
    assert "worker 1 of 2" in result.stdout and "name fail" in result.stdout
    assert result.stderr.splitlines() == [
        "this is the reason",
        "Rank 1 failed with exit code 2; the error is above.",
    ]
    assert all(map(is_gone, pids_of_workers(result.stdout)))


def test_torchrun_without_nproc_starts_all_workers_and_a_signal_ends_all(
    entry, environment, tmp_path
):
    output = tmp_path / "output"
    command = [*TORCHRUN, entry, "--world_size", "2", "--name", "sleep"]
    launcher = start(command, environment, output)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=600) != 0
    said = {line[:13] for line in output.read_text().splitlines()}
    assert {"worker 0 of 2", "worker 1 of 2"} <= said
    assert all(map(is_gone, pids_of_workers(output.read_text())))


@pytest.mark.parametrize(
    ("torchrun", "variables"),
    [
        ("--nproc_per_node 1", {}),
        ("--nproc-per-node=1 --standalone", {}),
        ("--nproc 1", {}),
        ("", {"PET_NPROC_PER_NODE": "1"}),
        ("", {"WORLD_SIZE": "2", "RANK": "1", "GROUP_WORLD_SIZE": "2"}),
    ],
)
def test_torchruns_nproc_per_node_is_respected(torchrun, variables, entry, environment, tmp_path):
    (tmp_path / "torchrun.py").write_text(FAKE_TORCHRUN)
    command = [sys.executable, str(tmp_path / "torchrun.py"), *torchrun.split(), entry]
    result = run([*command, "--name", "x"], {**environment, **variables})
    assert result.returncode == 0, result.stderr
    assert len(pids_of_workers(result.stdout)) == 1
    # And another number after train.py is refused, instead of starting more.
    result = run([*command, "--nproc_per_node", "3"], {**environment, **variables})
    assert result.returncode == 2
    assert "torchrun has started 1 process" in result.stderr


@pytest.mark.parametrize(
    ("gpus", "options", "processes"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (4, {}, 4),
        (4, {"nproc_per_node": 1}, 1),
        (2, {"device": "cpu"}, 1),
        (2, {"device": "cpu", "nproc_per_node": 4}, 4),
    ],
)
def test_one_process_per_visible_gpu_unless_on_the_cpu(gpus, options, processes, monkeypatch):
    monkeypatch.setattr(launch, "_visible_gpus", lambda: gpus)
    assert launch._num_processes(TrainConfig(**options))[0] == processes


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "_visible_gpus", lambda: 2)
    with pytest.raises(UserError, match="4 processes are requested, but 2 GPUs are visible"):
        launch.relaunch_if_needed(TrainConfig(nproc_per_node=4), [])


def listening() -> dict[int, str]:
    """Port -> address at which this process and its children listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [connection for process in processes for connection in process.net_connections()]
    return {one.laddr.port: one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def test_the_store_of_a_run_listens_on_this_machine_only(entry, environment, port, tmp_path):
    before = listening()
    command = [sys.executable, entry, "--nproc_per_node", "2", "--name", "sleep"]
    launcher = start(command, environment, tmp_path / "output")
    opened = {port: address for port, address in listening().items() if port not in before}
    launcher.terminate()
    launcher.wait()
    assert set(opened.values()) == {"127.0.0.1"}
    # Ranks that were started one by one: rank 0 holds the store.
    store = connect(rank_of(2))
    assert listening()[port] == "127.0.0.1" and store.add("a", 1) == 1


def test_store_keys_have_a_random_prefix(port, monkeypatch):
    names = [launch._launch_config(1, port=1, folder="/").run_id for _ in range(2)]
    assert len(set(names)) == 2 and min(map(len, names)) == 32
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", names[0])
    store = connect(rank_of(2))
    stranger = TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    for key in ("abort", "attempt-0/abort"):
        stranger.set(key, json.dumps([1, "the end", "refused"]))
    assert not store.check(["abort"])
    stranger.set(f"{names[0]}/attempt-0/abort", "")
    assert store.check(["abort"])


def test_ranks_meet_if_agents_count_restarts_differently(port, monkeypatch):
    # rank 0's store is of this attempt alone
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    stores = []
    for rank, attempt in enumerate("10"):  # that of a node that has stayed, and of a new one
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(connect(rank_of(2, rank, local_world_size=1)))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"  # waits: `set` does not


@pytest.mark.parametrize(("address", "is_warned"), [("10.0.0.1", False), ("8.8.8.8", True)])
def test_a_store_at_a_public_address_gives_a_warning(address, is_warned, monkeypatch, lines):
    monkeypatch.setattr(store.dist, "TCPStore", lambda *_, **__: store.dist.HashStore())
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29400")
    connect(rank_of(2))
    assert any("has no password" in line for line in lines) == is_warned


def test_torchrun_does_not_restart_a_final_ending(monkeypatch):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torchrun = {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "3", "RUN_ID": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))

    def fail(*_):
        assert not list(filter(is_from_an_agent, os.environ))
        for reason in (message, "the connection was lost"):  # of two ranks
            ending = ENDINGS["failed"]._replace(is_final=reason == "loss is NaN")
            restarts.record_exit(ending, reason)
        raise ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "")})

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: fail)
    monkeypatch.setattr(launch, "_end_with_parent", lambda: None)
    for attempt, message in enumerate(["killed", "loss is NaN"]):
        with socket.create_server(("localhost", 0)) as server_socket:
            assert launch._run_workers(2, [], server_socket, raises=False).status == 1
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt + 1))
        assert restarts.previous_exit() == ((1, message) if attempt else None)


def test_ctrl_z_stops_the_workers_too_and_fg_continues_all(entry, environment, tmp_path):
    output = tmp_path / "output"
    command = [sys.executable, entry, "--nproc_per_node", "2", "--name", "sleep"]
    # a process group of its own, as a shell gives it
    launcher = start(command, environment, output, preexec_fn=os.setpgrp)
    pids = (launcher.pid, *pids_of_workers(output.read_text()))
    processes = [psutil.Process(pid) for pid in pids]

    def states() -> set[str]:
        return {process.status() for process in processes}

    try:
        for _ in range(2):
            launcher.send_signal(signal.SIGTSTP)
            wait_for(lambda: states() == {psutil.STATUS_STOPPED})
            launcher.send_signal(signal.SIGCONT)
            wait_for(lambda: psutil.STATUS_STOPPED not in states())
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.send_signal(signal.SIGCONT)
    assert launcher.wait(timeout=600) == 75


def test_workers_end_when_their_launcher_was_killed(entry, environment, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import os, subprocess, sys\n"
        "os.environ.update(FSDP_QLORA_LAUNCHER_PID=str(os.getpid()), WORLD_SIZE='2', RANK='1')\n"
        "subprocess.call([sys.executable, sys.argv[1], '--name', 'sleep'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(launcher), entry], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    (pid,) = pids_of_workers(process.stdout.readline())
    assert not is_gone(pid)
    process.kill()
    process.wait()
    wait_for(lambda: is_gone(pid))
    process.stdout.close()


def test_a_rank_names_the_rank_that_never_started(port, monkeypatch, capfd):
    # nobody listens at the port: rank 0 has died before it came so far
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(store, "MAX_WAIT_MINUTES", 0.01)
    first, third = (rank_of(4, rank, local_world_size=1) for rank in (0, 3))
    for wait_minutes in (0.005, 0, 15):  # as --hang_minutes says, which may be longer or none
        said = rf"Rank 3 has waited 0.0\d+ minutes for rank 0.* at 127.0.0.1:{port}"
        with pytest.raises(LostRank, match=said):
            connect(third, timeout_minutes=30, wait_minutes=wait_minutes)
    stores = [connect(rank, timeout_minutes=30) for rank in (first, third)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert not capfd.readouterr().err


def test_every_rank_names_a_port_that_is_in_use(monkeypatch):
    with socket.create_server(("localhost", 0)) as other:

        def close_all() -> None:
            for _ in range(20):
                other.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        place = f"localhost:{other.getsockname()[1]}"
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", place.partition(":")[2])
        monkeypatch.setattr(store, "_ANSWER_TIMEOUT", datetime.timedelta(seconds=1))
        said = rf"cannot open its store at {place} .*in use\. Choose a free port"
        with pytest.raises(UserError, match=said):
            connect(rank_of(2))
        said = rf"Rank 1 finds no store at {place} .*though something listens"
        with pytest.raises(LostRank, match=said):
            connect(rank_of(2, 1, local_rank=1), timeout_minutes=30)


def test_each_rank_prints_its_reason_and_torchrun_repeats_one(environment):
    train = ["--nproc_per_node", "2", str(ROOT / "train.py"), "--batch_size", "0"]
    result = run([*TORCHRUN, *train], environment)
    printed, _, last = result.stderr.partition("Root Cause")
    reason = "--batch_size must be 1 or more, but is 0."
    assert f"] error: {reason}" in printed, result.stderr
    assert reason in "".join(last.splitlines()[-4:]), result.stderr


def test_a_planned_stop_is_no_error(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    for error, said in (
        (UserError("a is wrong."), "[rank 1] error: a is wrong.\n"),
        (RunStopped("over_budget", "Stopped after step 3."), "[rank 1] Stopped after step 3.\n"),
    ):
        for _ in range(2):  # printed once
            print_error(error)
        assert capsys.readouterr().err == said
    assert launch._report_failure(1, 3, "Stopped after step 3.") == 3
    assert capsys.readouterr().err == "The run stopped with exit code 3; the reason is above.\n"
