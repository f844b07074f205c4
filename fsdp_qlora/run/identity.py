"""What makes a run this run: its options, model, rows and the adapter it starts from, the same on all ranks."""

from pathlib import Path
from typing import Any

from fsdp_qlora.adapters.peft_folder import PretrainedAdapter, read_adapter
from fsdp_qlora.checkpointing.result import result_error
from fsdp_qlora.checkpointing.run_folder import StartRequest
from fsdp_qlora.config.marks import MAY_DIFFER, PER_NODE
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.control import restarts
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import Weights
from fsdp_qlora.output.environment import versions
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.ranks.process_group import check_agreement, raise_on_all_ranks
from fsdp_qlora.ranks.ranks import Ranks, derive_seed
from fsdp_qlora.storage.files import fingerprint_files, record_of


def start_request(config: TrainConfig, ranks: Ranks) -> StartRequest:
    """What this start was asked to do with the run's folder."""
    return StartRequest(
        options=resolved_options(config),
        may_differ=names_marked(MAY_DIFFER),
        world_size=ranks.world_size,
        resume=config.resume,
        overwrite=config.overwrite_output_dir,
        is_unattended=restarts.is_unattended(),
    )


def known_facts(plan: Plan) -> dict[str, Any]:
    """What of the run is compared by content, as far as it is known without the weights: see FACTS of run_folder."""
    model_config = {**plan.model.config.to_dict(), "_name_or_path": None}
    return {
        "model": f"{derive_seed(model_config):x}",
        "rows": plan.data.identity,
        "precision": plan.model.precision_name,
    }


def agree(config: TrainConfig, ranks: Ranks, plan: Plan, weights: Weights) -> dict[str, Any]:
    """Check that all ranks have the same options, rows and model; returns the run's identity.

    Raises:
        UserError: they differ; the same on every rank.
    """
    options, per_node, facts = resolved_options(config), names_marked(PER_NODE), known_facts(plan)
    base = fingerprint_files(weights.files.files.values()) if ranks.is_rank_0 else None
    parent, digest = agree_on_parent(config, ranks, base)
    check_agreement(
        {
            "the options": {name: value for name, value in options.items() if name not in per_node},
            "the rows": facts["rows"],
            "the prompts of --sample_prompts": plan.questions,
            "the model": (facts["model"], sorted(weights.sources)),
        },
        ranks.device,
    )
    return {
        "options": options,
        "facts": {"base": base, **facts, "adapter": digest},
        **({"parent": parent} if parent else {}),
        "world_size": ranks.world_size,
        "global_batch_size": plan.schedule.global_batch_size,
        "versions": versions(),
        **plan.data.provenance,
    }


def agree_on_parent(config: TrainConfig, ranks: Ranks, base: str | None) -> tuple[dict[str, Any], str | None]:
    """Whom the run descends from by --adapter, empty without, and a hash of it, which rank 0 has checked.

    Args:
        base: fingerprint of the base's weights, on rank 0.
    Raises:
        UserError: the adapter has changed since it was saved, or belongs to other weights; the same on every rank.
    """
    if config.adapter is None:
        return {}, None
    adapter = read_adapter(Path(config.adapter).expanduser())
    with raise_on_all_ranks(UserError, ranks.device):
        digest = _check_parent(config, adapter, base) if ranks.is_rank_0 else None
    return adapter.lineage(), digest


def _check_parent(config: TrainConfig, adapter: PretrainedAdapter, base: str | None) -> str:
    """The hash of an adapter's weights. Raises UserError if it has changed, or belongs to other weights."""
    try:
        digest = record_of(adapter.weights).sha256
        failure = result_error(adapter.folder, [adapter.weights.name])
    except OSError as error:
        failure = f"it cannot be read ({error})"
    trained_on = adapter.record.get("base", {}).get("weights")
    if failure is None and config.base_name is None and trained_on not in (None, base):
        failure = (
            f"it was trained on other weights than those of --model_name {config.model_name}. If they are the same in "
            "other bits or files, say so by naming them: --base_name OWNER/NAME"
        )
    if failure:
        raise UserError(f"--adapter {config.adapter} cannot be used: {failure}.")
    return digest
