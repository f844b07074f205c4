"""Compares a service's folder with its base and the options that change adapters."""

import dataclasses
import json
from pathlib import Path

import yaml

from fsdp_qlora.config.options import RESULT_OPTIONS, TrainConfig
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.model.kernels.in_use import Ways
from fsdp_qlora.run.base import FetchedBase
from fsdp_qlora.service.entries import BaseEntry
from fsdp_qlora.service.records import Records
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import fingerprint_files, refusal_named, staged_file

# Options that change what an adapter computes, besides its rank, which is its own.
_IDENTITY = (
    "train_type",
    "quant_type",
    "double_quant",
    "group_size",
    "n_bits",
    "int8_threshold",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
)


def check_identity(records: Records, folder: Path, base: FetchedBase) -> None:
    """Refuse a folder whose adapters were made in another way.

    They would compute something else here.

    Raises:
        UserError: names what differs, with both values.
    """
    options = resolved_options(base.config)
    identity = {name: options[name] for name in _IDENTITY}
    identity["precision"] = base.placed.model.precision.name
    identity["the base's weights"] = fingerprint_files(base.weights.files.files.values())
    # As it comes back from the records: tuples are lists there.
    identity = json.loads(json.dumps(identity))
    named: BaseEntry = {"model": base.config.base_name or base.config.model_name}
    known = records.bases.get("base") or named
    before = known.get("identity")
    if before is None and known["model"] != named["model"]:
        raise UserError(
            f"--folder {folder} has the adapters of {known['model']}. Give another folder."
        )
    changes = [
        f"{name} was {before[name]} and is {value}"
        for name, value in identity.items()
        if before is not None and name in before and before[name] != value
    ]
    if changes:
        raise UserError(
            f"--folder {folder} has adapters of another base or options: {'; '.join(changes)}. "
            "Give the same options and base, or another folder."
        )
    records.bases.put("base", known | named | {"identity": identity})
    _note_options(base.config, folder)


def ways_before(records: Records) -> dict[str, str] | None:
    """How the folder's adapters were computed last: empty if all was plain, None if none was."""
    base = records.bases.get("base")
    return None if base is None else base.get("ways", {})


def note_ways(records: Records, ways: Ways) -> None:
    """Keep how adapters are computed from now on, for the next start."""
    base = records.bases.get("base")
    assert base is not None  # since `check_identity`
    records.bases.put("base", base | {"ways": ways._asdict()})


def _note_options(config: TrainConfig, folder: Path) -> None:
    """Write config.yaml into the folder.

    `generate`, `evaluate` and `merge` find the base of a saved adapter by it.
    """
    here = Path(config.model_name).expanduser()
    if here.is_dir():
        # Other commands may be started in another folder, where a relative path means nothing.
        config = dataclasses.replace(config, model_name=str(here.resolve()))
    named = RESULT_OPTIONS - {"lora_rank"}  # each adapter has its own
    options = {name: value for name, value in resolved_options(config).items() if name in named}
    with refusal_named("folder", folder), staged_file(folder / "config.yaml") as partial:
        partial.write_text(yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
