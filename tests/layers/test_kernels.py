"""Triton's kernels give what torch's operators give.

Their tests run where numpy computes them (`interpreted`).
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from fsdp_qlora.model.architecture.gated_mlp import GatedMlp
from fsdp_qlora.model.architecture.output_again import output_again, output_source
from fsdp_qlora.model.architecture.rms_norm import FORMS, RmsNorm
from fsdp_qlora.model.kernels import gate, norm
from fsdp_qlora.model.kernels.in_use import Ways, using_ways

pytestmark = pytest.mark.quick

# --- the gate ---

Tensors = tuple[torch.Tensor, ...]


def gate_inputs(layout: str, dtype: torch.dtype) -> Tensors:
    """A gradient of the product, gate and up."""
    random = torch.Generator().manual_seed(0)
    shapes = {"rows": (7, 300), "long rows": (2, 3, 1030), "no rows": (0, 5), "columns": (30, 8)}
    if layout == "halves":
        both = torch.randn(3, 4, 600, generator=random).mul(3).to(dtype)
        return torch.randn(3, 4, 300, generator=random).to(dtype), *both.chunk(2, dim=-1)
    shape = shapes[layout]
    tensors = tuple(torch.randn(shape, generator=random).mul(3).to(dtype) for _ in range(3))
    return tuple(each.t() for each in tensors) if layout == "columns" else tensors


def by_autograd(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Tensors:
    gate, up = (each.detach().requires_grad_() for each in (gate, up))
    product = F.silu(gate) * up
    return product.detach(), *torch.autograd.grad(product, (gate, up), grad)


def gate_differences(layout: str, dtype: torch.dtype) -> tuple[list[str], int, int]:
    """The ways that were taken, and how many of how many numbers differ from autograd's."""
    grad, gate_, up = gate_inputs(layout, dtype)
    expected = by_autograd(grad, gate_, up)
    taken = []
    different = 0
    for way in ("plain", "triton"):
        with using_ways(Ways(gate=way)):
            taken.append(gate._way(grad, gate_, up))
            product = gate.silu_product(gate_, up)
            results = [each.clone() for each in (grad, gate_, up)]
            gate.silu_gradients_(*results)
            others = [each.clone() for each in (grad, gate_, up)]
            gate.silu_gradients_(*others, keeps_grad=True)
        assert torch.equal(others[0], grad)
        wanted = (expected[0], *expected, *expected[1:])
        pairs = zip((product, *results, *others[1:]), wanted, strict=True)
        different += sum(int((one != other).sum()) for one, other in pairs)
    return taken, different, grad.numel()


@pytest.mark.parametrize("layout", ["rows", "long rows", "halves", "no rows"])
def test_the_gate_has_the_bits_of_autograd(layout, interpreted) -> None:
    taken, different, _ = interpreted(gate_differences, layout, torch.bfloat16)
    assert taken == ["plain", "triton"] and different == 0
    # numpy's exp differs from torch's by a bit, which is seen in few numbers of 11 bits.
    taken, different, numbers = interpreted(gate_differences, layout, torch.float16)
    assert taken == ["plain", "triton"] and different <= 0.01 * numbers


def test_a_gate_whose_rows_lie_apart_is_computed_by_torch(interpreted) -> None:
    assert interpreted(gate_differences, "columns", torch.bfloat16)[:2] == (["plain"] * 2, 0)


def test_a_silu_is_known_under_every_name() -> None:
    for name in ("silu", "swish"):
        assert gate.is_silu(ACT2FN[name])
    assert gate.is_silu(nn.SiLU()) and gate.is_silu(F.silu)


class ClampedSilu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.clamp(max=7))


def mlp_results(activation: Callable[[torch.Tensor], torch.Tensor], way: str) -> Tensors:
    torch.manual_seed(0)
    layers = {"gate": nn.Linear(8, 24), "up": nn.Linear(8, 24), "down": nn.Linear(24, 8)}
    mlp = GatedMlp(dict(layers), ("gate", "up", "down"), activation).bfloat16()
    x = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    with using_ways(Ways(gate=way)):
        y = mlp(x)
        grads = torch.autograd.grad(y.float().square().sum(), [x, *mlp.parameters()])
    return y.detach(), *grads


