"""The options of a run as they are stored: in its folder, in checkpoints, with its result."""

from collections.abc import Mapping
from typing import Any

import yaml

from fsdp_qlora.config.marks import MAY_DIFFER
from fsdp_qlora.config.options import DEFAULTS, TrainConfig, names_marked
from fsdp_qlora.redact import redact_values


def resolved_options(config: TrainConfig) -> dict[str, Any]:
    """All options of the run, with the learning rate that is used; a dry run's are those of the run it plans.

    For files, logs and other machines: secrets are taken out.
    """
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
    return redact_values(options | {"lr": config.learning_rate, "dry_run": False})


def resolved_yaml(config: TrainConfig) -> str:
    """`resolved_options` as YAML that `--config` accepts for the same run."""
    return yaml.safe_dump(resolved_options(config), sort_keys=False, allow_unicode=True)


def identity_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of stored options those that make a run this run, none of which is a path; and of these the changed ones."""
    may_differ, defaults = names_marked(MAY_DIFFER), resolved_options(DEFAULTS)
    settings = {name: value for name, value in options.items() if name in defaults and name not in may_differ}
    changed = {name: value for name, value in settings.items() if value != defaults[name] or name == "train_type"}
    return settings, changed
