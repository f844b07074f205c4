"""The ways to compute the parts of a model, beside each other: parts of gpu.py.

A way that this machine lacks, or that fails, is a line in `missing` or `failed` and does not stop
the others.
"""

import argparse
import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu_speed
from benchmarks.gpu_parts import (
    at_least,
    build,
    note,
    peak,
    process_group,
    relative,
    release,
    reset_peak,
    row,
    seconds_of,
    work_of,
)
from benchmarks.gpu_steps import Batch, Steps, Timed, make_config
from benchmarks.peers import measure_peers
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model import kernels
from fsdp_qlora.model.architecture.attention_kernels import CUDNN, FLASH4, sdpa
from fsdp_qlora.model.architecture.attention_ways import (
    AttentionInputs,
    attention_inputs,
    attention_ways,
    exact_attention,
)
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.kernels.in_use import LEAN, PLAIN, TRITON, Ways, use_ways, ways_in_use
from fsdp_qlora.sharding.recompute import set_recompute

WITH_KERNELS = "lean+kernels"
AUTO = "auto"  # what a run's start chooses
# modules of model/kernels whose part has another name
_PART_OF = {"nf4": "decoding", "token_loss": "loss"}


def error_of(error: Exception) -> str:
    """An error's kind and first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def triton_parts() -> dict[str, str]:
    """The parts that have a kernel in Triton, as fields of Ways."""
    modules = [name for _, name, _ in pkgutil.iter_modules(kernels.__path__)]
    parts: dict[str, str] = {}
    for name in modules:
        part = _PART_OF.get(name, name)
        if part in Ways._fields:
            module = importlib.import_module(f"{kernels.__name__}.{name}")
            parts |= {part: TRITON} if TRITON in getattr(module, "WAYS", {}) else {}
    return parts


# --- speed ---


def measure_speed(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The whole 8B beside the peers, by the ways that --ways asks for or as a run would choose."""
    if not args.ways:
        return gpu_speed.measure_speed(args, ranks)
    batches = (Batch(4, 2048), Batch(2, 2048), Batch(1, 2048))
    work = work_of(args, ranks, "8b", batches, layers=args.layers, seconds=2.0)
    found: dict[str, Any] = {"ways": {}, "failed": {}, "planned": {}, "rows": []}
    for name in args.ways.split(","):
        try:
            with process_group(ranks):
                found["ways"][name] = _speed_of(name, work, ranks)
        except Exception as error:  # of a compiler or a driver: the other ways go on
            found["failed"][name] = error_of(error)
        finally:
            use_ways(Ways())
        release(ranks.device)
        found["rows"] = _rows_of_ways(found["ways"], work)
        note(args, found)  # for the case that time runs out
    # Whichever way was asked for last: the fastest, if all went well.
    if found["ways"]:
        fastest = [*found["ways"].values()][-1]
        peers = measure_peers(work, fastest, ranks.device)
        found |= {"peers": peers["peers"]}
        found["rows"] += gpu_speed.beside_peers(peers, work.batches[0])
    return found


def _speed_of(name: str, work: Steps, ranks: Ranks) -> dict[str, Any]:
    """Steps of each batch by these ways, with and without recompute."""
    known = (PLAIN, LEAN, WITH_KERNELS, AUTO)
    if name not in known:
        raise ValueError(f"--ways takes {', '.join(known)}, not {name}")
    if name == WITH_KERNELS and importlib.util.find_spec("triton") is None:
        raise ImportError("Triton is not installed here")
    own = triton_parts() if name == WITH_KERNELS else {}
    train, of_batch = build(work, ranks, kernels=PLAIN if name == PLAIN else "auto")
    if name != AUTO:
        use_ways(Ways() if name == PLAIN else Ways(linears=LEAN, **own))
    found: dict[str, Any] = {"layers": make_config(work).num_hidden_layers, "tokens_per_second": {}}
    found |= {"batches": {}, "memory_bytes": {}, "busy": {}, "in_use": ways_in_use()._asdict()}
    for recompute in ("all", "none"):
        if recompute == "none":
            set_recompute(train.run.trainer.model, 0)
            release(ranks.device)
        for batch, step_rows in zip(work.batches, of_batch, strict=True):
            reset_peak(ranks.device)
            label = f"{batch}, recompute {recompute}"
            with contextlib.suppress(torch.OutOfMemoryError):
                steps = train.steps(step_rows)
                found["tokens_per_second"][label] = _tokens_per_second(train, batch, steps)
                # as `measure` has them, for the peers
                found["batches"].setdefault(str(batch), steps)
                found["memory_bytes"][label] = {"peak_allocated": peak(ranks.device)}
                found["memory_bytes"].setdefault(str(batch), found["memory_bytes"][label])
        found["busy"][recompute] = gpu_speed.busy_share(train, of_batch[1])
    return found


