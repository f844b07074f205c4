"""How fast a program computes what is in a step besides its matrix products.

The figures of this program are fitted to the steps that an H200 ran with the plain ways. What other
ways save is derived from the bytes that they read and write, and from the launches that they leave
out. No card has measured it yet.
"""

from typing import NamedTuple

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.model.architecture.attention import VARLEN
from fsdp_qlora.model.architecture.attention_kernels import CUDNN, MOST_OF_CUDNN
from fsdp_qlora.model.architecture.shapes import block_shapes, has_silu
from fsdp_qlora.model.kernels.in_use import LEAN, PLAIN, TRITON, Ways
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.model.quantizers.padded_groups import PADDED
from fsdp_qlora.planning.gpus import Gpu
from fsdp_qlora.planning.plan import ModelPlan

_FIRST_OF_TRITON = 80  # the compute capability from which Triton's kernels have 16-bit types
_HOPPER = (90, 100)
# Passes over hidden states that each way saves, of the 410 of the plain ways. A block's kernels
# read and write 303 hidden states of 16 bits in a forward, a recomputed and a backward pass; by
# lean linears and all kernels 162, and they reach more of the bandwidth.
_SAVED_PASSES = {"linears": 65.0, "gate": 95.0, "rotary": 60.0, "norm": 20.0}
# The share of the host's time that remains: lean linears replace 21 of autograd's functions in a
# block by 6, and a decoding by one kernel takes a third of the host's time.
_LAUNCHES = {"linears": 0.65, "decoding": 0.7}


# Host seconds for a product with an expert's matrix, in whose layer host and GPU wait for each
# other: 12 blocks of Qwen3-30B-A3B took 0.46 s on an H200, of whose matrices three passes multiply
# 9,216, in groups. Padded groups take twice as many launches, single experts six times as many:
# 452, 868 and 2,656 in a block (stand_in/programs/expert_launches.py).
IN_GROUPS = 3e-5
_PADDED = 4e-5
_ONE_BY_ONE = 7e-5


class Program(NamedTuple):
    """A program's work besides matrix products, and how fast it is done."""

    passes: float = 400.0
    """Over a token's hidden state in a block, in 16 bits, read or written: norms, gates, rotary
    embeddings and adapters of a forward, a recomputed and a backward pass."""
    block_seconds: float = 5.2e-3
    """Time of the host to launch what a block does in a pass."""
    decoding: float = 1.0
    """Share of a quantizer's `decoding_bytes` that decoding a weight moves."""
    attention: float = 1.0
    """Share of the rate of matrix products that attention achieves."""
    computes_last_again: bool = True
    """Whether recomputing a block includes its last product."""
    product_seconds: float = IN_GROUPS
    """Time of the host for a product with an expert's matrix."""
    turns: float = 0.0
    """Share of the shorter of host and GPU in which each waits for the other."""


class Parts(NamedTuple):
    """Which parts of a model may have other ways than the plain one."""

    gate: bool = True
    """Whether the activation of its MLPs is SiLU."""
    decoding: bool = True
    """Whether its base is quantized."""
    cudnn: bool = True
    """Whether cuDNN takes its attention, of rows that have one length."""

    @classmethod
    def of(cls, model: ModelPlan, *, of_equal_lengths: bool) -> "Parts":
        """The parts of a planned model."""
        shapes = block_shapes(model.config)
        takes_heads = any(not shape.window and shape.head_dim <= MOST_OF_CUDNN for shape in shapes)
        return cls(
            gate=has_silu(model.config),
            decoding=any(isinstance(each, QuantizedWeight) for each in model.meta.model.modules()),
            cudnn=of_equal_lengths and takes_heads and model.documents == VARLEN,
        )


def expected_ways(config: TrainConfig, gpu: Gpu, parts: Parts) -> Ways:
    """The ways that a run will choose on a GPU, as far as they can be known before it runs."""
    if config.kernels == PLAIN:
        return Ways()
    is_lean = config.kind.adapter == "lora" and not config.lora_dropout
    ways = Ways(
        linears=LEAN if is_lean else PLAIN, experts=PLAIN if _groups_experts(gpu) else PADDED
    )
    if gpu.capability < _FIRST_OF_TRITON:
        return ways
    chosen = {
        "rotary": True,
        "gate": parts.gate,
        "decoding": parts.decoding,
        "rounding": config.merge_aware,
        # with other bits than the plain way
        "norm": not config.deterministic,
        "loss": not config.deterministic,
    }
    ways = ways._replace(**{part: TRITON for part, is_chosen in chosen.items() if is_chosen})
    by_cudnn = parts.cudnn and gpu.capability in _HOPPER and not config.deterministic
    return ways._replace(attention=CUDNN) if by_cudnn else ways


def expected_rounding(gpu: Gpu) -> str:
    """The way in which runs on a GPU round weights with their updates."""
    return TRITON if gpu.capability >= _FIRST_OF_TRITON else PLAIN


def this_program(ways: Ways, gpu: Gpu, kernel_share: float = 0.7) -> Program:
    """This program with the given ways on a GPU.

    Args:
        kernel_share: of a quantizer's `decoding_bytes`, moved by a kernel. The default is NF4's.
    """
    saved = sum(passes for part, passes in _SAVED_PASSES.items() if getattr(ways, part) != PLAIN)
    seconds = 5.2e-3
    for part, share in _LAUNCHES.items():
        if getattr(ways, part) != PLAIN:
            seconds *= share
    return Program(
        passes=410.0 - saved,
        block_seconds=seconds,
        decoding=1.0 if ways.decoding == PLAIN else kernel_share,
        attention=_attention_share(ways.attention, gpu),
        computes_last_again=False,
        product_seconds=_product_seconds(ways, gpu),
        turns=0.08,
    )


def _groups_experts(gpu: Gpu) -> bool:
    """Whether torch has a kernel for groups of experts on a GPU, in bf16."""
    return gpu.capability // 10 in (9, 10)


def fastest_product_seconds(gpu: Gpu) -> float:
    """Host time of the product with one expert, by the way of experts that runs take on a GPU."""
    return IN_GROUPS if _groups_experts(gpu) else _PADDED


def _product_seconds(ways: Ways, gpu: Gpu) -> float:
    if ways.experts == PADDED:
        return _PADDED
    return IN_GROUPS if _groups_experts(gpu) else _ONE_BY_ONE


def _attention_share(way: str, gpu: Gpu) -> float:
    """The share of the rate of matrix products that attention achieves."""
    # An H200 multiplies at 787 TFLOP/s, and its attention of rows of 2,048 tokens takes as long as
    # at 245; by cuDNN at 470 (transformers#48163). Elsewhere flash kernels are near the products.
    if gpu.capability not in _HOPPER:
        return 0.7
    return 0.31 if way == PLAIN else 0.6
