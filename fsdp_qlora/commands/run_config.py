"""The options of a run, with those that the files of an adapter or of a trained model decide.

Without torch: wrong options are refused before it is imported.
"""

import argparse
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.config.cli import options_of, parse_options
from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import named_tokens, value_text
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.distributed.supervision.launch import is_started_by_others
from fsdp_qlora.model.adapters.peft_folder import CONFIG, read_adapter, read_config, read_record
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import is_repository
from fsdp_qlora.utils.run_files import SERVICE

# These may name the same layers in another way, which is checked when the model is known.
_NAMES_LAYERS = ("lora_target_modules", "lora_target_parameters", "modules_to_save")
_KINDS = {"lora": "LoRA", "dora": "DoRA"}


def parse_train_config(
    argv: list[str],
    result: Path | Mapping[str, object] | None = None,
    notes: list[str] | None = None,
) -> TrainConfig:
    """`parse_options`, with what --adapter decides."""
    return _take_adapter(*parse_options(argv, result, notes))


def make_train_config(
    base: TrainConfig | str | Path | None, options: Mapping[str, object]
) -> TrainConfig:
    """`options_of`, with what --adapter decides."""
    return _take_adapter(*options_of(base, options))


def run_options(adapter: Path, words: list[str], *, starts_from_it: bool = False) -> TrainConfig:
    """The options of an adapter's run, as far as its files may say them (config.marks.Mark).

    They are in config.yaml of the run's folder, or in the training.json that goes with the adapter.
    An adapter without both is on an unquantized base, which its own configuration names.

    Args:
        words: options that are given, which win.
        starts_from_it: set --adapter, so that a run with these options starts from it.
    Raises:
        UserError: as parse_train_config, or the adapter's folder does not say what its base is.
    """
    if not adapter.is_dir():
        raise UserError(
            f"--adapter {adapter}: there is no such folder. Give the folder of a run or an adapter."
        )
    paths = [folder / "config.yaml" for folder in _folders_of_runs(adapter)]
    configs = [path for path in paths if path.is_file()]
    if starts_from_it:
        # An adapter in output_dir would be refused; nothing is written to this folder.
        words = [*words, "--adapter", str(adapter), "--output_dir", str(adapter / "unused")]
    else:
        words = [*words, "--adapter", "none"]
    config = parse_train_config(words, configs[0] if configs else _recorded(adapter))
    if not any(word.partition("=")[0] == "--model_name" for word in words):
        _refuse_lost_base(config)
    return config


def _folders_of_runs(adapter: Path) -> Iterator[Path]:
    """The folders that may have the config.yaml of an adapter's run or service."""
    place = adapter.resolve()
    yield adapter
    yield place.parent
    # A service keeps adapters in ID/weights/NAME.
    yield from (folder for folder in place.parents[1:4] if (folder / SERVICE).is_file())


def _refuse_lost_base(config: TrainConfig) -> None:
    """Refuse a base that an adapter's files name and that is nowhere, before anything is loaded."""
    # A base in a folder has no name that is right on each machine: the files have its path on the
    # machine that trained, or the last part of it. Of many ranks none asks the hub here.
    if is_started_by_others():
        return
    from fsdp_qlora.utils import hub  # the hub's client takes a while to import

    name = config.model_name
    try:
        if not hub.is_here(name):
            hub.find_model_folder(
                name, with_weights=False, with_code=config.trust_remote_code, is_preview=True
            )
    except UserError as error:
        raise UserError(f"{error} Give the base model's place with --model_name.") from error


def trained_model_options(folder: Path | None, words: list[str]) -> TrainConfig:
    """The options with which a model is loaded for commands that use it.

    Args:
        folder: of an adapter, or of a trained or merged model; None for a base.
    """
    if folder is None:
        return parse_train_config(words)
    if (folder / CONFIG).is_file() or not (folder / "config.json").is_file():
        return run_options(folder, words, starts_from_it=True)
    # A trained model is used as it is. It is quantized only if a train type that does so is given.
    if not any(word.startswith("--train_type") for word in words):
        words = [*words, "--train_type", "lora"]
    words = [*words, "--model_name", str(folder), "--adapter", "none"]
    run_yaml = folder / "config.yaml"
    return parse_train_config(words, run_yaml if run_yaml.is_file() else None)


