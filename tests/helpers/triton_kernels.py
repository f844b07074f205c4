"""Compiles Triton's kernels for cards that are not there, and reads what became of them."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# RTX 3090 (and A10), 4090, H200, 5090
CAPABILITIES = (86, 89, 90, 120)


class Kernel(NamedTuple):
    """How a launch calls a kernel.

    arguments: its tensors and numbers, with Triton's names of their types ("*bf16", "i32").
    Pointers and 32-bit numbers that it is compiled for are multiples of 16. settings: its
    tl.constexpr arguments, and options of the launch such as num_warps.
    """

    function: Any
    arguments: Mapping[str, str]
    settings: Mapping[str, Any]


class Compiled(NamedTuple):
    """What a kernel needs, and how it does it.

    registers: of a thread. spilled: bytes that a thread keeps in memory for lack of registers.
    wide, narrow: numbers of loads and stores of 128 bits, and of fewer. fused: multiplications with
    an addition of variables, rounded once, except in float64.
    """

    registers: int
    spilled: int
    wide: int
    narrow: int
    fused: int


def compile_kernel(kernel: Kernel, capability: int) -> Compiled:
    """For a card of that compute capability (86: 8.6), by the compiler in Triton's wheel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    constants = {name: value for name, value in kernel.settings.items() if name in names}
    options = {name: value for name, value in kernel.settings.items() if name not in names}
    types = {**kernel.arguments, **dict.fromkeys(constants, "constexpr")}
    assert {*names} == types.keys()
    source = ASTSource(
        fn=kernel.function,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if types[name].startswith("*")
            or (types[name] == "i32" and not kernel.function.params[index].do_not_specialize)
        },
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    needs, code = (_dump(compiled.asm["cubin"], flag) for flag in ("-res-usage", "-sass"))
    numbers = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", needs)}
    accesses = re.findall(r"\b(?:LDG|STG)\.E\S*", code)
    wide = sum(".128" in access for access in accesses)
    return Compiled(
        registers=numbers["REG"],
        spilled=numbers["LOCAL"] + numbers["STACK"],
        wide=wide,
        narrow=len(accesses) - wide,
        fused=_fused(compiled.asm["ptx"]),
    )


def _fused(ptx: str) -> int:
    # Cards before the H100 have no addition or product in bfloat16: they take a * 1 + b and
    # a * b - 0, with a constant.
    constants = {*re.findall(r"mov\.b32\s+(%r\d+), -?\w+;", ptx)}
    operands = (each.split(", ") for each in re.findall(r"\bfma\.rn(?!\.f64)\S*\s+(.*);", ptx))
    return sum(not constants.intersection(inputs) for _, *inputs in operands)


def _dump(cubin: bytes, flag: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
