"""Episodes whose turns a server writes, and one that is killed in the middle of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import Job, adapter, ended, finish, wait_for
from tests.episodes.runs import inputs
from tests.rollouts.runs import rollouts_of
from tests.rollouts.test_server import ServerProcess, farthest


@pytest.fixture
def server(agent: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    command = sys.executable, "-m", "tests.rollouts.lora_server", str(agent), "tiny", "{port}"
    found = ServerProcess(*command, log=tmp_path / "server.log")
    yield found
    found.kill()


def options_of(folder: Path, agent: Path, server: ServerProcess, output: str) -> dict[str, Any]:
    options = inputs(folder, agent, gradient_accumulation_steps=8, num_epochs=4)
    options |= {"base_name": "hub/tiny", "rollout_url": server.url, "save_every": 3}
    return options | {"log_to": "stdout", "output_dir": folder / output}


@pytest.mark.slow
def test_a_killed_server_changes_no_byte_of_episodes(agent, server, tmp_path):
    finish(options_of(tmp_path, agent, server, "whole"), tmp_path / "logs")
    records = rollouts_of(tmp_path / "whole")
    assert [record["version"] for record in records[::16]] == [*range(4)]
    assert farthest(records) < 1e-4
    turns = [record["episode"]["num_turns"] for record in records]
    assert 1 in turns and max(turns) > 2
    with ended(Job(options_of(tmp_path, agent, server, "out"), tmp_path / "logs_killed")) as job:
        wait_for(lambda: "step 1/4" in job.output())
        server.kill()
        wait_for(lambda: job.output().partition("step 1/4")[2].count("Waiting for the server"))
        server.start()
        assert job.wait() == [0, 0], job.output()
    assert rollouts_of(tmp_path / "out") == records
    assert adapter(tmp_path / "out") == adapter(tmp_path / "whole")
