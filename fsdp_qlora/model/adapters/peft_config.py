"""PEFT's configuration of an adapter.

PEFT must load each weight into the layer that it was trained in.
"""

from collections.abc import Sequence
from types import SimpleNamespace

from peft import LoraConfig, TaskType
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PretrainedConfig

from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.utils.errors import UserError


def _is_renamed(leaf: str, config: PretrainedConfig) -> bool:
    """Whether PEFT maps this linear layer's name to experts, which had it in earlier versions."""
    renamed = LoraConfig(target_modules=[leaf])
    try:
        # PEFT calls this when it adds an adapter to a model. It changes the configuration in
        # place, and of the model reads the configuration alone.
        convert_peft_config_for_transformers(renamed, SimpleNamespace(config=config), None)
    except ValueError:  # PEFT requires gate_proj and up_proj together
        return True
    return renamed.target_modules != {leaf}


def reached_by_weight(targets: Sequence[str], config: PretrainedConfig) -> list[str]:
    """The layers that PEFT must get as target_parameters.

    They are shared experts next to routed ones: PEFT maps names like up_proj to the routed experts.
    With the shared expert's weight as a parameter, it does the same computation under the same
    names in the file.
    """
    renamed = {
        leaf for leaf in {path.rsplit(".", 1)[-1] for path in targets} if _is_renamed(leaf, config)
    }
    return [path for path in targets if path.rsplit(".", 1)[-1] in renamed]


def check_fits_peft(
    kind: str, targets: Sequence[str], options: LoraOptions, config: PretrainedConfig
) -> None:
    """Refuse DoRA and patterns for target_parameters, for which PEFT supports plain LoRA only."""
    by_weight = [*reached_by_weight(targets, config), *options.target_parameters]
    if by_weight and (kind != "lora" or options.rank_pattern or options.alpha_pattern):
        feature = f"an adapter of kind {kind}"
        if kind == "lora":
            feature = "rank_pattern and alpha_pattern"
        raise UserError(
            f"{by_weight[0]}: in a model of this type PEFT takes this name for experts, on which "
            f"it supports plain LoRA only, not {feature}. Name other layers in "
            "--lora_target_modules, or use plain LoRA."
        )


def _as_int(alpha: float) -> int:
    """An integer if alpha is one, as PEFT declares and other programs expect."""
    return int(alpha) if alpha == int(alpha) else alpha  # type: ignore[return-value]


def peft_config(
    modules: Sequence[str],
    targets: Sequence[str],
    parameters: Sequence[str],
    kind: str,
    options: LoraOptions,
    *,
    base_model: str,
    model_config: PretrainedConfig,
) -> LoraConfig:
    """The PEFT configuration of the adapter that `values.saved_parameters` yields.

    Args:
        modules: paths of all modules.
        targets: paths of layers with an adapter.
        parameters: paths of the 3-D parameters with an adapter.
    """
    by_weight = reached_by_weight(targets, model_config)
    targets = [path for path in targets if path not in by_weight]
    target_parameters = [f"{path}.weight" for path in by_weight]
    target_parameters.extend(parameters)
    # PEFT takes a name for every module that ends in it, and fails at one that it cannot adapt. So
    # short names only where they reach the targets and nothing else; whole paths otherwise.
    leaves = {path.rsplit(".", 1)[-1] for path in targets}
    named = [path for path in modules if path.rsplit(".", 1)[-1] in leaves]
    return LoraConfig(
        r=options.rank,
        lora_alpha=_as_int(options.alpha),
        # PEFT refuses dropout together with target_parameters, and only training uses it.
        lora_dropout=0.0 if target_parameters else options.dropout,
        target_modules=sorted(leaves) if len(named) == len(targets) else list(targets),
        target_parameters=target_parameters or None,
        use_dora=kind == "dora",
        use_rslora=options.use_rslora,
        rank_pattern=dict(options.rank_pattern),
        alpha_pattern={name: _as_int(alpha) for name, alpha in options.alpha_pattern.items()},
        modules_to_save=list(options.modules_to_save) or None,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