def _tokens_per_second(train: Timed, batch: Batch, steps: dict[str, Any]) -> float:
    seconds = sorted(steps["step_seconds"])[len(steps["step_seconds"]) // 2]
    return float(batch.rows * batch.length / seconds)


def _rows_of_ways(ways: dict[str, dict[str, Any]], work: Steps) -> list[dict[str, Any]]:
    """One line for each batch and recompute; an aim is for the way that was measured last."""
    aims = {
        f"{work.batches[0]}, recompute all": 11_000,
        f"{work.batches[0]}, recompute none": 15_000,
    }
    rows = []
    for label in dict.fromkeys(key for way in ways.values() for key in way["tokens_per_second"]):
        figures = {name: way["tokens_per_second"].get(label) for name, way in ways.items()}
        speeds = {name: float("nan") if each is None else each for name, each in figures.items()}
        last = [*speeds.values()][-1]
        limit = aims.get(label)
        aim = f"at least {limit:,} on an H200" if limit else ""
        holds = at_least(last / limit, 1.0) if limit else None
        ratio = last / speeds[PLAIN] if PLAIN in speeds else float("nan")
        rows.append(
            row(f"ways, 8B, {label}", "tokens/s", speeds, aim=aim, holds=holds, ratio=ratio)
        )
    for recompute in ("all", "none"):
        shares = {name: way["busy"].get(recompute, float("nan")) for name, way in ways.items()}
        holds = at_least([*shares.values()][-1], 0.95) if shares else None
        item = f"GPU busy, 8B, {work.batches[1]}, recompute {recompute}"
        rows.append(row(item, "share of the step", shares, aim="at least 0.95", holds=holds))
    return rows


# --- attention ---

AttentionKernel = Callable[[AttentionInputs], list[torch.Tensor]]
_NAMES = {PLAIN: "flash, any lengths", CUDNN: "cuDNN", FLASH4: "FlashAttention 4"}


def measure_attention(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """A block's attention by each kernel, forward and backward, with errors from float64."""
    batches = [Batch(8, 2048), Batch(2, 8192), Batch(1, 32768)]
    batches += [Batch(1, 80_000)] if args.fa4 else []
    if args.tiny:
        batches = [Batch(batch.rows, 128) for batch in batches[:2]]
    blocks = block_shapes(make_config(Steps("tiny" if args.tiny else "8b", tuple(batches))))
    dtype = PRECISIONS[choose_precision(args.precision, ranks.device)].compute_dtype
    found: dict[str, Any] = {"errors": {}, "ms": {}, "missing": {}, "rows": []}

    def inputs_of(batch: Batch) -> AttentionInputs:
        lengths = [batch.length] * batch.rows
        (inputs,) = attention_inputs(blocks, lengths, dtype, ranks.device)
        return inputs

    small = inputs_of(Batch(2, batches[0].length))
    kernels_here = _attention_kernels(small, ranks.device, found["missing"], args.fa4)
    found["errors"] = _errors_of(kernels_here, small, found["missing"])
    errors = {name: max(each.values()) for name, each in found["errors"].items()}
    found["rows"] = [row("attention, 8B", "error from float64", errors)]
    for batch in batches:
        inputs = inputs_of(batch)
        times = {name: float("nan") for name in found["errors"]}
        for name in times:
            with contextlib.suppress(torch.OutOfMemoryError):
                times[name] = 1e3 * seconds_of(partial(kernels_here[name], inputs), 3)
        found["ms"][str(batch)] = times
        found["rows"].append(row(f"attention, 8B, {batch}", "ms forward and backward", times))
        note(args, found)  # for the case that time runs out
        del inputs
        release(ranks.device)
    return found


def _attention_kernels(
    inputs: AttentionInputs, device: torch.device, missing: dict[str, str], wants_flash4: bool
) -> dict[str, AttentionKernel]:
    """The kernels of this machine; `missing` gets the reasons of those that it lacks."""
    ways = attention_ways([inputs], device)
    missing |= {_NAMES[name]: why for name, why in ways.missing.items()}
    found = {_NAMES[name]: way for name, way in ways.ways.items()}
    found |= {"SDPA, flash": partial(_by_sdpa, SDPBackend.FLASH_ATTENTION)}
    if device.type != "cuda":
        missing |= {name: "not on a CPU" for name in found}
        found = {"SDPA, math": partial(_by_sdpa, SDPBackend.MATH)}
    if wants_flash4 and device.type == "cuda":
        # without torch's switch, too: its versions before 2.14 do not take each of the package's
        found["FlashAttention 4, its own function"] = _by_flash4
    elif not wants_flash4:
        found.pop(_NAMES[FLASH4], None)
        missing[_NAMES[FLASH4]] = "not asked for"
    return found


def _errors_of(
    kernels_here: dict[str, AttentionKernel], inputs: AttentionInputs, missing: dict[str, str]
) -> dict[str, dict[str, float]]:
    """The relative errors of each kernel's results; `missing` gets the kernels that fail."""
    exact = exact_attention(inputs)
    names = ("output", "query", "key", "value")
    errors: dict[str, dict[str, float]] = {}
    for kernel, compute in kernels_here.items():
        try:
            pairs = zip(compute(inputs), exact, strict=True)
            errors[kernel] = dict(zip(names, (relative(*pair) for pair in pairs), strict=True))
        except Exception as error:  # of a library: the other kernels go on
            missing[kernel] = error_of(error)
    return errors


def _by_sdpa(backend: SDPBackend, inputs: AttentionInputs) -> list[torch.Tensor]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key, value, inputs.call)

    with sdpa_kernel(backend):
        return _both_passes(attend, inputs)


def _by_flash4(inputs: AttentionInputs) -> list[torch.Tensor]:
    """The package's own function."""
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    call = inputs.call

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        output = function(
            *(each[0].transpose(0, 1) for each in leaves),
            cu_seqlens_q=call.ends,
            cu_seqlens_k=call.ends,
            max_seqlen_q=call.longest,
            max_seqlen_k=call.longest,
            causal=True,
        )
        # some versions return the log-sum-exp, too
        return output if isinstance(output, torch.Tensor) else output[0]

    return _both_passes(attend, inputs)


def _both_passes(
    attend: Callable[..., torch.Tensor], inputs: AttentionInputs
) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs.grad)]