def _recorded(adapter: Path) -> dict[str, Any]:
    """The options of a run without its folder, from the files beside its adapter."""
    config = read_config(adapter)
    record = read_record(adapter)
    # PEFT's configuration does not say how the base was quantized.
    train_type = "dora" if config.get("use_dora") else "lora"
    settings: dict[str, Any] = dict(record.get("settings") or {"train_type": train_type})
    base = record.get("base", {}).get("name") or config.get("base_model_name_or_path")
    if base:
        settings["model_name"] = base
    return settings


def _take_adapter(config: TrainConfig, named_options: Collection[str]) -> TrainConfig:
    """Take the options that the adapter decides, such as its rank; none without --adapter.

    Args:
        named_options: those that were given.
    Raises:
        UserError: there is no usable adapter, or a given option contradicts it.
    """
    if config.adapter is None:
        return dataclasses.replace(config, add_tokens=named_tokens(config.add_tokens))
    # This is axolotl's name for the option.
    if config.adapter.lower() in TRAIN_TYPES and not Path(config.adapter).exists():
        raise UserError(
            "--adapter is a folder to start from; did you mean --train_type "
            f"{config.adapter.lower()}?"
        )
    folder = adapter_folder(config.adapter)
    output = Path(config.output_dir).expanduser()
    config = dataclasses.replace(config, adapter=str(folder))
    if output.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UserError(
            f"--adapter {config.adapter} is in output_dir, where the new adapter goes. Give "
            "another folder."
        )
    adapter = read_adapter(folder)
    kind = config.kind.adapter
    if kind is not None and kind != adapter.kind:
        takers = ", ".join(
            name for name, other in TRAIN_TYPES.items() if other.adapter == adapter.kind
        )
        raise UserError(
            f"--adapter {config.adapter} is {_KINDS[adapter.kind]} and --train_type "
            f"{config.train_type} trains {_KINDS[kind]}. Give one of {takers}."
        )
    errors = [
        f"--{name} is {value_text(getattr(config, name))}, but the adapter's is "
        f"{value_text(value)}: leave it out."
        for name, value in adapter.options.items()
        if name in named_options and name not in _NAMES_LAYERS and getattr(config, name) != value
    ]
    if errors:
        heading = f"--adapter {config.adapter} decides its own options:"
        raise UserError("\n  ".join([heading, *errors]))
    taken = {name: value for name, value in adapter.options.items() if name not in named_options}
    config = dataclasses.replace(config, **taken)
    # Options that were fine with each other may not be so with the adapter's.
    errors = check(config)
    if errors:
        heading = f"--adapter {config.adapter} cannot be trained with these options:"
        raise UserError("\n  ".join([heading, *errors]))
    return config


def add_adapter(parser: argparse.ArgumentParser, what: str) -> None:
    """Add an adapter's place, given first or as --adapter.

    Args:
        what: help text that says what the place may be.
    """
    parser.add_argument("run", nargs="?", metavar="RUN", help=what)
    parser.add_argument("--adapter", metavar="RUN", help="the same as RUN")


def given_adapter(args: argparse.Namespace) -> str | None:
    """The adapter of `add_adapter`. Raises UserError if two are given."""
    if args.run and args.adapter:
        folders = {Path(name).expanduser().resolve() for name in (args.run, args.adapter)}
        if len(folders) > 1:
            raise UserError(f"{args.run} and --adapter {args.adapter} are two adapters. Give one.")
    given: str | None = args.run or args.adapter
    return given


def adapter_folder(name: str) -> Path:
    """The folder of an adapter that is given as a folder, or by its name on the hub."""
    folder = Path(name).expanduser()
    # A name such as runs/1 looks like one on the hub, too: a folder that exists wins.
    if folder.exists() or name.startswith(".") or not is_repository(name):
        return folder
    from fsdp_qlora.utils.hub import download_adapter  # torch takes seconds to load

    return download_adapter(name)