def mlps_agree(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    ways = [mlp_results(activation, way) for way in ("plain", "triton")]
    return all(torch.equal(*pair) for pair in zip(*ways, strict=True))


@pytest.mark.parametrize("activation", [nn.SiLU(), ClampedSilu(), nn.GELU()])
def test_a_gated_mlp_has_the_same_bits_by_its_kernel(activation, interpreted) -> None:
    assert gate.is_silu(activation) == isinstance(activation, nn.SiLU)
    assert interpreted(mlps_agree, activation)


# --- the norm ---

NORMS = [
    *((form, "rows", torch.bfloat16) for form in FORMS),
    (norm.ROUNDED_FIRST, "heads", torch.float16),
    (norm.ROUNDED_LAST, "slices", torch.bfloat16),
    (norm.ONE_PLUS, "no rows", torch.bfloat16),
    (norm.ROUNDED_LAST, "rows", torch.float32),
]


def norm_inputs(layout: str, dtype: torch.dtype) -> Tensors:
    """A gradient of the norm, x and the weight."""
    random = torch.Generator().manual_seed(0)
    shapes = {"rows": (3, 7, 96), "heads": (2, 11, 3, 16), "slices": (5, 2, 96), "no rows": (0, 5)}
    shape = shapes[layout]
    sizes = torch.logspace(-3, 2, shape[0])[(..., *(None for _ in shape[1:]))]
    x = torch.randn(shape, generator=random) * sizes
    grad = torch.randn(shape, generator=random).to(dtype)
    if layout == "slices":
        x = torch.cat([x, x], dim=-1)
    weight = torch.rand(shape[-1], generator=random) + 0.5
    return grad, x.to(dtype)[..., : shape[-1]], weight.to(dtype)


def exact_norm(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str) -> Tensors:
    """The norm and the gradient of x in float64."""
    x, weight = x.double().requires_grad_(), weight.double() + (form == norm.ONE_PLUS)
    y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    return y.detach(), torch.autograd.grad(y, x, grad.double())[0]


def by_norm(
    form: str, layout: str, dtype: torch.dtype, way: str, inputs_only: bool
) -> tuple[str, Tensors]:
    """The name of the function that made it, the norm, its gradient, and the norm made again."""
    grad, x, weight = norm_inputs(layout, dtype)
    module = RmsNorm(nn.Parameter(weight, requires_grad=False), form, 1e-5)
    module.inputs_only = inputs_only
    with using_ways(Ways(norm=way)):
        y = module(x.requires_grad_())
        again = y
        if inputs_only:
            again = output_again(output_source(y))
            assert output_again(y.grad_fn) is again or way == "plain"
        (grad_x,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(y, module(x.detach()))
    return type(y.grad_fn).__name__, (y.detach(), grad_x, again.detach())


def norm_errors(
    form: str, layout: str, dtype: torch.dtype
) -> tuple[list[str], list[list[float]], float]:
    """What made the norms of both ways, their distances from float64, and between both."""
    exact = exact_norm(*norm_inputs(layout, dtype), form)
    makers, errors, results = [], [], []
    for way in ("plain", "triton"):
        maker, (*pair, again) = by_norm(form, layout, dtype, way, inputs_only=True)
        assert torch.equal(again, pair[0]) and again.dtype == dtype
        assert all(map(torch.equal, pair, by_norm(form, layout, dtype, way, inputs_only=False)[1]))
        makers.append(maker)
        errors.append([float((one - other).norm()) for one, other in zip(pair, exact, strict=True)])
        results.append(pair)
    different = [(one != other).sum() for one, other in zip(*results, strict=True)]
    return makers, errors, float(sum(different)) / max(1, 2 * exact[0].numel())


@pytest.mark.parametrize("form, layout, dtype", NORMS)
def test_norms_are_as_near_to_float64_as_torchs(form, layout, dtype, interpreted) -> None:
    makers, errors, different = interpreted(norm_errors, form, layout, dtype)
    assert makers == ["InputsOnlyFunctionBackward", "_NormedBackward"]
    for plain, triton in zip(*errors, strict=True):
        assert triton <= 1.1 * plain + 1e-9
    # They round at the same places: few numbers differ, by the order of a sum.
    assert dtype == torch.float32 or different < 0.002


def norm_of_others(way: str) -> list[str]:
    """What makes norms that no kernel computes."""
    _, x, weight = norm_inputs("rows", torch.bfloat16)
    trained = RmsNorm(nn.Parameter(weight), norm.ROUNDED_FIRST, 1e-5)
    wide_weight = nn.Parameter(weight.float(), requires_grad=False)
    wide = RmsNorm(wide_weight, norm.ROUNDED_FIRST, 1e-5)
    one_plus = RmsNorm(wide_weight, norm.ONE_PLUS, 1e-5)
    frozen = RmsNorm(nn.Parameter(weight, requires_grad=False), norm.ROUNDED_FIRST, 1e-5)
    cases = [
        (trained, x),
        (wide, x),
        (frozen, x.transpose(0, 1)),
        (one_plus, x),
    ]
    made = []
    for module, x in cases:
        with using_ways(Ways(norm=way)):
            y = module(x.detach().requires_grad_())
        with using_ways(Ways()):
            assert torch.equal(y, module(x)) or module is one_plus
        made.append(type(y.grad_fn).__name__)
    return made


def test_trained_norms_and_other_weights_and_strides_keep_torchs(interpreted) -> None:
    *others, one_plus = interpreted(norm_of_others, "triton")
    assert "_NormedBackward" not in others
    # Its weight counts in float32 anyway.
    assert one_plus == "_NormedBackward"
