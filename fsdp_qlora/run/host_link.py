"""Says where the host's link makes activations in host memory slower than recomputing them."""

import dataclasses
import logging

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.planning.activations import ON_DEVICE
from fsdp_qlora.planning.estimate import estimate_memory
from fsdp_qlora.planning.fit_host import measure_link
from fsdp_qlora.planning.gpus import gpu_of
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.facts import planned_speed

log = logging.getLogger("fsdp_qlora")


def describe_link(config: TrainConfig, plan: Plan, device: torch.device) -> None:
    """Log one line: how fast activations in host memory are planned to be by this GPU's link.

    Called on every rank at once, since ranks share the host's memory.
    """
    link = measure_link(device) / 1e9
    gpu = gpu_of(torch.cuda.get_device_properties(device))._replace(to_host=link)
    placed = plan.placed
    ratio = planned_speed(config, plan, placed, gpu) / planned_speed(
        config, plan, _recomputing(placed), gpu
    )
    line = (
        f"Activations in host memory: by a link of {link:.1f} GB/s, each way, steps are planned "
        f"to be {ratio:.2f} times as fast as with --recompute all"
    )
    if ratio < 1:
        log.warning("%s: the link is too slow.", line)
    else:
        log.info("%s.", line)


def _recomputing(placed: PlacedModel) -> PlacedModel:
    """The same with all blocks recomputing."""
    step = dataclasses.replace(placed.step, recomputing=len(placed.blocks), on_host=ON_DEVICE)
    memory = estimate_memory(placed.model.meta.parts, placed.blocks, step)
    return dataclasses.replace(placed, step=step, memory=memory)
