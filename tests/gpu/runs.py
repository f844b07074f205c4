"""Runs of train.py in processes of their own, all on the first card."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stand_in.environment import free_port
from tests.chaos.harness import steps_done, wait_for
from tests.helpers.run import ROOT


class Started:
    """Ranks of one program, all on the first card, their output in files.

    apart: NCCL refuses two ranks on one card of one host; with another name of the host for each,
    sockets join them.
    """

    def __init__(
        self, arguments: Sequence[object], folder: Path, *, ranks: int = 1, apart: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.apart = apart
        self.logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
        port = free_port()
        self.processes = [
            self._start(arguments, folder, rank, ranks, port) for rank in range(ranks)
        ]

    def _start(
        self, arguments: Sequence[object], folder: Path, rank: int, ranks: int, port: int
    ) -> "subprocess.Popen[bytes]":
        own: dict[str, object] = {"PHANTOM_DIR": folder, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": 1}
        own |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        if ranks > 1:
            own |= {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
            own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        if self.apart:
            own |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1}
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with open(self.logs[rank], "w") as output:
            return subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=environment,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def wait(self, seconds: float = 120) -> list[int]:
        """Exit statuses of all ranks, which end by themselves within that time; else all are
        killed.
        """
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(
                f"still running after {seconds} s:\n{self.output()[-4000:]}"
            ) from None

    def end_after(self, seconds: float) -> None:
        """Wait until all ranks have ended, and end those that have not within that time."""
        with contextlib.suppress(AssertionError):
            self.wait(seconds)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


@contextlib.contextmanager
def started(
    arguments: Sequence[object], folder: Path, *, ranks: int = 1, apart: bool = False
) -> Iterator[Started]:
    """Start a program; none of its processes outlives the block."""
    program = Started(arguments, folder, ranks=ranks, apart=apart)
    try:
        yield program
    finally:
        program.end()


def run(arguments: Sequence[object], folder: Path, *, ranks: int = 1, seconds: float = 240) -> str:
    """Run a program that must succeed; returns its output."""
    with started(arguments, folder, ranks=ranks) as program:
        statuses = program.wait(seconds)
        assert statuses == [0] * ranks, program.output()[-6000:]
        return program.output()


def last_line(output: str) -> dict[str, Any]:
    """The JSON object that a program prints last."""
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def wait_for_step(program: Started, output_dir: Path, step: int) -> None:
    """Wait until a run has done its first `step` steps."""

    def reached() -> bool:
        assert all(process.poll() is None for process in program.processes), program.output()[
            -6000:
        ]
        return steps_done(output_dir) >= step

    wait_for(reached)
