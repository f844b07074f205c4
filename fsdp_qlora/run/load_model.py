"""Loads the model of a run, from its plan to verified shards."""

import logging
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.distributed.store import once_per_machine
from fsdp_qlora.export.card import BaseName
from fsdp_qlora.export.save_results import ResultForm
from fsdp_qlora.model.adapters.first_values import (
    adapted_weights,
    initialize_adapters,
    set_magnitudes,
)
from fsdp_qlora.model.adapters.insert import fill_start
from fsdp_qlora.model.adapters.merge_aware import MergeAwareLinear, round_as_stored
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.model.adapters.token_rows import start_token_rows, with_token_rows
from fsdp_qlora.model.architecture.fused import describe_fused
from fsdp_qlora.model.architecture.rotary_binding import describe_rotary
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.sharding.loading.first_adapters import decompose_weights, fill_from
from fsdp_qlora.sharding.loading.load_weights import (
    describe_left_out,
    load_weights,
    match_tensors,
    quantized_layers,
)
from fsdp_qlora.sharding.loading.quant_cache import cache_root, load_or_create
from fsdp_qlora.sharding.loading.weight_files import BUFFER, WeightFiles, Weights
from fsdp_qlora.sharding.parallelize import materialize, shard_model
from fsdp_qlora.sharding.recompute import (
    set_keeps_attention,
    set_recompute,
    wrap_blocks,
    wrap_towers,
)
from fsdp_qlora.sharding.verify import check_byte_account, check_one_layer
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.files import bytes_of_variable

log = logging.getLogger("fsdp_qlora")


def fetch_weights(config: TrainConfig, plan: ModelPlan, ranks: Ranks, store: dist.Store) -> Weights:
    """Download the model's missing files, and match them with its weights.

    Called on every rank.
    """
    hub.fetch_weights(config.model_name, plan.folder, partial(once_per_machine, ranks, store))
    return open_weights(plan)


def warn_left_out(config: TrainConfig, plan: ModelPlan, weights: Weights) -> None:
    """Log which tensors of the model's files are not used.

    A result of all weights will lack them.
    """
    in_result = "The result will lack them." if config.kind.trains == "all" else ""
    line = describe_left_out(weights, plan.meta.model, in_result=in_result)
    if line:
        log.warning("%s", line)


def open_weights(plan: ModelPlan) -> Weights:
    """Open the model's files and match them with its weights."""
    # Rows of new tokens are in no file: such a weight has more rows than its tensor.
    files = WeightFiles(plan.folder, plan.stored, packed=plan.packed)
    grown = [f"{path}.weight" for path in with_token_rows(plan.meta.model)]
    model = plan.meta.model
    weights = match_tensors(model, files, packed=plan.packed is not None, grown=grown)
    for name, layer in adapted_weights(model).items():
        if isinstance(layer, MergeAwareLinear) and isinstance(layer.base_layer, nn.Linear):
            round_as_stored(layer, name, files.dtype(weights.sources[name]))
    return weights


def load_model(
    config: TrainConfig, placed: PlacedModel, weights: Weights, ranks: Ranks
) -> DeviceMesh:
    """Turn the planned model into verified shards, in place. Called on every rank.

    Raises:
        UserError: the weights cannot be used.
        RuntimeError: the proof fails: the shards are not one copy of the model, or a layer differs
            from the same layer computed unsharded.
    """
    plan = placed.model
    # On the meta device, already quantized and adapted: model/build_model.py.
    model = plan.meta.model
    # Every block gets a wrapper before it is sharded, as others may be chosen between steps.
    step = placed.step
    wrap_blocks(model, num_blocks=step.recomputing, offload=step.on_host.inputs)
    set_recompute(model, step.recomputing, on_host=step.on_host.blocks)
    set_keeps_attention(model, step.on_host.attention)
    if step.recomputing or step.on_host.blocks:
        wrap_towers(model)
    parts = plan.meta.parts
    strategy = placed.placement.sharding_strategy
    on_host = parts.on_host(placed.placement.offload)
    mesh = build_mesh(ranks, sharding_strategy=strategy)
    shard_model(parts, mesh, sharding_strategy=strategy, precision=plan.precision, on_host=on_host)
    log.debug("%s", model)
    log.debug("Blocks: %s.", describe_fused(model))
    log.debug("Rotary embeddings: %s.", describe_rotary(model))
    materialize(parts, ranks.device, on_host=on_host)
    fill(config, plan, weights, mesh, ranks)
    log.info("Proof: %s; %s", check_byte_account(model, mesh), check_one_layer(parts, weights))
    return mesh


def fill(
    config: TrainConfig, plan: ModelPlan, weights: Weights, mesh: DeviceMesh, ranks: Ranks
) -> None:
    """Fill the shards: the base from files or the cache, the adapter with initial values."""
    model = plan.meta.model
    pretrained = read_adapter(Path(config.adapter).expanduser()) if config.adapter else None
    initialize_adapters(model, mesh, seed=config.seed)
    if config.init_lora_weights == "loftq":
        decompose_weights(model, weights, mesh, ranks.device)
    load = partial(
        load_weights,
        model,
        mesh=mesh,
        device=ranks.device,
        max_bytes_in_flight=bytes_of_variable(BUFFER),
        show_progress=ranks.is_rank_0,
    )
    # Packed files hold the codes themselves: there is nothing to keep.
    layers = {} if plan.packed else quantized_layers(model)
    root = cache_root(config.quant_cache)
    if root and layers:
        load_or_create(root, layers, weights, load, ranks, mesh)
    else:
        load(weights=weights)
    # DoRA's magnitudes are norms of the loaded base, so they come after it.
    set_magnitudes(model, mesh)
    start_token_rows(model, mesh)
    if pretrained:
        fill_from(model, pretrained, mesh, ranks.device)
    fill_start(model)


def result_form(config: TrainConfig, plan: ModelPlan, weights: Weights | None = None) -> ResultForm:
    base = BaseName.of(config.model_name, config.base_name)
    # No files match a model that is sharded already.
    return ResultForm(
        plan,
        base,
        config.kind,
        plan.adapter,
        open_base=lambda: weights or open_weights(plan),
        is_merge_aware=config.merge_aware,
    )
