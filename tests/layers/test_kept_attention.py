"""Blocks that recompute and keep attention's output: the same bits, and half of its kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.model.architecture import kept_attention
from fsdp_qlora.model.architecture.attention import SDPA, attending
from fsdp_qlora.sharding.recompute import set_keeps_attention, wrap_blocks
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
    for _ in range(2):
        found, fewer = step(model)
        assert all(map(torch.equal, found, recomputed)) and all(map(torch.equal, found, kept))
        assert kernels[KERNEL] == 2 * fewer[KERNEL] and fewer[KERNEL] >= BLOCKS * 3
        assert kernels[f"{KERNEL}_backward"] == fewer[f"{KERNEL}_backward"] == fewer[KERNEL]
