"""The parts of gpu.py: each is measured in a process of its own and gives one JSON object."""

import argparse
import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from transformers.utils import is_flash_attn_2_available

from benchmarks import gpu_rows
from benchmarks.common import describe_machine
from benchmarks.gpu_kernels import measure_attention, measure_head
from benchmarks.gpu_peers import measure_peers
from benchmarks.gpu_steps import BATCHES, SHAPES, TINY_BATCHES, Steps, measure, synchronize
from benchmarks.one_rank import RepeatedWeights, keep_own_part, limit_memory, rank_0_of, start_alone
from fsdp_qlora.model.precision import choose_precision
from fsdp_qlora.quantizers.table import QUANTIZERS
from fsdp_qlora.ranks import distributed
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.sharding.host_memory import split_arena

MIB = 2**20
_QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4, double quantization": ("bnb_4bit", {"quant_type": "nf4", "double_quant": True}),
    "nf4": ("bnb_4bit", {"quant_type": "nf4", "double_quant": False}),
    "hqq, 4 bits": ("hqq", {"n_bits": 4, "group_size": 64}),
    "int8": ("int8", {"int8_threshold": 6.0}),
}


def measure_box(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Hardware, versions, free memory, and which kernels attention takes."""
    box: dict[str, Any] = {
        "machine": describe_machine(ranks.device),
        "precision": choose_precision("auto", ranks.device),
    }
    box["flash_attention_2"] = bool(is_flash_attn_2_available())
    box["sdpa_kernels"] = {name: _sdpa_kernel(ranks.device, *shape) for name, shape in _ATTENTION.items()}
    if ranks.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(ranks.device)
        box |= {"free_bytes": free, "total_bytes": total, "allocator": torch.cuda.get_allocator_backend()}
        box["compute_capability"] = list(torch.cuda.get_device_capability(ranks.device))
    if program := shutil.which("nvidia-smi"):
        asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
        command = [program, f"--query-gpu={asked}", "--format=csv,noheader"]
        box["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    return box


# What is asked for: dtype, rows, heads, heads of keys, length, size of a head.
_ATTENTION = {
    "7b, bf16": (torch.bfloat16, 2, 32, 32, 2048, 128),
    "8b, bf16": (torch.bfloat16, 2, 32, 8, 2048, 128),
    "8b, fp16": (torch.float16, 2, 32, 8, 2048, 128),
    "8b, fp32": (torch.float32, 2, 32, 8, 2048, 128),
}


def _sdpa_kernel(
    device: torch.device, dtype: torch.dtype, rows: int, heads: int, kv_heads: int, length: int, head_dim: int
) -> str:
    """The kernel that scaled_dot_product_attention would take for a causal pass with a gradient."""
    query = torch.empty(rows, heads, length, head_dim, dtype=dtype, device=device, requires_grad=True)
    key = torch.empty(rows, kv_heads, length, head_dim, dtype=dtype, device=device, requires_grad=True)
    choice = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=heads != kv_heads)
    names = {backend.value: name for name, backend in SDPBackend.__members__.items()}
    return names.get(int(choice), str(choice))


def measure_copies(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Copies between host and device and on the device, and decoding beside that bandwidth; GB are 10^9 bytes."""
    on_gpu = ranks.device.type == "cuda"
    size = (256 if on_gpu else 1) * MIB
    [arena] = split_arena([size], pinned=on_gpu)
    pageable = torch.zeros(size, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    there, again = (torch.zeros(size, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    copies: dict[str, Callable[[], object]] = {
        "host to device, pageable": lambda: there.copy_(pageable),
        "host to device, pinned by torch": lambda: there.copy_(pinned, non_blocking=True),
        "host to device, arena of offloaded weights": lambda: there.copy_(arena, non_blocking=True),
        "device to host, pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    speeds = {name: size / seconds_of(copy, ranks.device) / 1e9 for name, copy in copies.items()}
    bandwidth = 2 * size / seconds_of(lambda: there.copy_(again), ranks.device) / 1e9  # read and written
    speeds["on the device, read and written"] = bandwidth
    shape = (14336, 4096) if on_gpu else (256, 128)
    return {"gb_per_second": speeds, "decoding": _decoding(shape, ranks.device, bandwidth)}


def _decoding(shape: tuple[int, int], device: torch.device, bandwidth: float) -> dict[str, dict[str, float]]:
    """Time to decode one weight to bf16, and the share of the device's bandwidth that its bytes take."""
    results = {}
    for name, (quantizer, options) in _QUANTIZED.items():
        with torch.device("meta"):
            linear = nn.Linear(shape[1], shape[0], bias=False)
        layer = QUANTIZERS[quantizer].linear(linear, compute_dtype=torch.bfloat16, **options)
        num_bytes = 2 * shape[0] * shape[1]
        for key, parameter in list(layer.named_parameters()):
            values = torch.randint(0, 256, (parameter.numel() * 2,), dtype=torch.uint8, device=device)
            num_bytes += values.numel()
            values = values.view(parameter.dtype).view(parameter.shape)
            setattr(layer, key, nn.Parameter(values, requires_grad=False))
        seconds = seconds_of(layer.to(device).dequantize, device)
        speed = num_bytes / seconds / 1e9
        results[name] = {"milliseconds": 1e3 * seconds, "gb_per_second": speed, "of_bandwidth": speed / bandwidth}
    return results


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median time of `work`, by the GPU's clock where there is one."""
    seconds = []
    work()
    for _ in range(repeats):
        synchronize(device)
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
        else:
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
    return max(statistics.median(seconds), 1e-9)


def _steps(shape: str, mode: str, *, trace: bool = False) -> Callable[[argparse.Namespace, Ranks], dict[str, Any]]:
    def run(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
        distributed.start_process_group(ranks)
        try:
            return measure(_work(args, ranks, shape, mode=mode, trace=trace), ranks)
        finally:
            distributed.stop_process_group()

    return run


def _work(args: argparse.Namespace, ranks: Ranks, shape: str, **more: Any) -> Steps:
    if args.tiny:
        more |= {"steps": 2, "warmup_steps": 1}
    batches = TINY_BATCHES if args.tiny else BATCHES
    precision = choose_precision(args.precision, ranks.device)
    given = {"shape": "tiny" if args.tiny else shape, "batches": batches, "precision": precision}
    return Steps(**(given | {"layers": args.layers} | more))


def measure_70b(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Rank 0 of 2 of a 70B under the memory of a 24 GiB card, offloaded: a few blocks, then all if time allows."""
    started = time.perf_counter()
    ranks = rank_0_of(2)
    limit_memory(args.memory_gib)
    start_alone(ranks)

    def of(layers: int) -> dict[str, Any]:
        work = _work(args, ranks, "70b", mode="offloaded", steps=2, warmup_steps=1, layers=layers)
        work = Steps(**{**vars(work), "batches": work.batches[:1]})
        began = time.perf_counter()
        result = measure(work, ranks, make_files=RepeatedWeights, prepare=lambda run: keep_own_part(run.trainer.model))
        gc.collect()
        return {**result, "seconds": time.perf_counter() - began}

    try:
        few = of(args.layers or (2 if args.tiny else 8))
        whole = SHAPES["tiny" if args.tiny else "70b"]["num_hidden_layers"]
        needed = few["seconds"] * whole / few["layers"]
        left = args.seconds - (time.perf_counter() - started)
        full = of(whole) if not args.layers and needed < 0.8 * left else {"left_out": f"it would take {needed:.0f} s"}
    finally:
        distributed.stop_process_group()
    return {"memory_gib": args.memory_gib, "blocks": few, "full_depth": full, "loss_falls": few["loss_falls"]}


def measure_peers_part(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Our step and those of the installed peers, on some blocks of the 7B shape."""
    work = _work(args, ranks, "7b", steps=3, warmup_steps=1)
    layers = args.layers or (0 if args.tiny else 8)
    work = Steps(**{**vars(work), "batches": work.batches[:1], "layers": layers})
    distributed.start_process_group(ranks)
    try:
        ours = measure(work, ranks)
    finally:
        distributed.stop_process_group()
    gc.collect()
    return measure_peers(work, ours, ranks.device)


class Part(NamedTuple):
    """measure: gives the part's results. seconds: after which its process is ended; loading and imports count."""

    measure: Callable[[argparse.Namespace, Ranks], dict[str, Any]]
    seconds: float


# In the order in which they are of use where time runs out: together they may take longer than they all have.
PARTS: dict[str, Part] = {
    "box": Part(measure_box, 20),
    "copies": Part(measure_copies, 30),
    "8b, 4 x 2048, beside peers": Part(gpu_rows.measure_speed, 95),
    "row: offload": Part(gpu_rows.measure_offload, 55),
    "row: padding": Part(gpu_rows.measure_padding, 40),
    "row: recompute": Part(gpu_rows.measure_recompute, 50),
    "row: context": Part(gpu_rows.measure_context, 80),
    "row: head": Part(measure_head, 20),
    "row: optimizer": Part(gpu_rows.measure_optimizers, 40),
    "row: activation offload": Part(gpu_rows.measure_activation_offload, 40),
    "70b, one of two ranks": Part(measure_70b, 90),
    "row: placement": Part(gpu_rows.measure_placement, 35),
    "row: attention": Part(measure_attention, 20),
    "8b, resident": Part(_steps("8b", "resident", trace=True), 60),
    "8b, offloaded": Part(_steps("8b", "offloaded"), 55),
    "8b, no recompute": Part(_steps("8b", "no recompute"), 45),
    "peers": Part(measure_peers_part, 60),
    "7b, resident": Part(_steps("7b", "resident"), 45),
    "7b, offloaded": Part(_steps("7b", "offloaded"), 50),
    "7b, no recompute": Part(_steps("7b", "no recompute"), 40),
}
