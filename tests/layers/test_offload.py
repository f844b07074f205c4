"""Block inputs and weights that are kept on the host: what computes with them, and what is where
meanwhile.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.model_parts import ModelParts
from fsdp_qlora.model.quantizers.base import QuantizedExperts
from fsdp_qlora.sharding import weight_stream
from fsdp_qlora.sharding.host_memory import InputStore, split_arena
from fsdp_qlora.sharding.recompute import RecomputedBlock, set_recompute, wrap_blocks
from tests.helpers.models import PROBE
from tests.layers.test_routed import build

SIZE = 8
BLOCKS = 4


class Block(nn.Module):
    """A frozen weight and one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.frozen(x) * self.scale)


class Model(nn.Module):
    """As much of a causal language model as these tests need;
    the head is the embedding's weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(16, SIZE).requires_grad_(False)
        self.model.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.model.forward = self._base  # type: ignore[method-assign]
        self.head = nn.Linear(SIZE, 16, bias=False)
        self.head.weight = self.model.embed.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed  # type: ignore[return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _base(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed(ids)  # type: ignore[operator]
        for block in self.model.layers:  # type: ignore[union-attr]
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # As head and loss in one function: without the head's own forward.
        return nn.functional.linear(self.model(ids), self.head.weight).logsumexp(-1).sum()


def gradients(model: nn.Module, lengths: tuple[int, ...] = (5, 9, 7)) -> list[torch.Tensor]:
    """Of micro-batches of these lengths, after an evaluation that must leave nothing behind."""
    model.zero_grad()
    with torch.no_grad():
        model(torch.arange(3)[None])
    for length in lengths:
        model(torch.arange(length)[None] % 16).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def put_into_arena(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Let frozen parameters lie side by side in host memory."""
    places = split_arena([parameter.nbytes for parameter in parameters], pinned=False)
    for parameter, place in zip(parameters, places, strict=True):
        parameter.data = place.view(parameter.dtype).view(parameter.shape).copy_(parameter.data)
    return parameters


@pytest.mark.quick
def test_offloaded_inputs_give_the_same_gradients_in_reused_memory(monkeypatch):
    torch.manual_seed(0)
    model = Model()
    expected = gradients(model)
    wrap_blocks(model, offload=True)
    store = model.model.layers[0].store  # type: ignore[index, union-attr]
    assert all(
        isinstance(block, RecomputedBlock) and block.store is store for block in model.model.layers
    )  # type: ignore[union-attr]
    assert isinstance(store, InputStore)
    found = gradients(model)
    assert len(found) == BLOCKS and all(map(torch.equal, found, expected))
    places = {memory.data_ptr() for memory in store.free[0]}
    assert len(places) == BLOCKS and all(memory.numel() == 9 * SIZE * 4 for memory in store.free[0])
    gradients(model)
    assert {memory.data_ptr() for memory in store.free[0]} == places
    # A block that does not recompute keeps what it computes with, weights too: nothing of that is
    # moved.
    set_recompute(model, 0)
    monkeypatch.setattr(store, "pack", None)
    assert all(map(torch.equal, gradients(model), expected))


class HostCopies(TorchDispatchMode):
    """Notes copies of parts of these tensors: which one, and how many are alive at a time."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        starts = [tensor.data_ptr() for tensor in tensors]
        self.places = [range(a, a + each.nbytes) for a, each in zip(starts, tensors, strict=True)]
        self.copied: list[int] = []
        self.most_alive = 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            found = [i for i, place in enumerate(self.places) if args[1].data_ptr() in place]
            self.copied += found
            self._alive += [weakref.ref(args[0])] * len(found)
            self.most_alive = max(self.most_alive, sum(each() is not None for each in self._alive))
        return func(*args, **(kwargs or {}))


@pytest.mark.quick
@pytest.mark.parametrize("recomputed", [BLOCKS, 1, 0])
def test_weight_prefetch_keeps_two_modules_on_the_device(recomputed):
    torch.manual_seed(0)
    model = Model()
    model.config = LlamaConfig()  # type: ignore[assignment]
    expected = gradients(copy.deepcopy(model))
    wrap_blocks(model, num_blocks=recomputed, offload=False)
    modules = ModelParts(model).in_order  # type: ignore[arg-type]
    frozen = put_into_arena([each for each in model.parameters() if not each.requires_grad])
    weights = [parameter for parameter in frozen if parameter.dim() == 2]  # biases lie behind them
    on_host = [parameter.data for parameter in weights]
    weight_stream.stream_weights(model, modules, torch.device("cpu"))  # type: ignore[arg-type]
    with HostCopies(on_host) as copies:
        for _ in range(2):
            found = gradients(model)
            assert len(found) == BLOCKS and all(map(torch.equal, found, expected))
    assert copies.most_alive == 2
    # In the second round: the evaluation, then three times forward and backward. What is at work
    # where the direction turns is not copied again.
    last = BLOCKS + 1
    one_pass = [*range(2, last + 1), *range(last - 2, -1, -1)]
    of_weights = [module % last for module in one_pass]  # the last module, the head, has those of 0
    assert copies.copied[-3 * len(one_pass) :] == 3 * of_weights
    # The first block, whose backward pass was last, uses its copy; all others are on the host.
    is_here = [
        each.data_ptr() != host.data_ptr() for each, host in zip(weights, on_host, strict=True)
    ]
    assert is_here == [number == 1 for number in range(last)]


@pytest.mark.quick
def test_only_the_experts_that_a_token_chose_are_copied(monkeypatch):
    model, _ = build("qwen3_moe", "qlora", adapted=True)
    token = PROBE[:1, :1]
    blocks = find_blocks(model)
    with torch.no_grad():
        expected = model(input_ids=token).logits
        all_expected = model(input_ids=PROBE).logits
    for block in blocks:
        put_into_arena([each for each in block.parameters() if not each.requires_grad])
    layers = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    codes = [layer.weight.data for layer in layers]
    weight_stream.stream_weights(model, blocks, torch.device("cpu"))  # type: ignore[arg-type]
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: empty_like(*args, **options).fill_(127)
    )
    with torch.no_grad():
        with HostCopies(codes) as copies:
            assert torch.equal(model(input_ids=token).logits, expected)
        # two experts of each layer
        assert len(layers) == 2 * len(blocks)
        assert Counter(copies.copied) == dict.fromkeys(range(len(layers)), 2)
        assert torch.equal(model(input_ids=PROBE).logits, all_expected)
    # Their gradients, and so all that is copied, as when many tokens come: a block at once.
    with HostCopies(codes) as copies:
        model(input_ids=token).logits.sum().backward()
    assert not copies.copied
