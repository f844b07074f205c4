"""Quantized layers against the libraries' own layers and functions, and against autograd on the
decoded weight.
"""

import functools
import importlib
import itertools
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_qlora.model.model_parts import count_bytes, kinds_of
from fsdp_qlora.model.quantizers.base import Matrix, QuantizedLinear, QuantizedWeight
from fsdp_qlora.model.quantizers.bnb_4bit import quantize_blocks
from fsdp_qlora.model.quantizers.int8 import _multiply
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from tests.layers.shards import SHAPES, LargestTensor, relative_error, shards, weight_of
from tests.layers.test_lora_product import ONE_RANK

pytestmark = pytest.mark.quick

HQQ = {f"hqq{n_bits}": ("hqq", {"n_bits": n_bits, "group_size": 64}) for n_bits in (8, 4, 3, 2)}
INT8 = {
    "int8": ("int8", {"int8_threshold": 6.0}),
    "int8 without outliers": ("int8", {"int8_threshold": 0.0}),
}
# As of compressed-tensors, for the groups or rows of a weight.
SERVED = {
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "nvfp4": {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
    "fp8": {"num_bits": 8, "strategy": "channel"},
}
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    **HQQ,
    "hqq group 32": ("hqq", {"n_bits": 3, "group_size": 32}),
    **INT8,
    **{kind: (kind, {}) for kind in SERVED},
}
FOUR_BIT = {
    f"{quant_type}{'' if double_quant else ', absmax in fp32'}": (
        "bnb_4bit",
        {"quant_type": quant_type, "double_quant": double_quant},
    )
    for quant_type, double_quant in itertools.product(("nf4", "fp4"), (True, False))
}
# The memory of a base's weight, in bytes per parameter.
LIMITS = {
    "nf4": 0.52,
    "hqq8": 1.07,
    "hqq4": 0.57,
    "hqq3": 0.45,
    "hqq2": 0.32,
    "int8": 1.01,
    "mxfp4": 0.532,
    "nvfp4": 0.563,
    "fp8": 1.01,
}


def _layer(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None = None
) -> QuantizedLinear:
    quantizer, options = {**NEW, **FOUR_BIT}[kind]
    linear = nn.Linear(shape[1], shape[0], bias=bias is not None, device="meta")
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return QUANTIZERS[quantizer].linear(linear, compute_dtype=dtype, **options)


