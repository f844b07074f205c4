"""More measured parts of gpu.py: micro-batches, formats of bases, experts, a whole 70B, and kernels
beside others.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig

from benchmarks import (
    gpu_answers,
    gpu_graphs,
    gpu_host,
    gpu_kernels,
    gpu_parts,
    gpu_rounding,
    gpu_ways,
)
from benchmarks.common import is_stand_in
from benchmarks.gpu_parts import (
    build,
    measure_kinds,
    note,
    process_group,
    ratio_of,
    release,
    reset_peak,
    row,
    seconds_of,
    work_of,
)
from benchmarks.gpu_steps import Batch, measure
from benchmarks.one_rank import limit_memory
from fsdp_qlora.distributed.ranks import Ranks, read_ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.experts import loops_over_experts
from fsdp_qlora.model.module_state import set_state, state_of

# The blocks of Qwen3-30B-A3B.
_MIXTURE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_TINY_MIXTURE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def measure_batches(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The whole 8B on larger micro-batches: from how many tokens on the GPU and not the host
    decides.
    """
    work = work_of(
        args, ranks, "8b", (Batch(8, 2048), Batch(16, 2048), Batch(1, 2048)), layers=args.layers
    )
    with process_group(ranks):
        found, train = measure(work, ranks)
        del train
    speeds = {
        name: batch.get("tokens_per_second", float("nan"))
        for name, batch in found["batches"].items()
    }
    found["rows"] = [row("micro-batches, 8B, recompute all", "tokens/s", speeds)]
    return found


