"""Activations in host memory: what goes there once, what stays, and what is where meanwhile."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_qlora.planning.activations import Activations, OnHost
from fsdp_qlora.sharding import host_activations
from fsdp_qlora.sharding.host_activations import ActivationStore
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_recompute, wrap_blocks
from tests.helpers.host_activations import poison
from tests.layers.test_offload import BLOCKS, SIZE, Model, gradients

# blocks that do not keep their activations on the device, and those of them on the host
CHOICES = [(4, 4), (3, 3), (4, 2), (3, 1), (4, 1), (2, 2)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, least=33, part=200)


class Where:
    """Notes which blocks have activations on the device at the begin of each block's passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        self.storages: list[tuple[int, weakref.ref[Any]]] = []
        self.forward: list[set[int]] = []
        self.backward: list[set[int]] = []
        storage_class = host_activations._Storage
        init = storage_class.__init__

        def noting(storage: Any, moved: Any, tensor: torch.Tensor) -> None:
            init(storage, moved, tensor)
            self.storages.append((moved.number, weakref.ref(storage)))

        monkeypatch.setattr(storage_class, "__init__", noting)
        for block in recomputed_blocks(model):  # type: ignore[arg-type]
            inner = block._checkpoint_wrapped_module
            inner.register_forward_pre_hook(lambda *_: self.forward.append(self.now()))
            # behind the hook of the store, which is on the output, too
            block.register_forward_hook(self._note_backward)

    def _note_backward(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.backward.append(self.now()))

    def now(self) -> set[int]:
        numbers: set[int] = set()
        for number, reference in self.storages:
            storage = reference()
            if storage is not None and storage.on_device is not None:
                numbers.add((number - 1) % BLOCKS)
        return numbers


@pytest.mark.quick
@pytest.mark.parametrize(("leaving", "on_host"), CHOICES)
def test_activations_come_back_one_block_ahead(leaving, on_host, monkeypatch):
    torch.manual_seed(0)
    model = Model()
    expected = gradients(model)
    wrap_blocks(model, offload=False)
    set_recompute(model, leaving, on_host=on_host)
    where = Where(monkeypatch, model)
    for _ in range(2):
        found = gradients(model)
        assert len(found) == BLOCKS and all(map(torch.equal, found, expected))
    store = recomputed_blocks(model)[0].activations
    assert store is not None and len(store.free) * 200 == store.total
    # In the second round micro-batches have 9 tokens at most, as in the first.
    planned = Activations([1] * BLOCKS, 1, 0, leaving, OnHost(blocks=on_host))
    assert [index for index, block in enumerate(recomputed_blocks(model)) if block.moves] == (
        planned.moved
    )
    # of the last of three micro-batches, from the last block to the first
    backward = where.backward[-BLOCKS:][::-1]
    for index, here in enumerate(backward):
        expected_here = {each for each in planned.moved if each <= index}
        counted = planned.in_backward(index).inputs - (index + 1 - len(expected_here))
        assert here <= expected_here and len(here) == counted, (index, here)
    assert max(map(len, where.forward)) <= 2


class Saving(nn.Module):
    """Saves a tensor twice, two views of another one, a table, its weight and a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        both = torch.cat([y, 2 * y], -1)
        first, second = both.split(SIZE, -1)
        small = x.mean(-1, keepdim=True)
        return y * y * table + first * second * small + y.exp()


@pytest.mark.quick
def test_each_storage_goes_once_and_weights_tables_and_small_tensors_stay():
    torch.manual_seed(0)
    block = Saving()
    x = torch.randn(8, SIZE, requires_grad=True)
    table = torch.randn(8, SIZE)
    y = block(x, table)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, x, grad)[0]
    store = ActivationStore()
    sizes: list[int] = []
    copy_all = host_activations.SideStream.copy_all

    def counting(side: Any, pairs: Any) -> Any:
        pairs = [*pairs]
        sizes.append(sum(source.numel() for _, source in pairs))
        return copy_all(side, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_activations.SideStream, "copy_all", counting)
        found = store.run(block, block, (x, table), {}, moves=True)
        size = 4 * 8 * SIZE
        # y; first * second; exp(y); both
        assert sorted(sizes) == [size, size, size, 2 * size]
        store._leaving.pop().release()
        sizes.clear()
        assert torch.equal(torch.autograd.grad(found, x, grad)[0], expected)
        assert sorted(sizes) == [size, size, size, 2 * size]


class Written(torch.autograd.Function):
    """Saves its argument before and after it writes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        before = pack(place)
        place.add_(1)
        ctx.saved = before, pack(place), unpack
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        before, after, unpack = ctx.saved
        return grads[0] * (unpack(after) - unpack(before)), None


@pytest.mark.quick
def test_a_storage_that_was_written_goes_once_more():
    store = ActivationStore()
    x = torch.ones(16, SIZE, requires_grad=True)
    place = torch.zeros(16, SIZE)
    found = store.run(lambda x: Written.apply(x, place), nn.Identity(), (x,), {}, moves=True)
    store._leaving.pop().release()
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.ones_like(x))
