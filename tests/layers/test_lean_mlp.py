"""Gated MLPs with LoRA as one function: near float64, as few products, and no more memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.common import peak_bytes
from fsdp_qlora.model.adapters.dora import DoraLinear
from fsdp_qlora.model.adapters.insert import adapted_layers, as_at_start
from fsdp_qlora.model.adapters.lean_mlp import lean_mlp
from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.architecture import chunking
from fsdp_qlora.model.architecture.fused import set_save_inputs_only
from fsdp_qlora.model.architecture.gated_mlp import GatedMlp
from fsdp_qlora.model.architecture.rms_norm import FORMS, RmsNorm
from fsdp_qlora.model.kernels.in_use import Ways, using_ways
from fsdp_qlora.model.quantizers.base import QuantizedLinear
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.layers.shards import relative_error, weight_of
from tests.layers.test_chunking import Counts
from tests.layers.test_lora_product import KINDS, ONE_RANK, assert_near

HIDDEN = 64
INNER = 192
TOKENS = 180
ROLES = ("gate", "up", "down")
LEAN = Ways(linears="lean")
# way -> (the block recomputes, tokens of chunking's pieces): of 26, for which matrices are decoded
# once, and of 60
WAYS = {
    "kept": (False, 8192),
    "computed again": (True, 8192),
    "in pieces": (True, 90),
    "in pieces with little room": (True, 72),
}
ACTIVATIONS = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


def layer_of(
    kind: str, sizes: tuple[int, int], dtype: torch.dtype, bias: bool, **options: Any
) -> LoraLinear:
    """An adapted layer of size (in, out) whose B is not zero."""
    linear: nn.Module = nn.Linear(*sizes, bias=bias).to(dtype).requires_grad_(False)
    quantizer, of_quantizer = KINDS[kind]
    if quantizer:
        quantized = QUANTIZERS[quantizer].linear(linear, compute_dtype=dtype, **of_quantizer)
        for name in ("weight", *quantized.statistics):
            empty = torch.empty_like(getattr(quantized, name), device="cpu")
            setattr(quantized, name, nn.Parameter(empty, requires_grad=False))
        quantized.load_shard(weight_of(sizes[::-1]).flatten(), ONE_RANK)
        linear = quantized
    layer = LoraLinear(linear, dropout=0.0, **options)
    layer.lora.to_empty(device="cpu").to(dtype)
    for parameter in layer.lora.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer


class Block(nn.Module):
    """Norms and an MLP whose layers differ in rank and scaling, beside which the input passes."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        kind: str = "nf4",
        activation: str = "silu",
        bias: bool = False,
        norm_after: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("norm", "after") if norm_after else ("norm",)
        for name in names:
            weight = nn.Parameter((torch.rand(HIDDEN) + 0.5).to(dtype), requires_grad=False)
            self.add_module(name, RmsNorm(weight, next(iter(FORMS)), 1e-6))
        sizes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
        layers: dict[str, nn.Module] = {}
        for index, role in enumerate(ROLES):
            options = {"rank": 4 + 2 * index, "scaling": 2.0 - index / 2}
            layers[role] = layer_of(kind, sizes[index], dtype, bias, **options)
        self.mlp = GatedMlp(layers, ROLES, ACTIVATIONS[activation])
        self.mlp.inner = INNER
        self.mlp.with_adapters = lean_mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.norm(x))
        return x + (self.after(y) if "after" in self._modules else y)


def trained(block: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in block.parameters() if parameter.requires_grad]


def grad_of(y: torch.Tensor) -> torch.Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)


def step(block: nn.Module, x: torch.Tensor, recomputes: bool) -> list[torch.Tensor]:
    """The output, and the gradients of the input and the adapters."""
    set_save_inputs_only(block, not recomputes)
    x = x.detach().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *trained(block)], grad_of(y))]


