"""Decides whether blocks that are computed again keep what attention gives for long documents.

They do where it fits: of all that they could keep, this saves the longest time for its memory.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch.distributed as dist

from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit import with_margin
from fsdp_qlora.planning.memory import Memory, Step
from fsdp_qlora.planning.placement import PlacedModel, least_free, least_host_free
from fsdp_qlora.utils.text import format_bytes

# Share of the host's free memory that a rank may take, if some is for this.
_OF_HOST = 0.75


def keeping_attention(placed: PlacedModel, gpu: float | None, host: float) -> PlacedModel:
    """The model, with attention's output kept if that fits.

    Args:
        gpu: bytes that a rank may reserve on a GPU; None if unknown.
        host: bytes of host memory that a rank may take.
    """
    if not _has_long_documents(placed):
        return placed
    on_host = placed.step.on_host._replace(attention=True)
    step = dataclasses.replace(placed.step, on_host=on_host)
    memory = estimate_memory(placed.model.meta.parts, placed.blocks, step)
    has_gpu = not step.on_gpu or (gpu is not None and with_margin(memory.reserved) <= gpu)
    before = _host_bytes(placed.memory, step)
    needs_host = _host_bytes(memory, step)
    # Weights that are there in any case are not held against it.
    has_host = needs_host == before or needs_host <= host
    if not (has_gpu and has_host):
        return placed
    return dataclasses.replace(placed, step=step, memory=memory)


def keeping_attention_here(placed: PlacedModel, store: dist.Store | None) -> PlacedModel:
    """The same by the memory of this machine, or of the GPU that is planned for.

    All ranks decide alike, since what probes and generation do depends on it.

    Args:
        store: by which the ranks agree; None if each decides alone.
    """
    machine = placed.model.machine
    gpu = least_free(machine, "the GPU memory for attention's output", store)
    host = math.inf
    if not machine.is_elsewhere:
        host = _OF_HOST * least_host_free(machine, "the host's for attention's output", store)
    return keeping_attention(placed, gpu, host)


def describe_attention(placed: PlacedModel) -> Iterator[str]:
    """A line about attention's output, where documents are so long that it may be kept."""
    if not _has_long_documents(placed):
        return
    step = placed.step
    of_block = max(block.attention for block in placed.blocks)
    size = f"{format_bytes(of_block // step.num_tokens)} a token and block"
    where = " in host memory" if step.on_host.inputs and step.on_gpu else ""
    if step.on_host.attention:
        yield f"attention is not computed again: its output is kept{where}, {size}"
    else:
        yield f"attention is computed again: its output would take {size}{where}"


def _host_bytes(memory: Memory, step: Step) -> int:
    """Bytes of host memory that a rank takes, on a CPU all of its memory."""
    return sum(memory.host.values()) if step.on_gpu else memory.allocated


def _has_long_documents(placed: PlacedModel) -> bool:
    """Whether attention of long documents is computed again if its output is not kept."""
    step = placed.step
    is_long = any(block.attention for block in placed.blocks)
    return step.trains and is_long and step.recomputing > step.on_host.blocks
