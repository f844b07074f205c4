"""Environments as users write them, good and broken ones, and the processes that they leave."""

import contextlib
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from fsdp_qlora.training.environments.pool import Environments

GAME = '''
import asyncio
import os
from typing import Any


class Game:
    """Reach a number by adding."""

    def __init__(self):
        self.sum = 0

    def reset(self, target, **columns):
        self.target = target
        self.columns = columns
        return f"Reach {target}."

    def add(self, amount: int) -> str:
        """Add to the sum.

        Args:
            amount: The number to add.
        """
        self.sum += amount
        return f"The sum is {self.sum}."

    async def wait_for(self, path: str) -> str:
        """Wait for a file.

        Args:
            path: The file's path.
        """
        while not os.path.exists(path):
            await asyncio.sleep(0.01)
        return "It is there."

    def echo(self, value: Any) -> str:
        """Give back.

        Args:
            value: Anything.
        """
        return value

    @property
    def done(self):
        return self.sum >= self.target

    def get_reward(self):
        return self.sum == self.target
'''

BROKEN = '''
import os
import subprocess
import sys
import time


def outlive(mark):
    """Start processes that leave the session, and whose parents have ended."""
    for _ in range(5):
        code = f"import time; time.sleep(600) # {mark}"
        subprocess.Popen(["setsid", "-f", sys.executable, "-c", code])


def sockets():
    return [n for n in range(3, 99) if os.path.lexists(f"/dev/fd/{n}")
            and os.readlink(f"/dev/fd/{n}").startswith("socket")]


class Broken:
    def reset(self, **row):
        self.row = row
        return self.run("reset")

    def run(self, name: str) -> str:
        """Run the code of a column.

        Args:
            name: The column's name.
        """
        variables = dict(globals(), row=self.row)
        exec(self.row.get(name, ""), variables)
        return variables.get("result")

    def tool(self) -> str:
        """Be called."""
        return self.run("tool")

    def get_reward(self):
        return self.run("reward")
'''
FOREVER = "while True: pass"


def write_broken(folder: Path) -> str:
    """A file with a class Broken, whose methods run the code of the row. Returns the word."""
    path = folder / "broken.py"
    path.write_text(BROKEN)
    return f"{path}:Broken"


def write_game(folder: Path) -> str:
    """A file with a class Game. Returns the word."""
    path = folder / "game.py"
    path.write_text(textwrap.dedent(GAME))
    return f"{path}:Game"


@contextlib.contextmanager
def running(
    *words: str, call_seconds: float = 60, episode_seconds: float = 120, at_a_time: int = 8
) -> Iterator[Environments]:
    """Started environments."""
    environments = Environments(
        words, call_seconds=call_seconds, episode_seconds=episode_seconds, at_a_time=at_a_time
    )
    try:
        environments.start()
        yield environments
    finally:
        environments.close()


def left_processes(mark: str) -> list[int]:
    """The processes with a text in their command, besides this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ended = process.status() == psutil.STATUS_ZOMBIE
            if mark in " ".join(process.cmdline()) and not is_ended:
                found.append(process.pid)
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Return when no process of these is left."""
    while any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.01)
