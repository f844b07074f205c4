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
from fsdp_qlora.model.kernels import gate
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