def _make(
    kind: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[QuantizedLinear, torch.Tensor]:
    return _layer(kind, shape, dtype), weight_of(shape)


def _reference(kind: str, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The weight, quantized and decoded again in float32 by the library's own layer.

    HQQ's solver is told to take all its iterations: stopping when the error of the whole tensor no
    longer falls is what we do without.
    """
    quantizer, options = NEW[kind]
    if quantizer in SERVED:
        return _served_reference(quantizer, weight)
    if quantizer == "int8":
        layer = bnb.nn.Linear8bitLt(
            weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False
        )
        layer.weight = bnb.nn.Int8Params(
            weight.clone(), requires_grad=False, has_fp16_weights=False
        )
        layer.to("cpu")
        return layer.weight.CB.float() * (layer.weight.SCB * (1 / 127)).unsqueeze(1)
    hqq = pytest.importorskip("hqq.core.quantize")
    settings = hqq.BaseQuantizeConfig(
        nbits=options["n_bits"], group_size=options["group_size"], axis=1
    )
    solver = importlib.import_module("hqq.core.optimize").optimize_weights_proximal_v2
    own = {
        "lp_norm": 0.7,
        "beta": 10.0,
        "kappa": 1.01,
        "iters": 20,
        "tol": 0.0,
        "early_stop": False,
    }
    patched = functools.partial(solver, opt_params={**own, "scale_gridsearch": False})
    monkeypatch.setattr(hqq.Quantizer, "optimize_weights", patched)
    # HQQLinear refuses weights that do not fill its groups, four at a time; ours fills the last
    # with its last weight.
    flat = weight.flatten()
    flat = torch.cat([flat, flat[-1:].expand(-len(flat) % (4 * options["group_size"]))])
    linear = nn.Linear(options["group_size"], len(flat) // options["group_size"], bias=False)
    linear.weight.data = flat.view(linear.weight.shape).clone()
    layer = hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
    for name in ("scale", "zero"):  # which it keeps in the compute dtype; fp16 is its default
        layer.meta[name] = layer.meta[name].half().float()
    return layer.dequantize().flatten()[: weight.numel()].view(weight.shape)


def _served_reference(kind: str, weight: torch.Tensor) -> torch.Tensor:
    compressed_tensors = importlib.import_module("compressed_tensors.quantization")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    arguments = compressed_tensors.QuantizationArgs(
        type="float", symmetric=True, dynamic=False, **SERVED[kind]
    )
    size = SERVED[kind].get("group_size", weight.shape[-1])
    groups = nn.functional.pad(weight.flatten(), (0, -weight.numel() % size)).view(-1, size)
    of_all = utils.generate_gparam(weight.min(), weight.max()) if kind == "nvfp4" else None
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale, zero = utils.calculate_qparams(low, high, arguments, global_scale=of_all)
    decoded = forward.fake_quantize(groups, scale, zero, arguments, global_scale=of_all)
    return decoded.flatten()[: weight.numel()].view(weight.shape)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "kinds", [(*HQQ, "hqq group 32", *INT8), (*SERVED,)], ids=["hqq and int8", "served"]
)
def test_shards_hold_the_librarys_bytes_on_any_number_of_ranks(
    kinds, world_size, tmp_path, monkeypatch
):
    if kinds == (*SERVED,):
        pytest.importorskip(
            "compressed_tensors", reason="the tests' reference, not in the lowest environment"
        )
    keys = list(itertools.product(kinds, SHAPES, (torch.float32, torch.bfloat16)))
    for (kind, shape, dtype), parts in zip(
        keys, shards(world_size, _make, keys, tmp_path), strict=True
    ):
        expected = _reference(kind, weight_of(shape), monkeypatch)
        assert (expected - weight_of(shape)).abs().max() < 0.15  # it is that weight
        whole = _layer(kind, shape, dtype)
        decoded = whole.quantize_whole(weight_of(shape))
        assert torch.equal(decoded, expected.to(dtype))
        assert all(torch.equal(part["decoded"], decoded) for part in parts), (kind, shape)
        for name, parameter in whole.named_parameters():  # nothing is held twice
            assert (
                sum(len(part[name]) for part in parts)
                == parameter.numel() * parameter.element_size()
            )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_4bit_shards_are_bitsandbytes_own_bytes_on_any_number_of_ranks(world_size, tmp_path):
    keys = list(itertools.product(FOUR_BIT, SHAPES, (torch.bfloat16,)))
    for (kind, shape, dtype), parts in zip(
        keys, shards(world_size, _make, keys, tmp_path), strict=True
    ):
        options = FOUR_BIT[kind][1]
        codes, state = bnb.functional.quantize_4bit(
            weight_of(shape),
            blocksize=64,
            compress_statistics=options["double_quant"],
            quant_type=options["quant_type"],
        )
        expected = {"weight": codes, "absmax": state.absmax}
        if options["double_quant"]:
            expected["nested_absmax"] = state.state2.absmax
            assert all(torch.equal(part["absmax_offset"], state.offset) for part in parts)
        for name, value in expected.items():
            value = value.reshape(-1).view(torch.uint8)
            joined = torch.cat([part[name] for part in parts])
            assert torch.equal(joined[: len(value)], value), (shape, name)
            assert not joined[len(value) :].any()
        decoded = bnb.functional.dequantize_4bit(codes, state).to(dtype)
        assert all(torch.equal(part["decoded"], decoded) for part in parts)


def _fill(layer: QuantizedWeight, weight: torch.Tensor) -> None:
    """Give a layer its weight without ranks."""
    for name in ("weight", *layer.statistics):
        setattr(
            layer,
            name,
            nn.Parameter(torch.empty_like(getattr(layer, name), device="cpu"), requires_grad=False),
        )
    layer.load_shard(weight.flatten(), ONE_RANK)


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators read and write."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # out= is among these, not in args
        written = [] if func.is_view or "empty" in str(func) else [result]
        moved = tree_leaves((args, written)) if written else []
        self.total += sum(each.nbytes for each in moved if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize("kind", [*HQQ, *SERVED])
def test_planned_bytes_are_those_that_decoding_moves(kind):
    layer = _layer(kind, (512, 512), torch.bfloat16)
    _fill(layer, weight_of((512, 512)))
    with MovedBytes() as moved:
        layer.dequantize()
    assert moved.total / 512**2 == pytest.approx(layer.decoding_bytes, abs=0.1)


@pytest.mark.parametrize(
    "kind", ["nf4, absmax in fp32", "fp4, absmax in fp32", *HQQ, *SERVED, "int8 without outliers"]
)
# the last: rows of one and a half blocks
@pytest.mark.parametrize("shape", [(96, 128), (50, 33), (50, 96)])
def test_quantized_product_and_gradient_match_the_decoded_weight(kind, shape):
    bias = torch.randn(shape[0])
    layer = _layer(kind, shape, torch.float32, bias)
    _fill(layer, weight_of(shape))
    x = torch.randn(2, 9, shape[1], requires_grad=True)
    grad_y = torch.randn(2, 9, shape[0])
    y = layer(x)
    assert not y.grad_fn.saved_tensors  # the decoded weight is not kept
    y.backward(grad_y)
    x64 = x.detach().double().requires_grad_()
    y64 = nn.functional.linear(x64, layer.dequantize().double(), bias.double())
    y64.backward(grad_y.double())
    assert x.grad is not None and x64.grad is not None
    # int8 rounds its input to 127 steps either side, which its gradient passes over: only that is
    # exact there.
    assert relative_error(y, y64) < (1e-2 if kind.startswith("int8") else 1e-6)
    assert relative_error(x.grad, x64.grad) < 1e-6


@pytest.mark.parametrize(("kind", "threshold"), [("int8", 6.0), ("int8 without outliers", 0.0)])
def test_int8_matches_bitsandbytes_for_each_token_alone(kind, threshold):
    shape = (96, 128)
    bias = torch.randn(96)
    layer = _layer(kind, shape, torch.float32, bias)
    _fill(layer, weight_of(shape))
    theirs = bnb.nn.Linear8bitLt(128, 96, has_fp16_weights=False, threshold=threshold)
    theirs.weight = bnb.nn.Int8Params(weight_of(shape), requires_grad=False, has_fp16_weights=False)
    theirs.bias = nn.Parameter(bias.clone())
    theirs.to("cpu").eval()  # its training mode does not round activations on the CPU
    x = torch.randn(10, 128)
    x[3, 5] = 40.0
    x[3, 7] = -9.0
    x[8, 5] = 7.0
    alone = torch.cat([theirs(token) for token in x.split(1)])
    assert relative_error(layer(x), alone.double()) < 1e-6
    # Together it takes columns 5 and 7 in full for every token: the same where none is an outlier.
    assert (relative_error(theirs(x), alone.double()) < 1e-6) == (threshold == 0)
    exact = nn.functional.linear(x.double(), layer.dequantize().double(), bias.double())
    assert relative_error(layer(x), exact) < (0.01 if threshold else 0.1)


@pytest.mark.parametrize("kind", [*LIMITS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_per_parameter_stay_within_the_limits(kind, dtype):
    num_weights = 1024 * 4096
    counts = count_bytes(kinds_of(_layer(kind, (1024, 4096), dtype)), num_shards=3)
    assert counts.keys() == {"codes", "statistics"}
    assert (
        0.9 * LIMITS[kind]
        < sum(part.total for part in counts.values()) / num_weights
        <= LIMITS[kind]
    )
    # NF4's absmax: a byte for 64 weights, and float32 for 256 of these. HQQ: fp16 scale and zero.
    # int8: float32 a row.
    of_nf4 = num_weights // 64 + num_weights // 2**14 * 4
    of_rows = 1024 * 4
    known = {
        "nf4": of_nf4,
        "int8": of_rows,
        "fp8": of_rows,
        "mxfp4": num_weights // 32,
        "nvfp4": num_weights // 16 + 4,
    }
    statistics = known.get(kind, num_weights // 16)
    assert counts["statistics"].total == statistics
    for part in counts.values():
        assert part.total / 3 <= part.largest_shard < 1.01 * part.total / 3


@pytest.mark.parametrize("transposed", [False, True])
def test_hqq_experts_multiply_as_decoded(transposed):
    shape = (3, 32, 64)
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    experts = QUANTIZERS["hqq"].experts(
        parameter, transposed=transposed, n_bits=4, group_size=64, compute_dtype=torch.float32
    )
    _fill(experts, weight_of(shape))
    decoded = experts.dequantize()
    assert (decoded - weight_of(shape)).abs().max() < 0.03
    for index in range(3):
        x = torch.randn(5, shape[1] if transposed else shape[2], requires_grad=True)
        y = experts.product(x, experts.expert(index))
        (grad,) = torch.autograd.grad(y.sum(), x)
        matrix = decoded[index] if transposed else decoded[index].T
        assert torch.allclose(y, x @ matrix, atol=1e-5)
        assert torch.allclose(grad, matrix.sum(dim=1).expand_as(x), atol=1e-5)
    assert (
        not QUANTIZERS["hqq"]
        .experts(
            nn.Parameter(torch.empty(2, 5, 6, device="meta")),
            transposed=False,
            n_bits=4,
            group_size=64,
            compute_dtype=torch.float32,
        )
        .supports()
    )


OF_MATRICES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: NEW[kind] for kind in ("hqq4", *SERVED)},
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
    "nvfp4, two scales for each": ("nvfp4", {"num_parts": 2}),
    "fp8, blocks that end with a matrix": ("fp8", {"block": (5, 48)}),
    "fp8, two scales for each": ("fp8", {"num_parts": 2}),
}


@pytest.mark.parametrize("kind", OF_MATRICES)
def test_matrices_are_decoded_as_parts_of_the_whole(kind):
    (quantizer, options) = OF_MATRICES[kind]
    shape = (5, 32, 64)
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    experts = QUANTIZERS[quantizer].experts
    assert experts is not None
    layer = experts(parameter, transposed=False, compute_dtype=torch.float32, **options)
    for name in ("weight", *layer.statistics):
        rows, columns = getattr(layer, name).shape
        # of finite numbers
        values = torch.randint(1, 100, (rows, 4 * columns), dtype=torch.uint8).view(torch.float32)
        if name == "global_scale" or (name != "weight" and quantizer in ("fp8", "bnb_4bit")):
            values = torch.rand(rows, columns) + 1
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    whole = layer.dequantize()
    assert whole.isfinite().all() and whole.unique().numel() > 9
    size = 32 * 64
    for chosen in ([0, 1, 2, 3, 4], [1, 2], [3], [0, 3], [1, 2, 4], [3, 1, 4], [2, 1, 3]):
        first = min(chosen)
        count = max(chosen) + 1 - first
        are_consecutive = chosen == [*range(first, first + count)]
        among = None if are_consecutive else (torch.tensor(chosen) - first, count)
        found = layer.dequantize(Matrix((len(chosen), 32, 64), first * size, among=among))
        assert torch.equal(found, whole[chosen]), chosen


class _AsOnACard(TorchDispatchMode):
    """bitsandbytes' int8 product as its CUDA kernel computes it: contiguous operands, and fp16 on
    the way out.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.bitsandbytes.int8_scaled_mm.default:
            assert all(operand.is_contiguous() for operand in args[:2])
            result = result.half().to(result.dtype)
        return result


def test_int8_products_beyond_fp16_are_finite_on_a_card():
    codes, row_scale, _ = bnb.functional.int8_vectorwise_quant(10 * weight_of((96, 128)).half())
    x = 10_000 * torch.randn(128, 16, generator=torch.Generator().manual_seed(0)).bfloat16().T
    assert not x.is_contiguous()
    expected = _multiply(x, None, codes, row_scale, 0.0)
    with _AsOnACard():
        y = _multiply(x, None, codes, row_scale, 0.0)
    assert expected.abs().max() > torch.finfo(torch.float16).max
    assert y.isfinite().all() and relative_error(y, expected.double()) < 4e-3  # bf16 keeps 8 bits


def test_int8_products_within_fp16_are_finite_for_any_token():
    codes, row_scale, _ = bnb.functional.int8_vectorwise_quant(weight_of((96, 128)).half())
    x = torch.zeros(1, 128, dtype=torch.float16)
    x[0, 5] = 40_000  # its scale's power of two is 65,536, which is beyond fp16
    expected = _multiply(x.float(), None, codes, row_scale, 0.0)
    y = _multiply(x, None, codes, row_scale, 0.0)
    assert y.isfinite().all() and relative_error(y, expected.double()) < 1e-3  # fp16 keeps 11 bits


def test_int8_products_are_split_at_the_int32_limit():
    codes, row_scale, _ = bnb.functional.int8_vectorwise_quant(weight_of((96, 128)).half())
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(0))
    whole = _multiply(x, None, codes, row_scale, 6.0)
    assert torch.equal(_multiply(x, None, codes, row_scale, 6.0, 3 * 128 + 1), whole)


@pytest.mark.parametrize("double_quant", [False, True])
def test_4bit_kernels_get_pieces_within_the_int32_limit(double_quant):
    values = torch.empty(2**31 + 128, device="meta", dtype=torch.bfloat16)
    experts = QUANTIZERS["bnb_4bit"].experts(
        nn.Parameter(torch.empty(3, 2**15, 2**15, device="meta")),
        transposed=False,
        quant_type="nf4",
        double_quant=double_quant,
        compute_dtype=torch.bfloat16,
    )
    with LargestTensor("bitsandbytes") as largest:
        codes, absmax = quantize_blocks(values, "nf4")
        assert experts.dequantize().shape == experts.shape
    assert 0 < largest.elements < 2**31
    assert codes.numel() == values.numel() // 2 and absmax.numel() == values.numel() // 64
