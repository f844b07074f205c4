"""A frozen layer with LoRA in one autograd function: the same values as its parts, and less kept and computed."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.adapters.lora import Dropout, LoraLinear
from fsdp_qlora.quantizers import base
from fsdp_qlora.quantizers.base import QuantizedLinear
from fsdp_qlora.quantizers.table import QUANTIZERS
from tests.layers.shards import relative_error, weight_of

pytestmark = pytest.mark.quick

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
    "hqq": ("hqq", {"n_bits": 4, "group_size": 64}),
    "int8": ("int8", {"int8_threshold": 0.0}),
    "16 or 32 bits": ("", {}),
}
ONE_RANK: Any = {"shard": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}
IN, OUT, RANK, SCALING = 128, 96, 4, 1.5


def adapted(kind: str, *, dtype: torch.dtype = torch.float32, dropout: float = 0.0, size: int = OUT) -> LoraLinear:
    """A layer with a bias and an adapter whose B is not zero."""
    torch.manual_seed(0)
    linear: nn.Module = nn.Linear(IN, size).requires_grad_(False)
    quantizer, options = KINDS[kind]
    if quantizer:
        quantized = QUANTIZERS[quantizer].linear(linear, compute_dtype=dtype, **options)
        for name in ("weight", *quantized.statistics):
            empty = torch.empty_like(getattr(quantized, name), device="cpu")
            setattr(quantized, name, nn.Parameter(empty, requires_grad=False))
        quantized.load_shard(weight_of((size, IN)).flatten(), ONE_RANK)
        linear = quantized
    layer = LoraLinear(linear, rank=RANK, scaling=SCALING, dropout=dropout)
    layer.lora.to_empty(device="cpu")
    for parameter in layer.lora.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer


def in_parts(layer: LoraLinear, x: torch.Tensor, dropped: torch.Tensor | None = None) -> torch.Tensor:
    """What the layer computes, with one operation of torch after the other."""
    update = layer.lora.lora_B(layer.lora.lora_A(x if dropped is None else dropped))
    return torch.add(layer.base_layer(x), update, alpha=SCALING)


def results(output: torch.Tensor, x: torch.Tensor, layer: LoraLinear) -> list[torch.Tensor]:
    """The output, and the gradients of x, A and B."""
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    of = [x, layer.lora.lora_A.weight, layer.lora.lora_B.weight]
    return [output.detach(), *torch.autograd.grad(output, of, grad.to(output.dtype))]


def tokens() -> torch.Tensor:
    return torch.randn(2, 9, IN, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_parts(kind: str, checkpointed: bool) -> None:
    layer, x = adapted(kind), tokens()
    output = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    for own, expected in zip(results(output, x, layer), results(in_parts(layer, x), x, layer), strict=True):
        assert own.shape == expected.shape and own.dtype == expected.dtype
        assert relative_error(own, expected.double()) < 1e-6


@pytest.mark.parametrize("kind", ["nf4", "hqq"])
def test_a_matrix_that_is_decoded_in_parts_has_the_same_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = adapted(kind, size=300), tokens()
    expected = results(layer(x), x, layer)
    monkeypatch.setattr(base, "_DECODED_BYTES", 128 * IN * 4)
    assert [rows.start for rows, _ in layer.base_layer._parts(layer.base_layer.format)] == [0, 128, 256]
    for own, reference in zip(results(layer(x), x, layer), expected, strict=True):
        assert relative_error(own, reference.double()) < 1e-6
    monkeypatch.setattr(base, "_DECODED_BYTES", 150 * IN * 4)  # not much less than the whole
    assert len(layer.base_layer._parts(layer.base_layer.format)) == 1
    layer.base_layer.compute_dtype = torch.bfloat16  # sums over parts would be rounded
    assert len(layer.base_layer._parts(layer.base_layer.format)) == 1


def test_a_decoded_part_is_freed_before_the_next_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_DECODED_BYTES", 128 * IN * 4)
    layer, x = adapted("nf4", size=300), tokens()
    decode, decoded = layer.base_layer.decode_tensors, []

    def watched(*args: Any) -> torch.Tensor:
        assert all(reference() is None for reference in decoded)
        part = decode(*args)
        decoded.append(weakref.ref(part))
        return part

    monkeypatch.setattr(layer.base_layer, "decode_tensors", watched)
    layer(x).sum().backward()
    assert len(decoded) == 6  # three parts each way


@pytest.mark.parametrize("kind", ["nf4", "16 or 32 bits"])
def test_autocast_computes_in_16_bits_and_gives_gradients_in_32(kind: str) -> None:
    layer, x = adapted(kind, dtype=torch.bfloat16), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = results(layer(x), x, layer), results(in_parts(layer, x), x, layer)
    assert [each.dtype for each in found] == [torch.bfloat16, *[torch.float32] * 3]
    for own, reference in zip(found, expected, strict=True):
        assert own.dtype == reference.dtype and relative_error(own, reference.double()) < 1e-2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropped_parts_are_the_same_in_forward_recomputation_and_backward(checkpointed: bool) -> None:
    layer, x = adapted("nf4", dropout=0.25), tokens()
    torch.manual_seed(5)
    dropped = Dropout.draw(0.25)(x)
    zeros = (dropped == 0).float().mean().item()
    assert 0.22 < zeros < 0.28 and torch.allclose(dropped[dropped != 0], x[dropped != 0] / 0.75)
    torch.manual_seed(5)
    output = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    expected = results(in_parts(layer, x, dropped), x, layer)
    for own, reference in zip(results(output, x, layer), expected, strict=True):
        assert relative_error(own, reference.double()) < 1e-6
    assert not torch.equal(layer(x), output)  # the next call drops others
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_only_the_input_and_the_low_rank_product_are_kept(dropout: float) -> None:
    layer, x = adapted("nf4", dropout=dropout), tokens()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert [tensor.shape for tensor in kept] == [(2, 9, IN), (18, RANK)]
    assert kept[0].data_ptr() == x.data_ptr()


def test_gradients_of_gradients_are_refused() -> None:
    layer, x = adapted("nf4"), tokens().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_weight_is_decoded_again_in_backward_and_the_last_product_is_not_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = adapted("nf4", size=IN), adapted("nf4")
    products: list[str] = []
    for name in ("multiply", "multiply_grad"):
        original = getattr(QuantizedLinear, name)

        def counted(cls: type, fmt: Any, *args: Any, name: str = name, original: Any = original) -> torch.Tensor:
            products.append(name)
            result: torch.Tensor = original.__func__(cls, fmt, *args)
            return result

        for layer in (first, second):
            monkeypatch.setattr(type(layer.base_layer), name, classmethod(counted))
    checkpoint(lambda x: second(first(x)), tokens(), use_reentrant=False).sum().backward()
    assert products == ["multiply"] * 3 + ["multiply_grad"] * 2


def test_a_weight_may_be_freed_between_forward_and_backward() -> None:
    # As FSDP2 does it: the tensor stays, its memory comes back with the same bytes.
    layer, x = adapted("16 or 32 bits"), tokens()
    expected = results(in_parts(layer, x), x, layer)
    output = layer(x)
    weight = layer.base_layer.weight.data
    bytes_before, size = weight.clone(), weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(bytes_before)
    for own, reference in zip(results(output, x, layer), expected, strict=True):
        assert relative_error(own, reference.double()) < 1e-6
