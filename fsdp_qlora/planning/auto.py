"""The settings of `--auto`: those that are fastest by the plan, or those that an interrupted run has."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_qlora.checkpointing.run_folder import read_run
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import value_text
from fsdp_qlora.errors import UserError
from fsdp_qlora.output.text import GIB
from fsdp_qlora.planning.checks import host_memory_free
from fsdp_qlora.planning.gpus import gpu_of, nearest_gpu
from fsdp_qlora.planning.outlook import GpuOffer, Planner, Rows
from fsdp_qlora.planning.plan import ModelPlan, least_free
from fsdp_qlora.ranks.store import all_gather_via_store

log = logging.getLogger("fsdp_qlora")

# What is chosen: always, with the rows per step as they are; and where it is auto.
_ALWAYS = ("batch_size", "gradient_accumulation_steps", "use_activation_cpu_offload")
_CHOSEN = (*_ALWAYS, "sharding_strategy", "use_cpu_offload")


def choose_settings(
    config: TrainConfig, model: ModelPlan, rows: Callable[[TrainConfig, int], Rows], store: dist.Store | None
) -> dict[str, Any]:
    """The options that --auto replaces, the same on all ranks: rank 0 searches, for the GPU with the least free memory.

    How many blocks recompute is left to probing, which corrects the plan.

    Args:
        rows: of the run with some options on so many ranks.
    Raises:
        UserError: there is no GPU.
    """
    machine, ranks = model.machine, model.machine.ranks
    free = least_free(machine, "the memory for --auto", store)
    if free is None:
        raise UserError(
            "--auto true chooses settings for the GPUs of this machine, and none is visible: leave it out, or plan for "
            "others with `fsdp-qlora plan --auto --gpu NAME`."
        )
    chosen: dict[str, Any] = {}
    if ranks.is_rank_0 and not (chosen := settings_of_run(config, machine.world_size)):
        per_node = ranks.layout("full_shard", machine.world_size).per_node
        host = host_memory_free(per_node) * machine.world_size
        card = torch.cuda.get_device_properties(ranks.device) if ranks.device.type == "cuda" else None
        gpu = gpu_of(card) if card else nearest_gpu(free / GIB)
        gpu = gpu._replace(usable=1.0)  # what is free is what CUDA gives
        request = GpuOffer(gpu, machine.world_size, host / GIB, per_node=per_node)
        memory_gib = (free + sum(request.beside_torch().values())) / GIB
        request = request._replace(gpu=gpu._replace(memory_gib=memory_gib))
        best = Planner(config, request, model, rows).fastest()[0]
        chosen = {name: getattr(best.config, name) for name in _CHOSEN}
    if store is not None:
        chosen = json.loads(all_gather_via_store(json.dumps(chosen), "the settings of --auto", ranks, store)[0])
    log.info("Settings of --auto: %s.", ", ".join(f"{name} {value_text(value)}" for name, value in chosen.items()))
    return chosen


def settings_of_run(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The settings of the run in output_dir that --auto chose for as many ranks; none if there is no such run."""
    folder = Path(config.output_dir).expanduser()
    run = {} if config.resume != "auto" or config.overwrite_output_dir else read_run(folder)
    then = run.get("options", {})
    if not then.get("auto") or run["world_size"] != world_size:
        return {}
    return {name: then[name] for name in _CHOSEN if name in _ALWAYS or getattr(config, name) == "auto"}
