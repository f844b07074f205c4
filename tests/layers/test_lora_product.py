"""A frozen layer with LoRA in one autograd function: the same values as its parts, and less kept
and computed.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.adapters.lora import Dropout, LoraLinear
from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.layers.shards import relative_error, weight_of

pytestmark = pytest.mark.quick

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
    "hqq": ("hqq", {"n_bits": 4, "group_size": 64}),
    "int8": ("int8", {"int8_threshold": 0.0}),
    "16 or 32 bits": ("", {}),
}
ONE_RANK: Any = {"shard": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}
IN = 128
OUT = 96
RANK = 4
SCALING = 1.5


def adapted(
    kind: str, *, dtype: torch.dtype = torch.float32, dropout: float = 0.0, size: int = OUT
) -> LoraLinear:
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


def in_parts(
    layer: LoraLinear, x: torch.Tensor, dropped: torch.Tensor | None = None
) -> torch.Tensor:
    """What the layer computes, with one operation of torch after the other."""
    update = layer.lora.lora_B(layer.lora.lora_A(x if dropped is None else dropped))
    return torch.add(layer.base_layer(x), update, alpha=SCALING)


def results(output: torch.Tensor, x: torch.Tensor, layer: LoraLinear) -> list[torch.Tensor]:
    """The output, and the gradients of x, A and B."""
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    of = [x, layer.lora.lora_A.weight, layer.lora.lora_B.weight]
    return [output.detach(), *torch.autograd.grad(output, of, grad.to(output.dtype))]


def assert_near(
    found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-6
) -> None:
    for own, reference in zip(found, expected, strict=True):
        assert own.shape == reference.shape and own.dtype == reference.dtype
        assert relative_error(own.float(), reference.double()) < tolerance


def tokens() -> torch.Tensor:
    return torch.randn(2, 9, IN, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_product_matches_separate_base_and_adapter(kind, checkpointed):
    layer = adapted(kind)
    x = tokens()
    output = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    assert_near(results(output, x, layer), results(in_parts(layer, x), x, layer))


@pytest.mark.parametrize("kind", ["nf4", "hqq"])
def test_decoding_a_matrix_in_parts_gives_the_same_products(kind):
    layer = adapted(kind, size=300)
    weight = layer.base_layer
    x = tokens()
    expected = results(layer(x), x, layer)
    weight.part_bytes = 128 * IN * 4
    assert [rows.start for rows, _ in weight._parts(weight.whole)] == [0, 128, 256]
    assert_near(results(layer(x), x, layer), expected)
    weight.part_bytes = 150 * IN * 4  # not much less than the whole
    assert len(weight._parts(weight.whole)) == 1
    weight.compute_dtype = torch.bfloat16  # sums over parts would be rounded
    assert len(weight._parts(weight.whole)) == 1


@pytest.mark.parametrize("kind", ["nf4", "16 or 32 bits"])
def test_autocast_computes_in_16_bits_and_gives_gradients_in_32(kind):
    layer = adapted(kind, dtype=torch.bfloat16)
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(layer(x), x, layer)
        expected = results(in_parts(layer, x), x, layer)
    assert [each.dtype for each in found] == [torch.bfloat16, *[torch.float32] * 3]
    assert_near(found, expected, 1e-2)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_mask_is_equal_in_forward_recompute_and_backward(checkpointed):
    layer = adapted("nf4", dropout=0.25)
    x = tokens()
    torch.manual_seed(5)
    dropped = Dropout.draw(0.25)(x)
    zeros = (dropped == 0).float().mean().item()
    assert 0.22 < zeros < 0.28 and torch.allclose(dropped[dropped != 0], x[dropped != 0] / 0.75)
    torch.manual_seed(5)
    output = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
    assert_near(results(output, x, layer), results(in_parts(layer, x, dropped), x, layer))
    assert not torch.equal(layer(x), output)  # the next call drops others
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_lora_saves_only_the_input_and_the_low_rank_product(dropout):
    layer = adapted("nf4", dropout=dropout)
    x = tokens()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        layer(x)
    assert [tensor.shape for tensor in kept] == [(2, 9, IN), (18, RANK)]
    assert kept[0].data_ptr() == x.data_ptr()


def test_backward_decodes_weights_again_and_skips_the_last_product(monkeypatch):
    first = adapted("nf4", size=IN)
    second = adapted("nf4")
    products: list[str] = []
    for name in ("multiply", "multiply_grad"):
        original = getattr(type(first.base_layer), name)

        def counted(*args: Any, name: str = name, original: Any = original) -> torch.Tensor:
            products.append(name)
            result: torch.Tensor = original(*args)
            return result

        monkeypatch.setattr(type(first.base_layer), name, counted)
    checkpoint(lambda x: second(first(x)), tokens(), use_reentrant=False).sum().backward()
    assert products == ["multiply"] * 3 + ["multiply_grad"] * 2


def test_a_kept_tensor_may_not_change_before_it_is_taken():
    x = torch.ones(3)
    kept = Kept(x, None)
    assert kept.take()[0] is x
    kept = Kept(x, None)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        kept.take()


class Called(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_nothing_is_kept_and_bits_are_the_same(kind, dtype):
    layer = adapted(kind, dtype=dtype, dropout=0.5).eval()
    layer = layer if KINDS[kind][0] else layer.to(dtype)
    x = torch.randn(3, 1, IN).to(dtype)
    # an output that hooks may hold
    of_backward = {"_unsafe_view"}
    with Called() as usual:
        expected = layer(x).detach()
    with Called() as lean, torch.no_grad():
        found = layer(x)
    assert torch.equal(found, expected)
    assert of_backward <= {*usual.names} and not of_backward & {*lean.names}
