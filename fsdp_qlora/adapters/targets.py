"""Selects the layers and parameters that get an adapter, by names, regular expressions and patterns as in PEFT."""

import re
from collections.abc import Iterable, Sequence

from fsdp_qlora.errors import UserError

ALL = ("all", "all-linear")  # PEFT says all-linear


def is_regex(name: str) -> bool:
    """Whether a target is a regular expression: layer names consist of word characters and dots."""
    return name not in ALL and re.fullmatch(r"[\w.]+", name) is None


def select_targets(linears: Sequence[str], requested: Sequence[str], model_type: str) -> list[str]:
    """Select the linear layers that get an adapter, named as in PEFT. Raises UserError if a name matches none.

    Args:
        linears: paths of the linear layers of the decoder blocks.
        requested: "all", "default" (PEFT's choice for the model type), one regular expression for whole paths, or
            names: the last components of layers' paths.
    """
    # Imported here: the options import this module, and PEFT takes seconds to load.
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    leaves = sorted({path.rsplit(".", 1)[-1] for path in linears})
    if len(requested) == 1 and requested[0] in ALL:
        return list(linears)
    if list(requested) == ["default"]:
        if model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            raise UserError(
                f"lora_target_modules default: PEFT has no default for model type {model_type!r}. "
                f"Use all, or name some of: {', '.join(leaves)}."
            )
        requested = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model_type]
    if len(requested) == 1 and is_regex(requested[0]):
        chosen = [path for path in linears if re.fullmatch(requested[0], path)]
        if not chosen:
            raise UserError(
                f"lora_target_modules: the regular expression {requested[0]} matches no linear layer of the decoder "
                f"blocks. It must match a whole path, such as {linears[0]}."
            )
        return chosen
    what = "lora_target_modules: no linear layer"
    return _select_named(linears, requested, what, f"{', '.join(leaves)} (or all)")


def select_parameters(parameters: Sequence[str], requested: Sequence[str]) -> list[str]:
    """The 3-D expert parameters that get an adapter, named by their last path components as in PEFT."""
    known = sorted({".".join(path.rsplit(".", 3)[1:]) for path in parameters})
    return _select_named(
        parameters, requested, "lora_target_parameters: no expert parameter", ", ".join(known) or "none"
    )


def _select_named(paths: Sequence[str], names: Sequence[str], what: str, known: str) -> list[str]:
    """The paths that end in one of these names. Raises UserError, which begins with `what`, for a name of none."""
    chosen = {name: {path for path in paths if f".{path}".endswith(f".{name}")} for name in names}
    if unmatched := [name for name in names if not chosen[name]]:
        raise UserError(f"{what} of the decoder blocks is named {', '.join(unmatched)}. This model's are: {known}.")
    found = set().union(*chosen.values())
    return [path for path in paths if path in found]


def find_pattern(patterns: Iterable[str], path: str) -> str | None:
    """The first of `patterns`, regular expressions for the end of a path as in PEFT's rank_pattern, that matches."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)


def check_patterns(option: str, patterns: Iterable[str], targets: Sequence[str]) -> None:
    """Refuse patterns that are not the first match of any layer with an adapter."""
    patterns = list(patterns)
    if unused := set(patterns) - {find_pattern(patterns, path) for path in targets}:
        leaves = sorted({path.rsplit(".", 1)[-1] for path in targets})
        raise UserError(
            f"{option}: {', '.join(sorted(unused))} has no effect: it matches no layer with an adapter, or only layers "
            f"that an earlier pattern matches. Layers with an adapter: {', '.join(leaves)}; a pattern is a regular "
            "expression for the end of a path."
        )
