"""Blocks that recompute and keep attention's output: the same bits, and half of its kernels."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.model.architecture import kept_attention
from fsdp_qlora.model.architecture.attention import SDPA, attending
from fsdp_qlora.sharding.host_memory import InputStore, SideStream, _Kept
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_keeps_attention, wrap_blocks
from tests.helpers.models import SIZES

BLOCKS = 3
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
# of micro-batches, whose documents are several calls of a kernel where lengths differ
MICRO_BATCHES = [[40, 24], [64], [16, 16, 30]]


class Kernels(TorchDispatchMode):
    """Counts attention's operators, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("aten::_scaled_dot_product"):
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def make(dtype: torch.dtype, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": BLOCKS} | sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def step(model: PreTrainedModel) -> tuple[list[torch.Tensor], Counter[str]]:
    """The losses and gradients of a step of several micro-batches, and the kernels it took."""
    model.zero_grad()
    found: list[torch.Tensor] = []
    with attending(model, SDPA), Kernels() as kernels:
        for lengths in MICRO_BATCHES:
            ids = torch.arange(sum(lengths))[None] * 7 % 300
            logits = model(ids, use_cache=False, **describe_documents(lengths)).logits
            loss = torch.nn.functional.cross_entropy(logits[0].float(), ids[0])
            loss.backward()
            found.append(loss.detach())
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    return found + gradients, kernels.counts


@pytest.fixture
def keeping_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of any length count as long."""
    monkeypatch.setattr(kept_attention, "LONG", 1)


@pytest.mark.quick
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_runs_once_with_the_bits_of_recomputation(dtype, offload, keeping_all):
    model = make(dtype)
    kept, _ = step(model)
    wrap_blocks(model, offload=offload)
    recomputed, kernels = step(model)
    set_keeps_attention(model, True)
    calls = kernels[f"{KERNEL}_backward"]
    # Host memory has the first of each block and micro-batch.
    taken = BLOCKS * len(MICRO_BATCHES) if offload else calls
    assert kernels[KERNEL] == 2 * calls and calls > BLOCKS * len(MICRO_BATCHES)
    for _ in range(2):
        found, fewer = step(model)
        assert all(map(torch.equal, found, recomputed)) and all(map(torch.equal, found, kept))
        assert fewer[f"{KERNEL}_backward"] == calls and fewer[KERNEL] == 2 * calls - taken


@pytest.mark.quick
def test_short_documents_are_computed_again():
    model = make(torch.float32)
    wrap_blocks(model, offload=False)
    expected, kernels = step(model)
    set_keeps_attention(model, True)
    found, as_many = step(model)
    assert all(map(torch.equal, found, expected)) and as_many == kernels


@pytest.mark.quick
def test_dropout_in_attention_draws_the_same_again(keeping_all):
    model = make(torch.float32, attention_dropout=0.5)
    wrap_blocks(model, offload=False)
    torch.manual_seed(0)
    expected, _ = step(model)
    set_keeps_attention(model, True)
    torch.manual_seed(0)
    assert all(map(torch.equal, step(model)[0], expected))


@pytest.mark.quick
def test_a_second_backward_pass_computes_attention_again(keeping_all):
    model = make(torch.float32)
    wrap_blocks(model, offload=False)
    set_keeps_attention(model, True)
    ids = torch.arange(40)[None]
    with attending(model, SDPA), Kernels() as kernels:
        loss = (
            model(ids, use_cache=False, **describe_documents([25, 15])).logits.logsumexp(-1).sum()
        )
        gradients = [
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=not is_last)
            for is_last in (False, True)
        ]
    assert all(map(torch.equal, *gradients))
    # two documents of different lengths in each block
    assert kernels.counts[KERNEL] == 2 * 2 * BLOCKS


@pytest.mark.quick
def test_outputs_on_the_host_come_one_block_ahead_into_reused_memory(keeping_all, monkeypatch):
    model = make(torch.float32)
    wrap_blocks(model, offload=True)
    expected, _ = step(model)
    set_keeps_attention(model, True)
    alive: list[weakref.ref[Any]] = []
    init = _Kept.__init__

    def noting(kept: _Kept, *args: Any, **options: Any) -> None:
        init(kept, *args, **options)
        alive.append(weakref.ref(kept))

    monkeypatch.setattr(_Kept, "__init__", noting)
    most: list[int] = []

    def note(*_: Any) -> None:
        kept = [each for each in (reference() for reference in alive) if each is not None]
        # the first output of each block
        here = [each for each in kept if each.place == 1 and each.on_device is not None]
        most.append(len(here))

    for block in recomputed_blocks(model):
        block._checkpoint_wrapped_module.register_forward_pre_hook(note)
    store = recomputed_blocks(model)[0].store
    assert isinstance(store, InputStore)
    places: list[set[int]] = []
    for _ in range(3):
        assert all(map(torch.equal, step(model)[0], expected))
        # an input, and an output with logarithms of the first run of documents in each block
        assert {place: len(free) for place, free in store.free.items()} == dict.fromkeys(
            range(3), BLOCKS
        )
        free = [memory.fill_(255) for place in range(3) for memory in store.free[place]]
        places.append({memory.data_ptr() for memory in free})
    assert places[1] == places[2] and max(most) == 2


@pytest.mark.quick
def test_host_memory_of_blocks_that_differ_does_not_grow():
    store = InputStore()
    store.side = SideStream(torch.device("cpu"))
    sizes = [64, 64, 256]
    for _ in range(3):
        used = [store.host_memory(size, 1) for size in sizes]
        assert not store.free[1]
        # A backward pass frees the last block's first.
        store.free[1] = used[::-1]
    assert sum(map(torch.numel, store.free[1])) == sum(sizes)
