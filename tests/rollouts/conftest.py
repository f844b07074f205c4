"""A process group of one rank, whose waits look often whether they are over; servers."""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.sampling import SamplingOptions
from fsdp_qlora.training.rl import waiting
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.server_engine import ServerEngine
from tests.helpers.models import Models
from tests.rollouts.lora_server import LoraServer
from tests.rollouts.server_runs import END, LONGEST, VOCABULARY, ServerProcess, Stops, choose


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(waiting, "_PULSE_SECONDS", 0.01)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 0, 1, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def server() -> Iterator[LoraServer]:
    with LoraServer("hub/base", choose, END) as found:
        yield found


@pytest.fixture
def engine(server: LoraServer, tmp_path: Path, alone: Ranks) -> ServerEngine:
    """The engine of a run on one rank; its adapter is a number that grows."""
    versions = itertools.count()

    def save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(str(next(versions)))
        (folder / "adapter_config.json").write_text("{}")
        time.sleep(0.01)  # the next one is younger

    client = Server(server.url + "/v1/", ["/models/base"], 0.3, pause_seconds=(0.01, 0.02))
    prefix = tmp_path / "rollout_adapters" / "run"
    options = SamplingOptions(LONGEST, temperature=0.7, seed=5)
    stops: Any = Stops()
    return ServerEngine(
        client, save, prefix, alone, Control(), stops, options, vocab_size=VOCABULARY
    )


@pytest.fixture(scope="module")
def lora_server(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    command = sys.executable, "-m", "tests.rollouts.lora_server", str(models()), "tiny", "{port}"
    found = ServerProcess(*command, log=tmp_path_factory.mktemp("server") / "server.log")
    yield found
    found.kill()
