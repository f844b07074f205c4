"""Adapters on one rank compute with 16-bit copies of their weights, as with what FSDP2 gathers."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.common import peak_bytes
from fsdp_qlora.model.adapters import weight_copies
from fsdp_qlora.model.adapters.grouped import stacked
from fsdp_qlora.model.adapters.insert import adapter_modules
from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.adapters.weight_copies import WeightCopies
from fsdp_qlora.sharding.optimizer import ShardedOptimizer

SIZE = 64
DTYPE = torch.bfloat16


class Twice(nn.Module):
    """Two layers that are used twice, so that gradients of a weight are added up in a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential()
        for _ in range(2):
            base = nn.Linear(SIZE, SIZE).to(DTYPE).requires_grad_(False)
            layer = LoraLinear(base, rank=4, scaling=1.5, dropout=0.0)
            layer.lora.to_empty(device="cpu")
            for weight in layer.lora.parameters():
                nn.init.normal_(weight, std=0.2)
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.layers(x))  # type: ignore[no-any-return]


@pytest.fixture
def gathered() -> Iterator[Twice]:
    """The module whose adapters are a group of FSDP2's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Twice()
    frozen = {weight for weight in model.parameters() if not weight.requires_grad}
    policy = MixedPrecisionPolicy(DTYPE, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy, ignored_params=frozen)
    yield model
    dist.destroy_process_group()


def with_copies() -> Twice:
    model = Twice()
    model.register_forward_pre_hook(WeightCopies(adapter_modules(model), DTYPE).refresh)
    return model


def train(model: Twice) -> list[torch.Tensor]:
    """Outputs, gradients and weights of two steps of two micro-batches."""
    found: list[torch.Tensor] = []
    optimizer = ShardedOptimizer(model, "fused_adamw", lr=0.05, weight_decay=0.1)
    random = torch.Generator().manual_seed(1)
    for _ in range(2):
        for is_last in (False, True):
            if isinstance(model.layers[0].lora.lora_A.weight, DTensor):
                model.set_requires_gradient_sync(is_last)
            output = model(torch.randn(3, SIZE, generator=random).to(DTYPE))
            output.float().square().sum().backward()
            found.append(output.detach())
        optimizer.take_gradients()
        found += [gradient.clone() for gradient in optimizer._gradients()]
        optimizer.step(0.05)
        optimizer.zero_grad()
        found += [weight.detach().clone() for weight in optimizer._local.values()]
    return found


@pytest.mark.parametrize("slice_bytes", [weight_copies._SLICE, 2 * 4 * SIZE * 4])
def test_steps_have_the_bits_of_fsdp2s(gathered, slice_bytes, monkeypatch):
    monkeypatch.setattr(weight_copies, "_SLICE", slice_bytes)  # of all weights, or of two
    expected = train(gathered)
    found = train(with_copies())
    assert len(found) == len(expected) == 2 * (2 + 4 + 4)
    for own, reference in zip(found, expected, strict=True):
        assert own.dtype == reference.dtype and torch.equal(own, reference)


def test_collected_gradients_are_made_in_slices(monkeypatch):
    model = Twice()
    weights = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    copies = WeightCopies(adapter_modules(model), DTYPE)

    def peak() -> int:
        copies.refresh()
        for copy in copies._copies:
            copy.grad = torch.ones_like(copy)
        return peak_bytes(copies._collect)

    monkeypatch.setattr(weight_copies, "_SLICE", 0)
    assert peak() <= 4 * weights  # gradients that stay
    largest = 4 * max(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert peak() <= 2 * largest < 4 * weights


def test_copies_of_A_are_one_matrix_without_a_copy():
    model = with_copies()
    model(torch.ones(1, SIZE, dtype=DTYPE))
    adapters = [layer.lora for layer in model.layers]
    all_A = [adapter.copies[0] for adapter in adapters]
    together = stacked(all_A, DTYPE)
    expected = torch.cat([adapter.lora_A.weight for adapter in adapters]).to(DTYPE)
    assert torch.equal(together, expected) and together.data_ptr() == all_A[0].data_ptr()
    # in another order they are not below each other
    assert torch.equal(stacked(all_A[::-1], DTYPE), torch.cat(all_A[::-1]))
    separate = [lora_A.clone() for lora_A in all_A]
    assert torch.equal(stacked(separate, DTYPE), expected)


def test_a_backward_pass_that_failed_leaves_no_gradient():
    model = with_copies()
    failing = torch.ones(3, SIZE, dtype=DTYPE, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    failing.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(failing).sum().backward()
    x = torch.ones(3, SIZE, dtype=DTYPE)
    other = with_copies()
    for each in (model, other):
        each(x).sum().backward()
    for own, reference in zip(model.parameters(), other.parameters(), strict=True):
        assert own.grad is None if reference.grad is None else torch.equal(own.grad, reference.grad)
