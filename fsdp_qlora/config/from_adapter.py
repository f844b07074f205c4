"""--adapter: the options that the adapter decides."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fsdp_qlora.adapters.peft_folder import read_adapter
from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.errors import UserError

# They may name the same layers in another way, which is checked when the model is known.
_NAMES_LAYERS = ("lora_target_modules", "lora_target_parameters", "modules_to_save")


def take_adapter(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """The options with those that the adapter decides; without --adapter as they are.

    Args:
        given: the options that were given.
    Raises:
        UserError: there is no usable adapter, or a given option contradicts it.
    """
    if config.adapter is None:
        return config
    if config.adapter.lower() in TRAIN_TYPES and not Path(config.adapter).exists():  # axolotl's name for it
        raise UserError(f"--adapter is a folder to start from; did you mean --train_type {config.adapter.lower()}?")
    folder, output = Path(config.adapter).expanduser(), Path(config.output_dir).expanduser()
    if output.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(
            f"--adapter {config.adapter} is in output_dir, where the new adapter goes. Give another folder."
        )
    adapter, kind = read_adapter(folder), config.kind.adapter
    if kind is not None and kind != adapter.kind:
        takers = ", ".join(name for name, other in TRAIN_TYPES.items() if other.adapter == adapter.kind)
        raise UserError(
            f"--adapter {config.adapter} is {_KINDS[adapter.kind]} and --train_type {config.train_type} trains "
            f"{_KINDS[kind]}. Give one of {takers}."
        )
    errors = [
        f"--{name} is {_shown(getattr(config, name))}, but the adapter's is {_shown(value)}: leave it out."
        for name, value in adapter.options.items()
        if name in given and name not in _NAMES_LAYERS and getattr(config, name) != value
    ]
    if errors:
        raise UserError("\n  ".join([f"--adapter {config.adapter} decides its own options:", *errors]))
    taken = {name: value for name, value in adapter.options.items() if name not in given}
    config = dataclasses.replace(config, **taken)
    if errors := check(config):
        raise UserError("\n  ".join([f"--adapter {config.adapter} cannot be trained with these options:", *errors]))
    return config


_KINDS = {"lora": "LoRA", "dora": "DoRA"}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
