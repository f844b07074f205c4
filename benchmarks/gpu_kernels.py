"""Rows of gpu.py about single functions: head and loss, attention of rows of many lengths, and a block's small ones."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu_rows import ALPACA_LENGTHS, peak, ratio_of, reset_peak, row
from benchmarks.gpu_steps import GIB, synchronize
from fsdp_qlora.model.precision import PRECISIONS, choose_precision
from fsdp_qlora.ranks.distributed import Ranks
from fsdp_qlora.training.head_loss import LogitForm, chunked_loss

_MASKED = 0.6  # of a row's tokens


def measure_head(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Head and loss of 4,096 tokens, 60% of them a prompt, 128 Ki vocabulary: in chunks, and of all logits."""
    device, dtype = ranks.device, PRECISIONS[choose_precision(args.precision, ranks.device)].compute_dtype
    tokens, size, vocabulary = (64, 32, 512) if args.tiny else (4096, 4096, 2**17)
    hidden = torch.randn(tokens, size, device=device, dtype=dtype, requires_grad=True)
    weight = 0.02 * torch.randn(vocabulary, size, device=device, dtype=dtype)
    labels = torch.randint(vocabulary, (tokens,))
    labels[: int(_MASKED * tokens)] = -100
    learned = (labels != -100).nonzero().flatten().to(device)
    labels = labels.to(device)

    def in_chunks() -> None:
        chunked_loss(hidden.index_select(0, learned), weight, None, labels[learned], LogitForm()).backward()

    def whole() -> None:
        F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100, reduction="sum").backward()

    seconds, memory = {}, {}
    for name, run in {"all logits": whole, "in chunks": in_chunks}.items():
        seconds[name], memory[name] = milliseconds_and_gib(run, device)
        hidden.grad = None
    return {
        "rows": [
            _beside("head and loss", "ms", seconds, 0.5, device),
            _beside("head and loss", "GiB, peak", memory, 0.2, device),
        ]
    }


def _beside(item: str, unit: str, figures: dict[str, float], limit: float, device: torch.device) -> dict[str, Any]:
    ratio = ratio_of(figures, "in chunks", "all logits")
    aim = f"in chunks at most {limit} of all logits"
    holds = ratio <= limit if device.type == "cuda" else None
    return row(item, unit, figures, aim=aim, holds=holds, ratio=ratio)


def milliseconds_and_gib(work: Callable[[], object], device: torch.device, repeats: int = 3) -> tuple[float, float]:
    """Median time, and the peak beyond what lay there before; 0 on a CPU."""
    work()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    reset_peak(device)
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds), max(peak(device) - before, 0) / GIB


def measure_attention(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Forward and backward of the 8B shape's attention on eight micro-batches of Alpaca's lengths, none like another.

    `first` is the first time that a kernel sees these lengths, as in a run; cuDNN makes a plan for each of them.
    """
    device = ranks.device
    dtype = PRECISIONS[choose_precision(args.precision, device)].compute_dtype
    heads, groups, head_dim = (4, 2, 16) if args.tiny else (32, 8, 128)
    generator = np.random.default_rng(0)
    shorter = 8 if args.tiny else 1
    batches = [(generator.choice(ALPACA_LENGTHS, 8) // shorter + generator.integers(8)).tolist() for _ in range(8)]

    def tensors(tokens: int) -> list[torch.Tensor]:
        shapes = [(number, tokens, head_dim) for number in (heads, groups, groups)]
        return [torch.randn(1, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    def by_rows(backend: SDPBackend, lengths: list[int]) -> None:
        whole = tensors(sum(lengths))
        with sdpa_kernel([backend]):
            for query, key, value in zip(*(each.split(lengths, dim=2) for each in whole), strict=True):
                F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()

    def varying(lengths: list[int]) -> None:
        query, key, value = (each[0].transpose(0, 1) for each in tensors(sum(lengths)))
        # Before torch 2.13 keys and values had to be repeated.
        key, value = (each.repeat_interleave(heads // groups, dim=1) for each in (key, value))
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        result = varlen_attn(query, key, value, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
        assert isinstance(result, torch.Tensor)
        result.sum().backward()

    kernels: dict[str, Callable[[list[int]], None]] = {
        "varying lengths": varying,
        "flash, a row at a time": partial(by_rows, SDPBackend.FLASH_ATTENTION),
        "cuDNN, a row at a time": partial(by_rows, SDPBackend.CUDNN_ATTENTION),
    }
    figures: dict[str, float] = {}
    not_run: dict[str, str] = {}
    for name, kernel in kernels.items():
        try:
            for when in ("first", "again"):
                synchronize(device)
                started = time.perf_counter()
                for lengths in batches:
                    kernel(lengths)
                synchronize(device)
                figures[f"{name}, {when}"] = 1e3 * (time.perf_counter() - started) / len(batches)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            not_run[name] = str(error).splitlines()[0]
    return {"rows": [row("attention of rows of 46 to 519 tokens", "ms per micro-batch", figures, not_run=not_run)]}
