"""Linear layers with adapters that share an input, as one function: nearer to float64 than each
alone or as near, and no more products.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.adapters.dora import DoraLinear
from fsdp_qlora.model.adapters.grouped import LinearGroup
from fsdp_qlora.model.adapters.insert import as_at_start
from fsdp_qlora.model.adapters.lean import can_be_lean
from fsdp_qlora.model.adapters.lora import LoraAdapter, LoraLinear
from fsdp_qlora.model.kernels.in_use import LEAN, Ways, using_ways
from fsdp_qlora.model.quantizers import bnb_4bit
from fsdp_qlora.model.quantizers.base import QuantizedLinear
from tests.layers.shards import relative_error
from tests.layers.test_lora_product import IN, KINDS, adapted, tokens

pytestmark = pytest.mark.quick

LEAN_WAYS = Ways(linears=LEAN)
# out_features, rank and scaling of each layer
SIZES = ((96, 4, 1.5), (32, 4, 0.5), (32, 7, 2.0))


class Attention(nn.Module):
    """Three layers of one input, of which `uses` are called."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.uses = range(3)
        for size, rank, scaling in SIZES:
            layer = adapted(kind, dtype=dtype, size=size, **options)
            layer.lora = LoraAdapter(
                IN, size, rank=rank, scaling=scaling, **{"dropout": 0.0} | options
            )
            layer.lora.to_empty(device="cpu")
            for parameter in layer.lora.parameters():
                nn.init.normal_(parameter, std=0.1)
            self.layers.append(layer)
        if not KINDS[kind][0]:
            self.layers.to(dtype)
        self.group = LinearGroup([*self.layers])
        self.register_forward_hook(self.group.forget, always_call=True)
        for layer in self.layers:
            layer.group = self.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layers[index](x) for index in self.uses], dim=-1)


