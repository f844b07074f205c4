"""What is tried before step 1, so that what does not fit fails there."""

import pytest
import torch
from torch import nn

from fsdp_qlora.optimizers.sharded import ShardedOptimizer


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_the_room_for_an_optimizers_state_is_that_of_the_state_it_makes(name: str) -> None:
    model = nn.Linear(64, 96)
    optimizer = ShardedOptimizer(model, name, lr=0.0, weight_decay=0.0)
    room = sum(tensor.numel() * tensor.element_size() for tensor in optimizer.room_for_state())
    assert optimizer.state_bytes() == 0
    model(torch.ones(1, 64)).sum().backward()
    optimizer.take_gradients()
    optimizer.step(0.0)
    counts_of_steps = 64
    assert room <= optimizer.state_bytes() <= room + counts_of_steps
    assert optimizer.room_for_state() == []  # the state is there: nothing more will be made
