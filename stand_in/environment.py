"""Programs on the stand-in for CUDA, started from tests that run in another environment."""

import atexit
import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(os.environ.get("FSDP_QLORA_PHANTOM") or ROOT / ".venv-phantom")
LIBRARIES = ENVIRONMENT / "phantom"
PYTHON = ENVIRONMENT / "bin" / "python"

_PORTS = itertools.count()  # so that this process tries each once


def why_not() -> str | None:
    """None where programs can be run on the stand-in, else the line that says what to do."""
    if (ENVIRONMENT / ".phantom_library").exists():
        return None
    return (
        "the stand-in for CUDA is not built: bash scripts/phantom.sh builds it (Linux x86-64, 700 "
        "MB)"
    )


def free_port() -> int:
    """A port at which nobody listens, which the kernel gives to nobody and this function not to
    another process.
    """
    # below the ports that the kernel gives out by itself
    first = 11_000 + os.getpid() * 1_009 % 20_000
    for port in (11_000 + (first + i) % 20_000 for i in _PORTS):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise AssertionError("unreachable")


@dataclass
class Rank:
    """How one process ended."""

    status: int
    output: str
    summary: dict[str, Any]  # of counts.py, when it was asked for


def variables(folder: Path, settings: dict[str, object]) -> dict[str, str]:
    """The environment of a process on the stand-in. `settings` are its PHANTOM_* variables, and any
    others.
    """
    # A command that a test ran in its own process has set the allocator's.
    ours = ("PHANTOM", "CUDA_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **inherited,
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "LD_PRELOAD": str(LIBRARIES / "libphantom.so"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "stand_in/startup")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PHANTOM_DIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        **{name: str(value) for name, value in settings.items()},
    }


def run(
    arguments: Sequence[object],
    folder: Path,
    *,
    ranks: int = 1,
    settings: dict[str, object] | None = None,
    settings_of_rank: dict[int, dict[str, object]] | None = None,
    summary: bool = False,
    timeout_seconds: float = 240,
    is_fresh: bool = False,
    while_running: Callable[[Sequence["Process"]], None] = lambda _: None,
) -> list[Rank]:
    """Run `python ARGUMENTS` on the stand-in as torchrun would: one process per rank, each on a GPU
    of its own machine.

    The processes are forked from one that has imported torch (forks.py), unless they are to be
    fresh.

    Args:
        arguments: a script, or -m and a module, and its words; of a fresh process whatever python
        takes. folder: for the ranks' output, messages and summaries; made if need be. settings:
        more environment variables for all ranks; settings_of_rank for single ones. summary: record
        the whole process (counts.py). while_running: is called now and then with the processes, one
        for each rank.
    Raises:
        TimeoutError: a rank was still running; all are ended, and the text has their output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[Process] = []
    for rank in range(ranks):
        own: dict[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": ranks,
        }
        own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        if summary:
            own["PHANTOM_SUMMARY"] = folder / f"counts{rank}.json"
        own |= {**(settings or {}), **(settings_of_rank or {}).get(rank, {})}
        start = Fresh if is_fresh else Forked
        processes.append(
            start(list(map(str, arguments)), variables(folder, own), folder / f"rank{rank}.log")
        )
    in_time = _wait(processes, timeout_seconds, while_running)
    ended = [_ended(process, folder, rank) for rank, process in enumerate(processes)]
    if not in_time:
        raise TimeoutError("\n".join(rank.output[-3000:] for rank in ended))
    return ended


class Fresh:
    """A process that begins with nothing."""

    def __init__(self, arguments: list[str], environment: dict[str, str], output: Path) -> None:
        command = [str(PYTHON), *arguments]
        with open(output, "w") as file:
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
            )

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Forked:
    """A process that begins with torch imported."""

    def __init__(self, arguments: list[str], environment: dict[str, str], output: Path) -> None:
        with _starting:
            self._connection = _connect(_forks())
        request = {"words": arguments, "environment": environment, "output": str(output)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self._pid = int(self._answers.readline())
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            self._status = int(self._answers.readline())
            self._connection.close()
        return self._status

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._status = int(self._answers.readline())
        self._connection.close()


Process = Fresh | Forked


_starting = threading.Lock()  # tests start ranks in threads


@functools.cache
def _forks() -> str:
    """The socket of this process's server of forks."""
    path = Path(tempfile.mkdtemp(prefix="forks")) / "socket"
    command = [str(PYTHON), "-m", "stand_in.forks", str(path)]
    server = subprocess.Popen(command, env=variables(path.parent, {"OMP_NUM_THREADS": 1}), cwd=ROOT)
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    atexit.register(server.kill)
    while not path.exists():
        if server.poll() is not None:
            raise RuntimeError("the process that forks the stand-in's has ended")
        time.sleep(0.05)
    return str(path)


def _connect(path: str) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError):  # its address is there before it listens
            connection.connect(path)
            return connection
        time.sleep(0.05)


def _wait(
    processes: Sequence["Process"],
    seconds: float,
    while_running: Callable[[Sequence["Process"]], None],
) -> bool:
    """Wait for all; when one failed the others are given a moment and ended, as torchrun does."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
        while_running(processes)
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + 60)
    in_time = time.monotonic() < end or any(process.poll() for process in processes)
    for process in processes:
        if process.poll() is None:
            process.kill()
    return in_time


def _ended(process: Fresh | Forked, folder: Path, rank: int) -> Rank:
    counts = folder / f"counts{rank}.json"
    status = process.poll()
    assert status is not None
    return Rank(
        status=status,
        output=(folder / f"rank{rank}.log").read_text(),
        summary=json.loads(counts.read_text()) if counts.exists() else {},
    )


def subtract(more: dict[str, Any], less: dict[str, Any]) -> dict[str, Any]:
    """What one run did more than another: two summaries of runs that differ in their number of
    steps by one give the numbers of that step. Peaks of memory are those of the longer run.
    """
    difference: dict[str, Any] = {"memory": more["memory"]}
    for key in more.keys() - {"memory"}:
        if isinstance(more[key], list):
            counts = _counter(more[key])
            counts.subtract(_counter(less[key]))
            difference[key] = [
                {**dict(entry), "count": count} for entry, count in counts.items() if count
            ]
        else:
            difference[key] = more[key] - less[key]
    return difference


def _counter(entries: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(
        {
            tuple(pair for pair in entry.items() if pair[0] != "count"): entry["count"]
            for entry in entries
        }
    )
