"""Triton's kernels, compiled for cards that are not there."""

import pytest

from fsdp_qlora.model.kernels import gate
from tests.helpers.triton_kernels import CAPABILITIES, Kernel, compile_kernel

pytest.importorskip("triton", reason="Triton is for Linux alone")

MOST_REGISTERS = 64  # of a thread, so that a multiprocessor holds 1,024 threads
B = "*bf16"

_GATE = {"width": "i32", "blocks": "i32"}

# Kernels as a launch for an 8B model calls them, and how many loads and stores of fewer than 128
# bits each has: those of single numbers.
KERNELS = {
    "gate": (
        Kernel(
            gate.product_kernel,
            {"gate": B, "up": B, "product": B, **_GATE}
            | dict.fromkeys(["gate_row", "up_row", "product_row"], "i32"),
            {"BLOCK": gate.BLOCK},
            gate.OPTIONS,
        ),
        0,
    ),
    "gate's gradients": (
        Kernel(
            gate.gradients_kernel,
            {"grad": B, "gate": B, "up": B, **_GATE}
            | dict.fromkeys(["grad_row", "gate_row", "up_row"], "i32"),
            {"BLOCK": gate.BLOCK, "KEEPS_GRAD": False},
            gate.OPTIONS,
        ),
        0,
    ),
}
# Kernels that round a product before they add to it.
ROUND_TWICE = set[str]()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_every_card(name) -> None:
    kernel, narrow = KERNELS[name]
    for capability in CAPABILITIES:
        compiled = compile_kernel(kernel, capability)
        assert compiled.registers <= MOST_REGISTERS and not compiled.spilled
        assert compiled.wide and compiled.narrow == narrow
        assert not (name in ROUND_TWICE and compiled.fused)