def results(module: Attention, x: torch.Tensor, *, recomputes: bool = False) -> list[torch.Tensor]:
    """The output, and the gradients of x and all adapters."""
    y = checkpoint(module, x, use_reentrant=False) if recomputes else module(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    weights = [each for each in module.parameters() if each.requires_grad]
    grads = torch.autograd.grad(y, [x, *weights], grad, allow_unused=True)
    return [y.detach(), *(torch.zeros(1) if grad is None else grad for grad in grads)]


def in_float64(module: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    exact = copy.deepcopy(module)
    for layer in exact.layers:
        base = layer.base_layer
        linear = nn.Linear(IN, base.out_features).requires_grad_(False)
        quantized = isinstance(base, QuantizedLinear)
        with torch.no_grad():
            linear.weight.copy_(base.dequantize() if quantized else base.weight)
            linear.bias.copy_(base.bias)
        layer.base_layer = linear
    return results(exact.double(), x.detach().double().requires_grad_())


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [relative_error(a.double(), b) for a, b in zip(found, exact, strict=True)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    products: list[str] = []
    for name in ("multiply", "multiply_grad", "add_product", "add_grad"):
        original = getattr(QuantizedLinear, name)

        def count(*args: Any, name: str = name, original: Any = original) -> Any:
            products.append(name)
            return original(*args)

        monkeypatch.setattr(QuantizedLinear, name, count, raising=False)
    return products


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "hqq", "16 or 32 bits"])
@pytest.mark.parametrize("groups", ["of three factors", "of one factor", "of one layer"])
def test_grouped_layers_are_as_near_to_float64_as_each_alone(groups, kind, recomputes, monkeypatch):
    # as with many tokens
    monkeypatch.setattr(bnb_4bit, "_FUSED_TOKENS", 0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module = Attention(kind, dtype)
        for layer in module.layers:
            if groups == "of one factor":
                layer.lora.scaling = 1.3
            elif groups == "of one layer":
                layer.group = LinearGroup([layer])
        x = tokens().detach().to(dtype).requires_grad_()
        exact = in_float64(module, x)
        alone = errors(results(module, x), exact)
        with using_ways(LEAN_WAYS):
            found = results(module, x, recomputes=recomputes)
        together = errors(found, exact)
        assert max(together) < (1e-6 if dtype == torch.float32 else 1e-2)
        if dtype != torch.float32:
            # One gradient of A has 512 numbers, so that its ratio is off by some percent.
            ratios = [a / b for a, b in zip(together, alone, strict=True)]
            assert max(ratios) < 1.2 and sum(ratios) < 1.05 * len(ratios)
        # Another order of sums, so that the test is of something else than today's path.
        assert any(map(torch.ne, torch.tensor(together), torch.tensor(alone)))


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_group_multiplies_no_more_often_and_keeps_its_input_once(recomputes, monkeypatch):
    products = counted(monkeypatch)
    module = Attention("nf4")
    kept: list[torch.Tensor] = []
    with using_ways(LEAN_WAYS):
        results(module, tokens(), recomputes=recomputes)
        # Recomputing ends before the products, which are the last that is kept.
        assert products == ["add_product"] * 3 + ["multiply_grad", "add_grad", "add_grad"]
        hooks = (lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            module.layers[0](tokens())
    assert [tensor.shape for tensor in kept] == [(2, 9, IN), (18, 15)]


@pytest.mark.parametrize("uses", [(0,), (2, 0), (1, 1, 2)])
def test_what_no_layer_takes_is_dropped_and_has_no_gradient(uses):
    module = Attention("nf4")
    module.uses = uses
    x = tokens()
    expected = results(module, x)
    with using_ways(LEAN_WAYS):
        found = results(module, x)
        assert module.group._x is None and not module.group._waiting
        # Of a layer that was not called there is none, as when each is alone.
        y = module(x).sum()
        y.backward()
    assert max(errors(found, expected)) < 1e-6
    has_grad = [layer.lora.lora_A.weight.grad is not None for layer in module.layers]
    assert has_grad == [index in uses for index in range(3)]


def test_an_exception_leaves_nothing_behind(monkeypatch):
    module = Attention("nf4")
    monkeypatch.setattr(module.layers[1], "forward", None)
    with using_ways(LEAN_WAYS), pytest.raises(TypeError):
        module(tokens())
    assert module.group._x is None and not module.group._waiting


def test_layers_are_computed_alone_where_one_of_them_has_to_be():
    module = Attention("nf4")
    x = tokens()
    expected = results(module, x)
    with using_ways(LEAN_WAYS):
        together = results(module, x)
        assert not all(map(torch.equal, together, expected))
        with torch.no_grad():
            # the bits of a step, but for a token that is generated
            assert torch.equal(module(x), together[0])
            assert module.group.output(module.layers[0], x[:, :1]) is None
        # one with dropout, while it trains
        module.layers[2].lora.dropout = 0.5
        assert module.group.output(module.layers[0], x) is None
        module.eval()
        assert module.group.output(module.layers[0], x) is not None
        module.layers[2].lora.dropout = 0.0
        module.group.forget()
        # a hook that waits for an adapter's call, as FSDP2's do
        called: list[nn.Module] = []
        hook = module.layers[1].lora.register_forward_hook(lambda layer, *_: called.append(layer))
        assert all(map(torch.equal, results(module, x), expected))
        assert called == [module.layers[1].lora]
        hook.remove()
        # the reference: the layers as they were at the start
        with as_at_start([*module.layers]):
            base = torch.cat([layer.base_layer(x) for layer in module.layers], dim=-1)
            assert torch.equal(module(x), base)


def test_another_adapter_in_the_same_memory_has_its_own_scaling():
    module = Attention("nf4")
    x = tokens()
    with using_ways(LEAN_WAYS):
        results(module, x)
    for layer in module.layers:
        layer.lora.scaling = 3.0
        with torch.no_grad():
            layer.lora.lora_A.weight.mul_(2)
    expected = results(module, x)
    with using_ways(LEAN_WAYS):
        found = results(module, x)
    assert max(errors(found, expected)) < 1e-6


def test_int8_and_dora_are_never_computed_together():
    assert not can_be_lean(adapted("int8")) and can_be_lean(adapted("nf4"))
    base = nn.Linear(IN, 8).requires_grad_(False)
    options = {"rank": 4, "scaling": 1.0, "dropout": 0.0}
    assert can_be_lean(LoraLinear(base, **options))
    assert not can_be_lean(DoraLinear(base, **options)) and not can_be_lean(base)


class _Ends(torch.autograd.Function):
    """Uses a tensor and has no gradient for it, as some kernels of other libraries."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


def test_outputs_without_any_gradient_leave_x_its_own():
    module = Attention("nf4")
    x = tokens().detach().requires_grad_()
    with using_ways(LEAN_WAYS):
        (_Ends.apply(module(x)).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(weight.grad is None for weight in module.parameters())


@torch.no_grad()
def test_an_input_that_is_changed_in_place_is_another():
    module = Attention("nf4")
    first, second, _ = module.layers
    x = tokens().detach()
    with using_ways(LEAN_WAYS):
        first(x)
        doubled = second(x.mul_(2))
        module.group.forget()
        assert torch.equal(doubled, second(x.clone()))
