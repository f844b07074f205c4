"""Triton's kernels, compiled for cards that are not there."""

import pytest

from fsdp_qlora.model.kernels import gate, nf4, token_loss
from tests.helpers.triton_kernels import CAPABILITIES, Kernel, compile_kernel

pytest.importorskip("triton", reason="Triton is for Linux alone")

MOST_REGISTERS = 64  # of a thread, so that a multiprocessor holds 1,024 threads
B = "*bf16"
F = "*fp32"

_GATE = {"width": "i32", "blocks": "i32"}

# Kernels as a launch for an 8B model calls them, and how many loads and stores of fewer than 128
# bits each has: those of single numbers, and of statistics.
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
    "nf4": (
        Kernel(
            nf4.decode_kernel,
            {"codes": "*u8", "absmax": "*u8", "weights": B, "num_blocks": "i32", "skipped": "i32"}
            | dict.fromkeys(["nested", "offset", "values", "nested_values"], F),
            {"NESTED": True, "BLOCKS": nf4.BLOCKS, "BYTES": nf4.BLOCKSIZE // 2},
            nf4.OPTIONS,
        ),
        14,
    ),
    "loss": (
        Kernel(
            token_loss.loss_kernel,
            {"outputs": B, "targets": "*i64", "losses": F, "factors": F, "vocabulary": "i32"}
            | {"scale": "fp32", "temperature": "fp32"},
            {"GRADIENT": True, "BLOCK": token_loss.BLOCK},
            token_loss.OPTIONS,
        ),
        4,
    ),
}
# Kernels that round a product before they add to it.
ROUND_TWICE = {"nf4"}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_every_card(name) -> None:
    kernel, narrow = KERNELS[name]
    for capability in CAPABILITIES:
        compiled = compile_kernel(kernel, capability)
        assert compiled.registers <= MOST_REGISTERS and not compiled.spilled
        assert compiled.wide and compiled.narrow == narrow
        assert not (name in ROUND_TWICE and compiled.fused)
