"""Which blocks keep their activations in host memory: by a measured link, and steps tried."""

import pytest
import torch
from torch import nn

from fsdp_qlora.planning import fit_host
from fsdp_qlora.planning.fit import MemoryWatch
from fsdp_qlora.planning.fit_host import HostLimits, Trials, fit_on_host
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute
from tests.layers.test_probes import BLOCKS, _model

# bytes of a block, which recomputes in a second
LIMITS = HostLimits(block_bytes=100, link=100.0, free=1e4, micro_batches=10)


def moving(model: nn.Module) -> list[int]:
    return [index for index, block in enumerate(recomputed_blocks(model)) if block.moves]


def recomputing(model: nn.Module) -> int:
    return sum(block.is_on for block in recomputed_blocks(model))


class FakeSteps:
    """Steps of blocks that take a second forward and two backward, and wait for no link."""

    def __init__(
        self, model: nn.Module, room: int = 0, slower: float = 0.0, host: float = 1e4
    ) -> None:
        self.model = model
        self.room = room  # of steps that move activations
        self.slower = slower
        self.host = host
        self.tried: list[list[int]] = []

    def __call__(self) -> tuple[float, float]:
        moved = moving(self.model)
        self.tried.append(moved)
        return 3 * BLOCKS + recomputing(self.model) + self.slower * len(moved), (
            self.room if moved else 100
        )

    def reserve(self, size: int) -> bool:
        return size <= self.host


@pytest.mark.quick
@pytest.mark.parametrize(
    ("first", "limits", "steps", "expected"),
    [
        (8, {}, {}, [0, 1, 2, 3, 4, 5, 6]),
        (4, {}, {}, [0, 1, 2, 3]),
        # Half of them, spread evenly: copies have the time of two blocks.
        (8, {"link": 60.0}, {}, [1, 3, 5, 6]),
        (8, {"free": 600.0}, {}, [2, 4, 6]),
        # A link, a host and a run for which it is not tried.
        (8, {"link": 5.0}, {}, None),
        (8, {"free": 100.0}, {}, None),
        (8, {"micro_batches": 1, "block_bytes": 2**40, "link": 2.0**40, "free": 2.0**50}, {}, None),
        # Tried and taken back: no faster than it was, or without room.
        (8, {}, {"slower": 1.1}, []),
        (8, {}, {"room": -1}, []),
        # Host memory that cannot be pinned, and a GPU without room for one block more.
        (8, {}, {"host": 600.0}, None),
        (8, {"block_bytes": 101}, {}, None),
    ],
)
def test_activations_go_to_the_host_where_that_is_faster(first, limits, steps, expected):
    model = _model()
    set_recompute(model, first)
    fake = FakeSteps(model, **steps)
    number = fit_on_host(
        model, first, Trials(fake, fake.reserve, lambda value: value), LIMITS._replace(**limits)
    )
    assert moving(model) == (expected or []) and number == len(expected or [])
    assert len(fake.tried) == (2 if expected is None else 4)
    leaving = first if not number else min(first, BLOCKS - 1)
    assert recomputing(model) == leaving - number
    watch = MemoryWatch(model, leaving, most=1.0, on_host=number)
    if leaving < BLOCKS:
        assert watch.stepped(2.0) == leaving + 1 and len(moving(model)) == number


@pytest.mark.quick
def test_a_host_that_pins_no_memory_has_no_link_and_no_trial(monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("32 MiB of host memory cannot be pinned")

    caplog.set_level("INFO", "fsdp_qlora")
    monkeypatch.setattr(fit_host, "split_arena", refuse)
    link = fit_host.link_or_zero(torch.device("cuda"))
    assert link == 0 and "cannot be pinned" in caplog.text
    model = _model()
    set_recompute(model, BLOCKS)
    fake = FakeSteps(model)
    trials = Trials(fake, fake.reserve, lambda value: value)
    assert fit_on_host(model, BLOCKS, trials, LIMITS._replace(link=link)) == 0
    assert not fake.tried
