"""The training options of the run that an adapter or a model comes from, for commands that use it."""

from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.adapters.peft_folder import CONFIG, read_config, read_record
from fsdp_qlora.config.cli import parse_train_config
from fsdp_qlora.config.options import DEFAULTS, TrainConfig
from fsdp_qlora.config.text import value_text
from fsdp_qlora.errors import UserError

OPTIONS = "config.yaml"


def run_options(adapter: Path | None, words: list[str], *, starts_from_it: bool = False) -> TrainConfig:
    """The options of an adapter's run; those in `words` win.

    They are in config.yaml of the run's folder, or in the training.json that goes with the adapter. One without both
    is on an unquantized base, which its own configuration names, unless `words` say otherwise.

    Args:
        adapter: its folder; None for options without an adapter.
        starts_from_it: set --adapter, so that a run with these options starts from it.
    Raises:
        UserError: as parse_train_config, or the adapter's folder does not say what its base is.
    """
    if adapter is None:
        return parse_train_config(words)
    if not adapter.is_dir():
        raise UserError(f"--adapter {adapter}: there is no such folder.")
    found = [folder / OPTIONS for folder in (adapter, adapter.resolve().parent) if (folder / OPTIONS).is_file()]
    given = ["--config", str(found[0])] if found else list(_recorded(adapter))
    end = (
        ["--adapter", str(adapter), "--output_dir", str(adapter / "unused")]
        if starts_from_it
        else ["--adapter", "none"]
    )
    return parse_train_config([*given, *words, *end])


def generation_options(folder: Path | None, words: list[str]) -> TrainConfig:
    """The options with which `generate` loads an adapter, a trained or merged model, or a base without either.

    Args and Raises: as `run_options`.
    """
    if folder is None or (folder / CONFIG).is_file() or not (folder / "config.json").is_file():
        return run_options(folder, words, starts_from_it=folder is not None)
    noted = ["--config", str(folder / OPTIONS)] if (folder / OPTIONS).is_file() else []
    given = [] if any(word.startswith("--train_type") for word in words) else ["--train_type", "lora"]
    own = ["--model_name", str(folder), "--llama_pro_path", "none", "--adapter", "none"]
    return parse_train_config([*noted, *words, *given, *own])


def _recorded(adapter: Path) -> Iterator[str]:
    """The options of a run without its folder, from the files beside its adapter."""
    config, record = read_config(adapter), read_record(adapter)
    settings = record.get("settings") or {"train_type": "dora" if config.get("use_dora") else "lora"}
    base = record.get("base", {}).get("name") or config.get("base_model_name_or_path")
    if base:
        yield from ("--model_name", str(base))
    for name, value in settings.items():
        if value is not None and hasattr(DEFAULTS, name):
            yield from (f"--{name}", value_text(tuple(value) if isinstance(value, list) else value))
