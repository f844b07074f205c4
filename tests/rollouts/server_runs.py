"""Runs whose completions a server samples, and an engine of such a run alone."""

import contextlib
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import torch

from stand_in.environment import free_port
from tests.helpers.rows import write_rows
from tests.helpers.run import ROOT
from tests.helpers.tokenizers import WORDS
from tests.rollouts.lora_server import LoraServer
from tests.rollouts.runs import OPTIONS as ROLLOUT_OPTIONS

END = 9
LONGEST = 4
VOCABULARY = 10
PROMPTS = [[1, 2]] * 3 + [[3]] * 3


class Stops:
    tokens = frozenset({END})
    text = ""

    def ends(self, tokens: list[int]) -> bool:
        return tokens[-1] in self.tokens


def choose(adapter: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Some tokens that depend on all that they should depend on; half of the answers end by
    themselves.
    """
    numbers = torch.Generator().manual_seed(
        request["seed"] + len(request["prompt"]) + len(Path(adapter).name)
    )
    tokens = torch.randint(0, END, (LONGEST,), generator=numbers).tolist()
    tokens = [*tokens[:1], END] if tokens[0] % 2 else tokens
    return tokens, [-0.1 * token for token in tokens]


def asked(server: LoraServer, path: str) -> list[dict[str, Any]]:
    return [body for found, body in server.asked if found == f"/v1/{path}"]


def once(path: str, status: int, content: Any) -> Any:
    """A fault that befalls the first request to a path."""
    left = [1]

    def fault(found: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        is_first = found == f"/v1/{path}" and left and left.pop()
        return (status, content) if is_first else None

    return fault


def says_once(path: str, status: int, message: str) -> Any:
    return once(path, status, {"error": {"message": message}})


class ServerProcess:
    """A server in a process of its own, which can be killed and started again at the same address.

    Args:
        command: of the server, with {port} in it; it knows the base model as tiny.
    """

    def __init__(self, *command: str, log: Path, **environment: str) -> None:
        self.port = free_port()
        self._log = log
        self._command = [word.format(port=self.port) for word in command]
        self._environment = {**os.environ, **environment}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdout=self._log.open("a"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-4000:]
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/v1/models", timeout=60),
        ):
            return True
        return False


SCORER = """
def even(completion_ids, **_):
    return [sum(id % 2 == 0 for id in ids) for ids in completion_ids]
"""
OPTIONS: dict[str, object] = {
    **ROLLOUT_OPTIONS,
    "base_name": "hub/tiny",
    "num_epochs": 2,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "save_every": 3,
    "log_to": "stdout",
}


def options_of(
    server: ServerProcess | LoraServer, model: Path, folder: Path, output: str, **changes: object
) -> dict[str, object]:
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER)
    rows = [{"prompt": f"{a} {b}"} for a in WORDS[:4] for b in WORDS[4:6]]
    return {
        **OPTIONS,
        "model_name": model,
        "dataset": write_rows(folder / "prompts.jsonl", rows),
        "output_dir": folder / output,
        "rewards": f"{scorer}:even",
        "rollout_url": server.url,
        **changes,
    }