def exact(block: Block, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, of the same weights."""
    x = x.double().requires_grad_()
    weights = [weight.detach().double().requires_grad_() for weight in trained(block)]

    def linear(x: torch.Tensor, index: int) -> torch.Tensor:
        layer: Any = block.mlp._modules[ROLES[index]]
        base = layer.base_layer
        weight = base.dequantize() if isinstance(base, QuantizedLinear) else base.weight
        lora_A, lora_B = weights[2 * index : 2 * index + 2]
        y = F.linear(x, weight.double(), None if base.bias is None else base.bias.double())
        return y + layer.lora.scaling * F.linear(F.linear(x, lora_A), lora_B)

    normed = F.rms_norm(x, (HIDDEN,), block.norm.weight.double(), 1e-6)
    y = x + linear(block.mlp.activation(linear(normed, 0)) * linear(normed, 1), 2)
    # rounded as the one that the block gets
    grad = grad_of(y).to(block.norm.weight.dtype).double()
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], grad)]


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.fixture
def set_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bool]:
    """Sets the tokens of pieces for one of WAYS; returns whether the block recomputes."""

    def choose(way: str) -> bool:
        recomputes, piece = WAYS[way]
        monkeypatch.setattr(chunking, "PIECE_TOKENS", piece)
        return recomputes

    return choose


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu", True)])
@pytest.mark.parametrize("kind", ["nf4", "16 or 32 bits"])
def test_one_function_is_as_near_to_float64_as_layers(kind, bias, activation, way, set_way):
    recomputes = set_way(way)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        block = Block(dtype, kind=kind, activation=activation, bias=bias)
        x = tokens(dtype)
        expected = exact(block, x)
        plain = step(block, x, recomputes)
        with using_ways(LEAN):
            found = step(block, x, recomputes)
        assert [each.dtype for each in found] == [each.dtype for each in plain]
        errors = [
            [relative_error(own.float(), each) for own, each in zip(results, expected, strict=True)]
            for results in (found, plain)
        ]
        if dtype == torch.float32:
            assert max(errors[0]) < 1e-6
            continue
        # Each is the rounding of its own products, so that one may be a little larger by chance.
        ratios = [own / before for own, before in zip(*errors, strict=True)]
        assert max(ratios) < 1.2 and sum(ratios) / len(ratios) < 1.02


@pytest.mark.quick
def test_one_function_supports_inputs_without_gradient(set_way):
    for way in WAYS:
        recomputes = set_way(way)
        block = Block()
        set_save_inputs_only(block, not recomputes)
        found = []
        for ways in (Ways(), LEAN):
            with using_ways(ways):
                y = (
                    checkpoint(block, tokens(), use_reentrant=False)
                    if recomputes
                    else block(tokens())
                )
                found.append([y.detach(), *torch.autograd.grad(y, trained(block), grad_of(y))])
        assert_near(*found)


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm_after", [False, True])
def test_there_are_as_many_products_and_no_more_decodings(norm_after, way, set_way):
    recomputes = set_way(way)
    plain_block = Block(kind="16 or 32 bits", norm_after=norm_after)
    block = Block(norm_after=norm_after)
    counts = {}
    for ways in (Ways(), LEAN):
        with using_ways(ways), Counts() as products:
            step(plain_block, tokens(), recomputes)
        with using_ways(ways), Counts() as decodings:
            step(block, tokens(), recomputes)
        counts[ways] = (products.products, decodings.decoded)
    # u of down, 8 columns of 192, is computed again where it was kept.
    keeps_low = not recomputes or norm_after
    assert counts[LEAN][0] <= counts[Ways()][0] * (1.02 if keeps_low else 1.0)
    assert counts[LEAN][1] <= counts[Ways()][1]
    if not norm_after:
        decoded = {"kept": 6, "computed again": 8, "in pieces": 6}
        # gate, up and down, gate and up again, three gradients: for each of three pieces
        assert counts[LEAN][1] == decoded.get(way, 3 * 8)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_no_more_memory_is_needed(way, dtype, set_way):
    recomputes = set_way(way)
    block = Block(dtype)
    peaks = []
    for ways in (Ways(), LEAN):
        with using_ways(ways):
            step(block, tokens(dtype), recomputes)
            peaks.append(peak_bytes(lambda: step(block, tokens(dtype), recomputes)))
    # by a rounding of sizes
    assert peaks[1] <= peaks[0] + 512


@pytest.mark.quick
def test_autocast_computes_in_16_bits_and_gives_gradients_in_32(set_way):
    block = Block(kind="16 or 32 bits")
    found = []
    for way in WAYS:
        recomputes = set_way(way)
        for ways in (Ways(), LEAN):
            with using_ways(ways), torch.autocast("cpu", dtype=torch.bfloat16):
                found.append(step(block, tokens(), recomputes))
    for each in found[1:]:
        assert_near(each, found[0], 1e-2)


@pytest.mark.quick
def test_layers_are_called_one_by_one_where_they_are_not_alike():
    block = Block()
    layers = adapted_layers(block)
    down = block.mlp.down
    x = tokens()
    with using_ways(LEAN):
        together = lean_mlp(block.mlp, x)
        assert together is not None
        with torch.no_grad():
            # the bits of a step, but for a token that is generated
            assert torch.equal(lean_mlp(block.mlp, x), together)
            assert lean_mlp(block.mlp, x[:, :1]) is None
        with as_at_start(layers):
            assert lean_mlp(block.mlp, x) is None
        down.lora.dropout = 0.5
        assert lean_mlp(block.mlp, x) is None and lean_mlp(block.eval().mlp, x) is not None
        # an adapter on gate and up alone
        block.mlp.down = down.base_layer
        assert lean_mlp(block.mlp, x) is None
        expected = step(block, x, recomputes=False)
    assert_near(step(block, x, recomputes=False), expected)
    block.mlp.down = DoraLinear(down.base_layer, rank=2, scaling=1.0, dropout=0.0)
    with using_ways(LEAN):
        assert lean_mlp(block.mlp, x) is None
    assert lean_mlp(Block().mlp, x) is None


@pytest.mark.slow
def test_two_ranks_and_accumulated_gradients_train_as_before(models, tmp_path):
    options: dict[str, Any] = {
        "model_name": models(),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(16)),
        "lora_target_modules": "gate_proj,up_proj,down_proj",
        "gradient_accumulation_steps": 2,
        "recompute": 1,
        "precision": "fp32",
        "lr": 1e-3,
        "num_epochs": 2,
    }
    found = []
    for kernels in ("plain", "auto"):
        train_ok(2, tmp_path / kernels, kernels=kernels, **options)
        weights = load_file(tmp_path / kernels / "adapter_model.safetensors")
        found.append((read_metrics(tmp_path / kernels), weights))
    (plain_losses, plain), (losses, lean) = found
    assert losses == pytest.approx(plain_losses, rel=1e-5) and len(losses) == 8
    assert plain.keys() == lean.keys()
    assert any(not torch.equal(lean[name], weight) for name, weight in plain.items())
    for name, weight in plain.items():
        # AdamW divides by a gradient's size: small ones' rounding shows.
        assert relative_error(lean[name], weight.double()) < 1e-3
