"""How many blocks recompute: found by probing, alike on all ranks,
and more when memory runs short.
"""

import pytest
import torch
from torch import nn

from fsdp_qlora.planning.fit import MemoryWatch, fit_recompute
from fsdp_qlora.sharding.optimizer import ShardedOptimizer
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute, wrap_blocks

pytestmark = pytest.mark.quick

BLOCKS = 8
EACH = 10
START = 100


class Block(nn.Module):
    """One whose activations are `width` numbers that a backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(BLOCKS)))
    wrap_blocks(model, offload=False)
    return model


class FakeMemory:
    """Bytes as a GPU would count them: at the head all activations that are kept lie beside `head`,
    and in the backward pass of the first block with recompute those of none lie beside `block`.
    """

    def __init__(
        self, model: nn.Module, *, total: int, head: int, block: int, grows: int = 0
    ) -> None:
        self.model = model
        self.total = total
        self.head = head
        self.block = block
        self.grows = grows
        self.tried: list[int] = []

    def _keeping(self) -> int:
        return sum(not block.is_on for block in recomputed_blocks(self.model))

    def try_step(self) -> tuple[int, int]:
        self.tried.append(self._keeping())
        return START + EACH * self._keeping(), self.room()

    def room(self) -> int:
        kept = (EACH + self.grows) * self._keeping()
        return self.total - START - max(self.head + kept, self.block)


@pytest.mark.parametrize(
    ("memory", "too_few", "recomputing", "tried"),
    [
        ({"total": 150, "head": 50, "block": 0}, None, 8, [0]),  # no room to probe one
        ({"total": 185, "head": 50, "block": 0}, None, 5, [0, 1, 3]),
        ({"total": 1000, "head": 50, "block": 0}, None, 0, [0, 1, 8]),
        # The room that a block needs for recomputing hides some.
        ({"total": 185, "head": 20, "block": 60}, None, 3, [0, 1, 3, 5]),
        # The allocator loses some for each block: what the trial did not foresee is taken back.
        ({"total": 185, "head": 50, "block": 0, "grows": 4}, None, 6, None),
        # More than when memory ran out in an earlier run.
        *(
            ({"total": 1000, "head": 50, "block": 0}, too_few, number, None)
            for too_few, number in ((0, 4), (4, 6), (6, 7), (7, 8), (8, 8))
        ),
    ],
)
def test_the_fewest_blocks_that_fit_recompute(memory, too_few, recomputing, tried):
    model = _model()
    fake = FakeMemory(model, **memory)
    number = fit_recompute(
        model, fake.try_step, lambda value: value, block_bytes=EACH, too_few=too_few
    )
    assert number == recomputing and tried in (None, fake.tried)
    # The last ones keep theirs: their memory is free before another block recomputes.
    assert [block.is_on for block in recomputed_blocks(model)] == [True] * number + [False] * (
        BLOCKS - number
    )
    assert fake.room() >= 0


def test_the_rank_with_the_least_memory_decides():
    model = _model()
    memory = FakeMemory(model, total=1000, head=50, block=0)
    # room with all blocks; may it try; blocks that may keep there, in each round
    others = iter([0, 1, 3, 3])
    number = fit_recompute(
        model, memory.try_step, lambda value: min(value, next(others)), block_bytes=EACH
    )
    assert number == BLOCKS - 3


def test_a_step_near_the_memory_limit_makes_more_blocks_recompute():
    model = _model()
    set_recompute(model, 6)
    watch = MemoryWatch(model, 6, most=20.0)
    for reserved, number in ((19.9, 6), (20.1, 7), (20.2, 8), (21.0, 8)):
        assert (
            watch.stepped(reserved)
            == number
            == sum(block.is_on for block in recomputed_blocks(model))
        )


def test_only_recomputing_blocks_run_twice():
    model = _model()
    set_recompute(model, 3)
    x = torch.ones(1, 4, requires_grad=True)
    for block in recomputed_blocks(model):
        x = block(x)
    x.sum().backward()
    assert [block._checkpoint_wrapped_module.calls for block in recomputed_blocks(model)] == [
        2
    ] * 3 + [1] * 5


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_reserved_optimizer_memory_equals_the_real_state(name):
    model = nn.Linear(64, 96)
    optimizer = ShardedOptimizer(model, name, lr=0.0, weight_decay=0.0)
    rooms = [tensor.nbytes for tensor in optimizer.room_for_state()]
    room = sum(rooms)
    assert not optimizer.optimizer.state
    model(torch.ones(1, 64)).sum().backward()
    optimizer.take_gradients()
    optimizer.step(0.0)
    values = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    states = [value for value in values if torch.is_tensor(value)]
    counts_of_steps = 64
    assert room <= sum(state.nbytes for state in states) <= room + counts_of_steps
    # Each in a tensor of its own size: memory for small ones serves no large one, and the other way
    # round.
    assert sorted(rooms) == sorted(state.nbytes for state in states if state.numel() > 1)
    assert optimizer.room_for_state() == []  # the state is there: nothing more will be made