def measure_formats(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A step of the whole 8B with a base in each of the formats in which models are published,
    beside its plan.
    """
    kinds = {kind: {"quant_type": kind} for kind in ("nf4", "mxfp4", "nvfp4", "fp8")}
    return measure_kinds(args, ranks, "formats", kinds)


def measure_experts(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """12 of 48 blocks of Qwen3-30B-A3B: experts in groups, by torch's grouped kernel where it is,
    and one by one.
    """
    layers = 2 if args.tiny else args.layers or 12
    sizes = _MIXTURE | (_TINY_MIXTURE if args.tiny else {}) | {"num_hidden_layers": layers}
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    work = work_of(args, ranks, "8b", (Batch(4, 2048),), layers=layers)
    speeds: dict[str, float] = {}
    found: dict[str, Any] = {"planned": {}, "losses": {}}
    with process_group(ranks):
        for kind in ("nf4", "mxfp4"):
            train, [step_rows] = build(work, ranks, config=config, quant_type=kind)
            tokens = int(train.run.plan.data.train.lengths[step_rows].sum())
            for way in ("in groups", "one by one"):
                if way == "one by one":  # which the plan does not mean
                    found["planned"] |= {
                        f"{kind}, {name}": dict(each) for name, each in train.planned.items()
                    }
                    for module in filter(loops_over_experts, train.run.trainer.model.modules()):
                        set_state(module, replace(state_of(module), group_bytes=0))
                steps = train.steps(step_rows)
                found["losses"][f"{kind}, {way}"] = steps["losses"]
                speeds[f"{kind}, {way}"] = tokens / statistics.median(steps["step_seconds"])
            item = f"experts, {layers} blocks of 30B-A3B, {work.batches[0]}"
            found["rows"] = [
                row(
                    item,
                    "tokens/s",
                    speeds,
                    ratio=ratio_of(speeds, "nf4, in groups", "nf4, one by one"),
                )
            ]
            note(args, found)  # for the case that time runs out
            del train
            release(ranks.device)
    return found


def measure_whole(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Run the whole 70B on one card.

    First within a smaller card's memory, with all but the adapters in host memory, then resident
    within the memory of two.
    """
    work = work_of(args, ranks, "70b", (Batch(1, 2048),), layers=args.layers, steps=2)
    found: dict[str, Any] = {"planned": {}, "load_seconds": {}, "losses": {}}
    speeds: dict[str, float] = {}
    with process_group(ranks):
        for name, offload, gib in (
            ("offloaded", True, args.memory_gib),
            ("resident", False, 2 * args.memory_gib),
        ):
            limit_memory(gib)
            reset_peak(ranks.device)
            started = time.perf_counter()
            with contextlib.suppress(torch.OutOfMemoryError):
                train, [step_rows] = build(work, ranks, use_cpu_offload=offload)
                found["load_seconds"][name] = time.perf_counter() - started
                steps = train.steps(step_rows)
                found["losses"][name] = steps["losses"]
                speeds[name] = work.batches[0].length / statistics.median(steps["step_seconds"])
                found["planned"] |= {
                    f"{name}, {each}": figures for each, figures in train.planned.items()
                }
                del train
            aim = f"fits in {gib:g} GiB"
            one = {name: speeds.get(name, float("nan"))}
            found.setdefault("rows", []).append(
                row("the whole 70B", "tokens/s", one, aim=aim, holds=name in speeds)
            )
            note(args, found)  # for the case that time runs out
            release(ranks.device)
    return found


def measure_alternatives(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Milliseconds of what a block of the 8B computes beside its large products, and of other ways
    to compute it.
    """
    tokens, hidden, inner, size = (64, 64, 128, 16) if args.tiny else (16384, 4096, 14336, 128)
    options: dict[str, Any] = {
        "device": ranks.device,
        "dtype": PRECISIONS[choose_precision("auto", ranks.device)].frozen_dtype,
    }
    found: dict[str, Any] = {"ms": {}}

    def measure(name: str, work: Callable[[], object]) -> None:
        found["ms"][name] = 1e3 * seconds_of(work)
        note(args, found)  # for the case that time runs out

    x = torch.randn(tokens, hidden, **options)
    low = torch.randn(tokens, 16, **options)
    weight = 0.02 * torch.randn(inner, hidden, **options)
    lora_B = torch.randn(inner, 16, **options)
    measure("product", lambda: F.linear(x, weight))
    measure("product, adapter added", lambda: F.linear(x, weight).addmm_(low, lora_B.T))
    measure("adapter, product added", lambda: torch.mm(low, lora_B.T).addmm_(x, weight.T))
    scale = torch.randn(hidden, **options)
    measure("norm, then weighted", lambda: scale * F.rms_norm(x, (hidden,), None, 1e-5))
    measure("norm with weight", lambda: F.rms_norm(x, (hidden,), scale, 1e-5))
    gate = torch.randn(tokens, inner, **options)
    up = torch.randn(tokens, inner, **options)
    measure("gate", lambda: F.silu(gate).mul_(up))
    heads = [torch.randn(1, tokens, count, size, **options).transpose(1, 2) for count in (32, 8)]
    cos = torch.randn(1, 1, tokens, size, **options)
    sin = torch.randn(1, 1, tokens, size, **options)
    measure(
        "rotary embedding, as models write it", lambda: [_rotate(each, cos, sin) for each in heads]
    )
    measure(
        "rotary embedding, by halves", lambda: [_rotate_halves(each, cos, sin) for each in heads]
    )
    if ranks.device.type == "cuda":
        compiled_gate: Any = torch.compile(_gate)
        compiled_rotation: Any = torch.compile(_rotate)
        measure("gate, compiled", lambda: compiled_gate(gate, up))
        measure(
            "rotary embedding, compiled",
            lambda: [compiled_rotation(each, cos, sin) for each in heads],
        )
    rows = [
        torch.randn(8, count, tokens // 8, size, requires_grad=True, **options)
        for count in (32, 8, 8)
    ]
    kernels = (
        [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        if ranks.device.type == "cuda"
        else []
    )
    for kernel in kernels:
        with sdpa_kernel(kernel):
            measure(f"attention, {kernel.name.lower()}", lambda: _attend(*rows))
            measure(
                f"attention and backward, {kernel.name.lower()}",
                lambda: _attend(*rows).sum().backward(),
            )
    return found


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same where both halves of cos and of sin are equal."""
    rotated = torch.empty_like(x)
    (first, second) = x.chunk(2, dim=-1)
    (one, other) = rotated.chunk(2, dim=-1)
    cos = cos.chunk(2, dim=-1)[0]
    sin = sin.chunk(2, dim=-1)[0]
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=other).addcmul_(first, sin)
    return rotated


MEASURES: dict[str, Callable[[argparse.Namespace, Ranks], dict[str, Any]]] = {
    **gpu_parts.MEASURES,
    "speed": gpu_ways.measure_speed,
    "ways": gpu_kernels.measure_ways,
    "rounding": gpu_rounding.measure_rounding,
    "host_activations": gpu_host.measure_host_activations,
    "attention": gpu_ways.measure_attention,
    "decode": gpu_answers.measure_decode,
    "graphs": gpu_graphs.measure_graphs,
    "alternatives": measure_alternatives,
    "batches": measure_batches,
    "formats": measure_formats,
    "experts": measure_experts,
    "whole": measure_whole,
}


def measure_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A part's results, from this process: what was noted before an error too."""
    has_values = not is_stand_in() or os.environ.get("PHANTOM_VALUES") == "1"
    try:
        found = MEASURES[name](args, read_ranks())
    except Exception as error:  # whatever it is, the other parts go on
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if args.one_part:
            traceback.print_exc()
    earlier = (
        json.loads(Path(args.output).read_text())
        if args.one_part and Path(args.output).exists()
        else {}
    )
    note(args, found := {**earlier, **found, "has_values": has_values})
    return found
