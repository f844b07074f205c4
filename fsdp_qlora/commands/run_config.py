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

# They may name the same layers in another way, which is checked when the model is known.
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
    """The options of an adapter's run, as far as its files may say them (config.marks.Mark); those
    in `words` win.

    They are in config.yaml of the run's folder, or in the training.json that goes with the adapter.
    One without both is on an unquantized base, which its own configuration names, unless `words`
    say otherwise.

    Args:
        starts_from_it: set --adapter, so that a run with these options starts from it.
    Raises:
        UserError: as parse_train_config, or the adapter's folder does not say what its base is.
    """
    if not adapter.is_dir():
        raise UserError(
            f"--adapter {adapter}: there is no such folder. Give that of a run or an adapter."
        )
    configs = [
        path for folder in _folders_of_runs(adapter) if (path := folder / "config.yaml").is_file()
    ]
    own = ["--adapter", str(adapter), "--output_dir", str(adapter / "unused")]
    words = [*words, *(own if starts_from_it else ("--adapter", "none"))]
    config = parse_train_config(words, configs[0] if configs else _recorded(adapter))
    if not any(word.partition("=")[0] == "--model_name" for word in words):
        _refuse_lost_base(config)
    return config


def _folders_of_runs(adapter: Path) -> Iterator[Path]:
    """The folders that may have the config.yaml of an adapter's run, or of the service that it was
    trained in.
    """
    place = adapter.resolve()
    yield adapter
    yield place.parent
    # ID/weights/NAME
    yield from (folder for folder in place.parents[1:4] if (folder / SERVICE).is_file())


def _refuse_lost_base(config: TrainConfig) -> None:
    """Refuse a base that an adapter's files name and that is nowhere, before anything is loaded.

    A base in a folder has no name that is right on each machine: its path then, or its last part
    alone.
    """
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
        raise UserError(f"{error} --model_name says where the adapter's base is now.") from error


def trained_model_options(folder: Path | None, words: list[str]) -> TrainConfig:
    """The options with which an adapter, a trained or merged model, or a base without either is
    loaded.
    """
    if folder is None:
        return parse_train_config(words)
    if (folder / CONFIG).is_file() or not (folder / "config.json").is_file():
        return run_options(folder, words, starts_from_it=True)
    train_type = (
        [] if any(word.startswith("--train_type") for word in words) else ["--train_type", "lora"]
    )
    own = ["--model_name", str(folder), "--adapter", "none"]
    noted = folder / "config.yaml"
    return parse_train_config([*words, *train_type, *own], noted if noted.is_file() else None)


def _recorded(adapter: Path) -> dict[str, Any]:
    """The options of a run without its folder, from the files beside its adapter."""
    config = read_config(adapter)
    record = read_record(adapter)
    settings = record.get("settings") or {
        "train_type": "dora" if config.get("use_dora") else "lora"
    }
    base = record.get("base", {}).get("name") or config.get("base_model_name_or_path")
    return settings | ({"model_name": base} if base else {})


def _take_adapter(config: TrainConfig, named_options: Collection[str]) -> TrainConfig:
    """The options with those that the adapter decides; without --adapter as they are.

    Args:
        named_options: those that were given.
    Raises:
        UserError: there is no usable adapter, or a given option contradicts it.
    """
    if config.adapter is None:
        return dataclasses.replace(config, add_tokens=named_tokens(config.add_tokens))
    # axolotl's name for it
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
            f"{config.train_type} trains "
            f"{_KINDS[kind]}. Give one of {takers}."
        )
    errors = [
        f"--{name} is {value_text(getattr(config, name))}, but the adapter's is "
        f"{value_text(value)}: leave it out."
        for name, value in adapter.options.items()
        if name in named_options and name not in _NAMES_LAYERS and getattr(config, name) != value
    ]
    if errors:
        raise UserError(
            "\n  ".join([f"--adapter {config.adapter} decides its own options:", *errors])
        )
    taken = {name: value for name, value in adapter.options.items() if name not in named_options}
    config = dataclasses.replace(config, **taken)
    errors = check(config)
    if errors:
        raise UserError(
            "\n  ".join(
                [f"--adapter {config.adapter} cannot be trained with these options:", *errors]
            )
        )
    return config


def add_adapter(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the place of an adapter, which comes before other options or after --adapter. what: it
    may be, for --help.
    """
    parser.add_argument("run", nargs="?", metavar="RUN", help=what)
    parser.add_argument("--adapter", metavar="RUN", help="the same as RUN")


def given_adapter(args: argparse.Namespace) -> str | None:
    """The adapter of `add_adapter`. Raises UserError if two are given."""
    if (
        args.run
        and args.adapter
        and Path(args.run).expanduser().resolve() != Path(args.adapter).expanduser().resolve()
    ):
        raise UserError(f"{args.run} and --adapter {args.adapter} are two adapters. Give one.")
    given: str | None = args.run or args.adapter
    return given


def adapter_folder(name: str) -> Path:
    """The folder of an adapter that is given as a folder, or by its name on the hub."""
    folder = Path(name).expanduser()
    if folder.exists() or name.startswith(".") or not is_repository(name):
        return folder
    from fsdp_qlora.utils.hub import download_adapter  # torch takes seconds to load

    return download_adapter(name)
