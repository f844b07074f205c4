"""The adapter's configuration in PEFT's format, so that PEFT loads each weight into the layer it was trained in."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

from peft import LoraConfig, TaskType
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import PretrainedConfig

from fsdp_qlora.adapters.first_values import reduces_base
from fsdp_qlora.adapters.insert import LoraOptions
from fsdp_qlora.errors import UserError


def _is_renamed(leaf: str, config: PretrainedConfig) -> bool:
    """Whether PEFT takes this linear layer's name for experts that had that name in earlier versions."""
    renamed = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(renamed, SimpleNamespace(config=config), None)
    except ValueError:  # it wants gate_proj and up_proj together
        return True
    return renamed.target_modules != {leaf}


def reached_by_weight(targets: Sequence[str], config: PretrainedConfig) -> list[str]:
    """The layers that PEFT must be given as parameters, because it takes their names for other modules.

    These are shared experts next to routed ones: PEFT takes names like up_proj for the routed experts. Given the
    shared expert's weight as a parameter, it does the same computation under the same names in the file.
    """
    renamed = {leaf for leaf in {path.rsplit(".", 1)[-1] for path in targets} if _is_renamed(leaf, config)}
    return [path for path in targets if path.rsplit(".", 1)[-1] in renamed]


def check_fits_peft(kind: str, targets: Sequence[str], options: LoraOptions, config: PretrainedConfig) -> None:
    """Refuse DoRA and patterns with layers that PEFT must be given as parameters: there it supports plain LoRA only."""
    by_weight = [*reached_by_weight(targets, config), *options.target_parameters]
    patterns = options.rank_pattern or options.alpha_pattern
    if by_weight and (kind != "lora" or patterns):
        what = "rank_pattern and alpha_pattern" if kind == "lora" else f"an adapter of kind {kind}"
        raise UserError(
            f"{by_weight[0]}: in a model of this type PEFT takes this name for experts, on which it supports plain "
            f"LoRA only, not {what}. Name other layers in --lora_target_modules, or use plain LoRA."
        )


def _as_int(alpha: float) -> int:
    """A whole number as one, which is what PEFT's type says and other readers want."""
    return int(alpha) if alpha == int(alpha) else alpha  # type: ignore[return-value]


def peft_config(
    linears: Sequence[str],
    targets: Sequence[str],
    parameters: Sequence[str],
    kind: str,
    options: LoraOptions,
    *,
    base_model: str,
    model_config: PretrainedConfig,
) -> LoraConfig:
    """The PEFT configuration of the adapter that `first_values.saved_parameters` yields.

    Args:
        linears: paths of all linear layers of the blocks. targets: those with an adapter.
        parameters: paths of the 3-D parameters with an adapter.
    """
    by_weight = reached_by_weight(targets, model_config)
    targets = [path for path in targets if path not in by_weight]
    target_parameters = [*(f"{path}.weight" for path in by_weight), *parameters]
    leaves = {path.rsplit(".", 1)[-1] for path in targets}
    named = [path for path in linears if path.rsplit(".", 1)[-1] in leaves]
    # Twice the rank, with the same scaling factor.
    rank_ratio, alpha_ratio = (2, math.sqrt(2) if options.use_rslora else 2) if reduces_base(options.init) else (1, 1)
    return LoraConfig(
        r=rank_ratio * options.rank,
        lora_alpha=_as_int(alpha_ratio * options.alpha),
        # Only training uses dropout, and PEFT refuses it together with target_parameters.
        lora_dropout=0.0 if target_parameters else options.dropout,
        target_modules=sorted(leaves) if len(named) == len(targets) else list(targets),
        target_parameters=target_parameters or None,
        use_dora=kind == "dora",
        use_rslora=options.use_rslora,
        rank_pattern={name: rank_ratio * rank for name, rank in options.rank_pattern.items()},
        alpha_pattern={name: _as_int(alpha_ratio * alpha) for name, alpha in options.alpha_pattern.items()},
        modules_to_save=list(options.modules_to_save) or None,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
