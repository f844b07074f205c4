"""A process group of one rank, whose waits look often whether they are over."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.training.rl import waiting


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(waiting, "_PULSE_SECONDS", 0.01)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 0, 1, 1, torch.device("cpu"))
    dist.destroy_process_group()
