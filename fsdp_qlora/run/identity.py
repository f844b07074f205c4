"""Makes a run the one it is: its options, its model, its rows and the adapter it starts from."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import StartRequest
from fsdp_qlora.config.marks import MAY_DIFFER, PER_NODE, REPLACE
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.distributed.process_group import check_agreement, raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks, derive_seed, derive_seed_of_list
from fsdp_qlora.distributed.supervision import restarts
from fsdp_qlora.model.adapters.peft_folder import PretrainedAdapter, read_adapter
from fsdp_qlora.planning.run_plan import HeldOutPlan, Plan
from fsdp_qlora.run.prepare import PreparedRun
from fsdp_qlora.sharding.loading.weight_files import Weights
from fsdp_qlora.training.generation.samples import SamplePrompts
from fsdp_qlora.utils.environment import versions
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import fingerprint_files, record_of
from fsdp_qlora.utils.result_files import result_error


def claim_folder(config: TrainConfig, ranks: Ranks) -> AbstractContextManager[RunFolder]:
    """Lock the folder of a run, as `RunFolder.claimed` does, for these options."""
    request = StartRequest(
        options=resolved_options(config),
        may_differ=names_marked(MAY_DIFFER),
        world_size=ranks.world_size,
        resume=config.start_from,
        overwrite=config.resume.endswith(REPLACE),
        is_unattended=restarts.is_unattended(),
    )
    mirror = open_store(config.mirror) if config.mirror else None
    return RunFolder(Path(config.output_dir), ranks, request, mirror).claimed()


def known_facts(plan: Plan) -> dict[str, Any]:
    """Hash what is compared by content and known without the weights: see FACTS of run_folder."""
    model_config = plan.model.config.to_dict() | {"_name_or_path": None}
    return {
        "model": f"{derive_seed(model_config):x}",
        "rows": plan.data.identity,
        "precision": plan.model.precision.name,
    }


def agree(run: PreparedRun, ranks: Ranks, weights: Weights) -> dict[str, Any]:
    """Check that all ranks have the same options, rows and model; returns the run's identity.

    Raises:
        UserError: they differ; the same on every rank.
    """
    config = run.config
    plan = run.plan
    options = resolved_options(config)
    per_node = names_marked(PER_NODE)
    facts = known_facts(plan)
    # Hashing the files takes a while; rank 0 compares, and the checkpoint names its hash.
    base = fingerprint_files(weights.files.files.values()) if ranks.is_rank_0 else None
    parent, digest = agree_on_parent(config, ranks, base)
    # Ranks that were started with other options would train different models without a word, or
    # wait for each other forever.
    check_agreement(
        {
            "the options": {name: value for name, value in options.items() if name not in per_node},
            "the rows": facts["rows"],
            "the prompts of --sample_prompts": _contents_of(run.setup.samples),
            "the held-out prompts": _content_of(plan.held_out),
            "the model": (facts["model"], sorted(weights.sources)),
        },
        ranks.device,
    )
    identity: dict[str, Any] = {
        "options": options,
        "facts": {"base": base} | facts | {"adapter": digest},
    }
    if parent:
        identity["parent"] = parent
    if plan.model.packed:
        identity["base_format"] = plan.model.packed.name
    identity |= {
        "world_size": ranks.world_size,
        "global_batch_size": plan.schedule.global_batch_size,
        "versions": versions(),
        "rewards": run.setup.scored_by,
        "eval_rewards": run.setup.eval_scored_by,
    }
    return identity | plan.data.provenance


def _content_of(held_out: HeldOutPlan | None) -> int:
    """A hash of held-out prompts and of what reward functions get beside them."""
    sets = held_out.prompts if held_out else {}
    return derive_seed_of_list(
        (name, prompt.ids, prompt.for_rewards, *prompt.images.hex_names)
        for name, prompts in sets.items()
        for prompt in prompts
    )


def _contents_of(samples: SamplePrompts | None) -> list[tuple[list[int], list[bytes]]]:
    """The tokens and the images of samples' prompts."""
    if samples is None:
        return []
    return [(prompt.ids, [*map(bytes, prompt.images.names)]) for prompt in samples.encoded]


def agree_on_parent(
    config: TrainConfig, ranks: Ranks, base: str | None
) -> tuple[dict[str, Any], str | None]:
    """The parent adapter's lineage and, on rank 0, its hash; empty without --adapter.

    Args:
        base: fingerprint of the base's weights, on rank 0.
    Raises:
        UserError: the adapter has changed since it was saved, or belongs to other weights; the same
        on every rank.
    """
    if config.adapter is None:
        return {}, None
    adapter = read_adapter(Path(config.adapter).expanduser())
    with raise_on_all_ranks(UserError, ranks.device):
        digest = _check_parent(config, adapter, base) if ranks.is_rank_0 else None
    return adapter.lineage(), digest


def _check_parent(config: TrainConfig, adapter: PretrainedAdapter, base: str | None) -> str:
    """The hash of an adapter's weights.

    Raises UserError if it has changed, or belongs to other weights.
    """
    try:
        digest = record_of(adapter.weights).sha256
        failure = result_error(adapter.folder, [adapter.weights.name])
    except OSError as error:
        failure = f"it cannot be read ({error})"
    # --base_name says that other files are the same weights, such as a copy in other bits.
    trained_on = adapter.record.get("base", {}).get("weights")
    if failure is None and config.base_name is None and trained_on not in (None, base):
        failure = (
            f"it was trained on other weights than --model_name {config.model_name} has. If they "
            "are the same weights in another format, name the base: --base_name OWNER/NAME"
        )
    if failure:
        raise UserError(f"--adapter {config.adapter} cannot be used: {failure}.")
    return digest
