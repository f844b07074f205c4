"""Blocks computed again in the backward pass, against torch.utils.checkpoint and against no checkpoint at all."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.sharding.recompute import RecomputedBlock

pytestmark = pytest.mark.quick


class Block(nn.Module):
    """Random, and in 16 bits under autocast. What comes last keeps nothing for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 6), nn.Identity()
        self.calls: list[str] = []
        for name in ("first", "second", "last"):
            getattr(self, name).register_forward_pre_hook(lambda *_, name=name: self.calls.append(name))

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(torch.tanh(self.first(x)), 0.5) * factor
        return x + self.last(nn.functional.dropout(self.second(y), 0.5))


def results(model: nn.Module, run: Any, *, autocast: bool) -> list[torch.Tensor]:
    """Output, gradients, and a random number after each pass."""
    torch.manual_seed(0)
    model.zero_grad()
    x, factor = torch.randn(3, 6, requires_grad=True), torch.tensor(2.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(x + 0, factor=factor)
    numbers = [torch.rand(1)]
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *numbers, torch.rand(1)]


@pytest.mark.parametrize("autocast", [False, True])
def test_random_blocks_give_what_they_give_without_and_by_torchs_checkpoint(autocast: bool) -> None:
    block = Block()
    expected = results(block, block, autocast=autocast)
    by_torch = results(block, lambda *args, **kwargs: checkpoint(block, *args, use_reentrant=False, **kwargs),
                       autocast=autocast)  # fmt: skip
    block.calls.clear()
    own = results(block, RecomputedBlock(block), autocast=autocast)
    assert len(own) == len(expected) == 8
    assert all(map(torch.equal, own, expected)) and all(map(torch.equal, by_torch, expected))
    # The second time not what comes after the last tensor that is kept.
    assert block.calls == ["first", "second", "last", "first", "second"]


def test_nothing_is_kept_but_the_input_and_that_not_longer_than_needed() -> None:
    block = RecomputedBlock(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    x = torch.randn(3, 6, requires_grad=True) + 0
    kept: list[Any] = []
    forward_hook = block._checkpoint_wrapped_module[1].register_forward_hook(
        lambda module, args, output: kept.append(weakref.ref(output))
    )
    y = block(x)
    assert kept[0]() is None
    forward_hook.remove()
    memory = weakref.ref(x.untyped_storage())
    y.sum().backward()
    del x, y
    gc.collect()
    assert memory() is None


class Uneven(nn.Module):
    """Computes another shape each time."""

    tokens = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens -= 1
        return torch.exp(x[: self.tokens])


class Fewer(nn.Module):
    """Keeps less each time."""

    times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times -= 1
        for _ in range(self.times + 1):
            x = torch.exp(x)
        return x


def test_what_cannot_be_computed_again_is_refused() -> None:
    def input_() -> torch.Tensor:
        return torch.randn(3, 6, requires_grad=True) + 0

    x = input_()
    y = RecomputedBlock(nn.Tanh())(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()
    y = RecomputedBlock(nn.Tanh())(input_())
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \[1, 6\] again, and \[2, 6\] before"):
        RecomputedBlock(Uneven())(input_()).sum().backward()
    with pytest.raises(RuntimeError, match="1 tensors again, and 2 before"):
        RecomputedBlock(Fewer())(input_()).sum().backward()
