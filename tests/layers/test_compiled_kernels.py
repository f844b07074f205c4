"""Triton's kernels, compiled for cards that are not there."""

import pytest

from fsdp_qlora.model.kernels import (
    float_decoding,
    float_rounding,
    fp8_decoding,
    fp8_rounding,
    gate,
    hqq_decoding,
    nf4,
    nf4_rounding,
    norm,
    rotary,
    token_loss,
)
from tests.helpers.triton_kernels import CAPABILITIES, Kernel, compile_kernel

pytest.importorskip("triton", reason="Triton is for Linux alone")

MOST_REGISTERS = 64  # of a thread, so that a multiprocessor holds 1,024 threads


def arguments(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def norm_kernel(width: int) -> Kernel:
    return Kernel(
        norm.norm_kernel,
        arguments("x weight y", "*bf16")
        | arguments("rstd", "*fp32")
        | arguments("x_row num_rows", "i32")
        | arguments("eps", "fp32"),
        norm.launch_settings(width, norm.ROUNDED_FIRST),
    )


def norm_gradient_kernel(width: int) -> Kernel:
    return Kernel(
        norm.gradient_kernel,
        arguments("grad x weight grad_x", "*bf16")
        | arguments("rstd", "*fp32")
        | arguments("grad_row x_row num_rows", "i32"),
        norm.launch_settings(width, norm.ROUNDED_FIRST),
    )


def rotary_kernel(size: int, *, backward: bool) -> Kernel:
    return Kernel(
        rotary.rotary_kernel,
        arguments("q k cos sin new_q new_k", "*bf16")
        | arguments("q_row q_head q_token k_row k_head k_token", "i32")
        | arguments("table_row table_token tokens", "i32"),
        rotary.launch_settings(32, 8, size, backward),
    )


def float_kernel(group_size: int, *, divides: bool) -> Kernel:
    groups = float_decoding.WEIGHTS // group_size
    return Kernel(
        float_decoding.decode_kernel,
        arguments("codes scale_codes", "*u8")
        | {"global_scales": "*fp32", "weights": "*bf16"}
        | arguments("num_groups first groups_of_part", "i32"),
        {"DIVIDES": divides, "MULTIPLIES": False, "GROUPS": groups, "BYTES": group_size // 2}
        | float_decoding.OPTIONS,
    )


def fp8_kernel(*, is_e5m2: bool) -> Kernel:
    numbers = "num_rows num_columns matrix_rows matrix_scales height width scale_row column_blocks"
    return Kernel(
        fp8_decoding.decode_kernel,
        {"codes": "*u8", "scales": "*fp32", "weights": "*bf16"}
        | arguments(f"code_row {numbers}", "i32"),
        {"IS_E5M2": is_e5m2, "ROWS": fp8_decoding.ROWS, "COLUMNS": fp8_decoding.COLUMNS}
        | fp8_decoding.OPTIONS,
    )


def hqq_kernel(group_size: int, n_bits: int) -> Kernel:
    return Kernel(
        hqq_decoding.decode_kernel,
        {"packed": "*u8", "scale_zero": "*fp16", "weights": "*bf16"}
        | arguments("num_groups packed_row", "i32"),
        hqq_decoding.settings(group_size, n_bits),
    )


def float_rounding_kernel(group_size: int, *, divides: bool) -> Kernel:
    size = group_size // 2
    return Kernel(
        float_rounding.round_kernel,
        arguments("codes scale_codes new_codes new_scales", "*u8")
        | arguments("even_A odd_A scaled_B", "*fp64")
        | {"global_scale": "*fp32"}
        | arguments("num_rows row_bytes rank blocks", "i32"),
        {"DIVIDES": divides, "MULTIPLIES": False, "ROWS": float_rounding.ROWS}
        | {"GROUPS": float_rounding.PAIRS // size, "BYTES": size}
        | float_rounding.OPTIONS,
    )


def nf4_rounding_kernel(*, is_nested: bool) -> Kernel:
    return Kernel(
        nf4_rounding.round_kernel,
        arguments("codes order new_codes", "*u8")
        | {"absmax": "*u8" if is_nested else "*fp32"}
        | arguments("nested offset values nested_values limits new_absmax", "*fp32")
        | arguments("even_A odd_A scaled_B", "*fp64")
        | arguments("num_rows rank blocks skipped", "i32"),
        {"NESTED": is_nested, "LEAST": nf4_rounding.LEAST_ABSMAX, "ROWS": nf4_rounding.ROWS}
        | {"BYTES": nf4.BLOCKSIZE // 2}
        | nf4_rounding.OPTIONS,
    )


def fp8_rounding_kernel(*, repeats: bool) -> Kernel:
    numbers = "num_rows num_columns height width scale_row rank parts"
    return Kernel(
        fp8_rounding.round_kernel,
        arguments("codes new_codes", "*u8")
        | arguments("scales new_scales largest", "*fp32")
        | arguments("lora_A scaled_B", "*fp64")
        | arguments(f"code_row {numbers}", "i32"),
        {"IS_E5M2": repeats, "REPEATS": repeats}
        | {"ROWS": fp8_rounding.ROWS, "COLUMNS": fp8_rounding.COLUMNS}
        | fp8_rounding.OPTIONS,
    )


# Kernels that add in float64, whose numbers take two registers, and then round.
MOST_OF_ROUNDING = 128  # registers
ROUNDING = {
    "mxfp4": float_rounding_kernel(32, divides=False),
    "nvfp4": float_rounding_kernel(16, divides=True),
    "nf4": nf4_rounding_kernel(is_nested=True),
    "nf4 of one absmax": nf4_rounding_kernel(is_nested=False),
    "fp8": fp8_rounding_kernel(repeats=False),
    "fp8 again": fp8_rounding_kernel(repeats=True),
}
# Kernels as a launch for an 8B model calls them.
KERNELS = {
    "gate": Kernel(
        gate.product_kernel,
        arguments("gate up product", "*bf16")
        | arguments("gate_row up_row product_row width blocks", "i32"),
        gate.SETTINGS,
    ),
    "gate's gradients": Kernel(
        gate.gradients_kernel,
        arguments("grad gate up", "*bf16")
        | arguments("grad_row gate_row up_row width blocks", "i32"),
        {"KEEPS_GRAD": False, **gate.SETTINGS},
    ),
    "norm": norm_kernel(4096),
    "norm's gradient": norm_gradient_kernel(4096),
    "nf4": Kernel(
        nf4.decode_kernel,
        arguments("codes absmax", "*u8")
        | arguments("nested offset values nested_values", "*fp32")
        | arguments("weights", "*bf16")
        | arguments("num_blocks skipped", "i32"),
        {"NESTED": True, "BLOCKS": nf4.BLOCKS, "BYTES": nf4.BLOCKSIZE // 2, **nf4.OPTIONS},
    ),
    "mxfp4": float_kernel(32, divides=False),
    "nvfp4": float_kernel(16, divides=True),
    "fp8": fp8_kernel(is_e5m2=False),
    "hqq": hqq_kernel(64, 4),
    "loss": Kernel(
        token_loss.loss_kernel,
        arguments("outputs", "*bf16")
        | arguments("targets", "*i64")
        | arguments("losses factors", "*fp32")
        | arguments("vocabulary", "i32")
        | arguments("scale temperature", "fp32"),
        {"GRADIENT": True, "BLOCK": token_loss.BLOCK, **token_loss.OPTIONS},
    ),
    "rotary": rotary_kernel(128, backward=False),
    "rotary's gradient": rotary_kernel(128, backward=True),
}
# Other sizes of models, with other numbers of threads.
MORE_KERNELS = {
    "fp8 of 5 bits of exponent": fp8_kernel(is_e5m2=True),
    "hqq of 3 bits": hqq_kernel(128, 3),
    "hqq of 8 bits": hqq_kernel(128, 8),
    "norm of a head": norm_kernel(128),
    "norm of a head's gradient": norm_gradient_kernel(128),
    "wide norm": norm_kernel(16384),
    "wide norm's gradient": norm_gradient_kernel(16384),
    "rotary of small heads": rotary_kernel(64, backward=False),
    "rotary of large heads": rotary_kernel(256, backward=True),
}
# How many loads and stores of fewer than 128 bits a kernel may have: those of single numbers
# and statistics, and of rotary tables, which the heads of a token share.
NARROW = {
    "nf4": 14,
    "mxfp4": 1,
    "nvfp4": 5,
    "fp8": 2,
    "fp8 of 5 bits of exponent": 2,
    "hqq": 2,
    "hqq of 3 bits": 2,
    "hqq of 8 bits": 4,
    "loss": 4,
    "norm": 1,
    "norm's gradient": 1,
    "norm of a head": 2,
    "norm of a head's gradient": 3,
    "wide norm": 1,
    "wide norm's gradient": 1,
    "rotary": 8,
    "rotary's gradient": 8,
    "rotary of large heads": 8,
}
# Kernels that round a product before they add to it.
_ROUNDED = ("nf4", "mxfp4", "nvfp4", "rotary")
ROUND_TWICE = {name for name in KERNELS | MORE_KERNELS if name.startswith(_ROUNDED)}


def check(name: str, kernel: Kernel, capability: int) -> None:
    compiled = compile_kernel(kernel, capability)
    assert compiled.registers <= MOST_REGISTERS and not compiled.spilled
    assert compiled.wide and compiled.narrow <= NARROW.get(name, 0)
    assert not (name in ROUND_TWICE and compiled.fused)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_a_datacenter_card(name) -> None:
    check(name, KERNELS[name], 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", [*KERNELS, *MORE_KERNELS])
def test_kernels_compile_for_every_card(name, capability) -> None:
    check(name, (KERNELS | MORE_KERNELS)[name], capability)


def check_rounding(name: str, capability: int) -> None:
    compiled = compile_kernel(ROUNDING[name], capability)
    assert compiled.registers <= MOST_OF_ROUNDING and not compiled.spilled
    assert not compiled.fused


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_kernels_compile_for_a_datacenter_card(name) -> None:
    check_rounding(name, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_kernels_compile_for_every_card(name, capability) -> None:
    check_rounding(name, capability)
