"""Chooses the settings of a run for the GPUs that it runs on, where --auto leaves them open."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import value_text
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.planning.fit_host import link_or_zero
from fsdp_qlora.planning.gpus import gpu_of, nearest_gpu
from fsdp_qlora.planning.placement import least_free
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.planning.search import GpuSet, PlannedRun, Planner
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.machine import host_memory_free
from fsdp_qlora.utils.text import GIB

log = logging.getLogger("fsdp_qlora")

# Options that --auto chooses: always, with the rows per step as they are; and where it is auto.
_ALWAYS = ("batch_size", "gradient_accumulation_steps")
_CHOSEN = (*_ALWAYS, "sharding_strategy", "use_cpu_offload")
# chosen where the first is auto
_OF_CONTEXT = ("context_parallel_size", "gradient_accumulation_steps")


def choose_settings(
    config: TrainConfig,
    model: ModelPlan,
    data: RunData | None,
    store: dist.Store | None,
    earlier: Mapping[str, Any],
) -> dict[str, Any]:
    """The options that --auto or --context_parallel_size auto replaces, the same on all ranks.

    Rank 0 searches, for the GPU with the least free memory. How many blocks recompute is left to
    probing, which corrects the plan.

    Args:
        earlier: options of the run that continues, if --auto has chosen some of them.
    Raises:
        UserError: --auto is given and there is no GPU.
    """
    machine = model.machine
    ranks = model.machine.ranks
    names: tuple[str, ...] = _CHOSEN if config.auto else ()
    if config.context_parallel_size == "auto":
        names = tuple(dict.fromkeys(names + _OF_CONTEXT))
    free = least_free(machine, "the memory for --auto", store)
    if free is None and not config.auto:
        log.info("context_parallel_size: auto is 1, because no GPU's memory is known.")
        return {"context_parallel_size": 1}
    if free is None:
        raise UserError(
            "--auto true chooses settings for the GPUs of this machine, and none is visible: leave "
            "it out, or plan for others with `fsdp-qlora plan --auto --gpu NAME`."
        )
    chosen = _chosen_before(config, earlier)
    if ranks.is_rank_0 and not chosen:
        chosen = _search_settings(config, model, data, names, free)
    # Free host memory differs from rank to rank and from moment to moment, so each rank's own
    # search might end elsewhere. The store is used since no process group is open yet.
    if store is not None:
        from_ranks = all_gather_via_store(
            json.dumps(chosen), "the settings of --auto", ranks, store
        )
        chosen = json.loads(from_ranks[0])
    option = "--auto" if config.auto else "--context_parallel_size auto"
    settings = ", ".join(f"{name} {value_text(value)}" for name, value in chosen.items())
    log.info("Settings of %s: %s.", option, settings)
    return chosen


def _search_settings(
    config: TrainConfig, model: ModelPlan, data: RunData | None, names: tuple[str, ...], free: int
) -> dict[str, Any]:
    """Search the settings for this machine's GPUs.

    Args:
        names: options to choose.
        free: bytes free on the GPU that has least.
    """
    machine = model.machine
    device = machine.ranks.device
    can_pin = True
    host = host_memory_free(machine.per_node) * machine.world_size
    if device.type == "cuda":
        gpu = gpu_of(torch.cuda.get_device_properties(device))
        can_pin = not gpu.shared
        if can_pin and config.auto and config.recompute == "auto":
            # Slots differ, and by a slow one the trial at the start keeps nothing on the host.
            link = link_or_zero(device)
            release_cached_memory(device)
            can_pin = link > 0
            gpu = gpu._replace(to_host=link / 1e9 if can_pin else None)
    else:  # GPUs that are not here
        gpu = nearest_gpu(free / GIB)
    gpu = gpu._replace(usable=1.0)  # what is free is what CUDA gives
    gpus = GpuSet(gpu, machine.world_size, host / GIB, per_node=machine.per_node)
    # A planned run subtracts what torch does not get. `free` does not contain it, so it is added.
    memory_gib = (free + sum(gpus.beside_torch().values())) / GIB
    gpus = gpus._replace(gpu=gpu._replace(memory_gib=memory_gib))
    planner = Planner(config, gpus, model, data)
    planner.may_move_activations = can_pin
    best = _fastest_to_try(planner) if config.auto else planner.as_asked()
    chosen = {name: getattr(best.config, name) for name in names}
    if config.auto and _needs_host_memory(planner, best):
        chosen["recompute"] = best.config.recompute
    elif best.moves_activations and config.recompute == "auto":
        log.info(
            "Recompute: planned with activations in host memory, for %s tokens/s. A trial at the "
            "start decides.",
            f"{best.tokens_per_second:,.0f}",
        )
    return chosen


def _fastest_to_try(planner: Planner) -> PlannedRun:
    """The fastest run; with activations in host memory only if a trial can decide about that.

    One that a trial cannot come to is the last choice.
    """
    runs = planner.fastest()
    for run in runs:
        if run.fits_with_margin and not _needs_host_memory(planner, run):
            return run
    return runs[0]


def _needs_host_memory(planner: Planner, run: PlannedRun) -> bool:
    """Whether a run does not fit without its activations or inputs of blocks in host memory."""
    # Trials begin with all blocks recomputing, and never move their inputs.
    if run.config.recompute == "offload":
        return True
    if not run.moves_activations or planner.config.recompute == "host":
        return False
    same = {name: getattr(run.config, name) for name in (*_CHOSEN, *_OF_CONTEXT)}
    return not planner.planned(**same, recompute="all").fits_with_margin


def _chosen_before(config: TrainConfig, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that --auto chose when the run was started, where the options leave them open.

    Without them, each restart could choose others, as another program takes or frees memory.
    """
    if not earlier:
        return {}
    names = list(dict.fromkeys((*_CHOSEN, *_OF_CONTEXT)))
    # Other values are found by probing, anew at each start.
    if earlier["recompute"] in ("offload", "host"):
        names.append("recompute")
    is_open = {name for name in names if name in _ALWAYS or getattr(config, name) == "auto"}
    return {name: earlier[name] for name in names if name in is_open}
