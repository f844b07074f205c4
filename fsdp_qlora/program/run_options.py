"""The options of a run that an adapter comes from, for commands that use it: its config.yaml, then the command line."""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import NoReturn

from fsdp_qlora.config.cli import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.errors import UserError
from fsdp_qlora.terminal import quiet_libraries

FILE = "config.yaml"


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See --help.")


def underscored(argv: list[str]) -> list[str]:
    """`--max-new-tokens=8` as `--max_new_tokens=8`."""
    parts = [word.partition("=") for word in argv]
    return [name.replace("-", "_").replace("__", "--", 1) + rest if name.startswith("--") else name + rest
            for name, rest in ((name, equals + value) for name, equals, value in parts)]  # fmt: skip


def run_options(adapter: Path | None, words: list[str]) -> TrainConfig:
    """The options of an adapter's run; those in `words` win.

    Without a config.yaml in its folder or the one above (that of a run's best adapter) only `words` count, and the
    base is the one that adapter_config.json names.

    Raises:
        UserError: as parse_train_config.
    """
    folders = (adapter, adapter.resolve().parent) if adapter else ()
    found = [folder / FILE for folder in folders if (folder / FILE).is_file()]
    if found:
        words = ["--config", str(found[0]), *words]
    elif adapter and not any(word.startswith("--config") for word in words):
        words = ["--train_type", "lora", *words]  # nothing says that its base was quantized
        if not any(word.startswith("--model_name") for word in words):
            words = ["--model_name", _named_base(adapter), *words]
    return parse_train_config(words)


def _named_base(adapter: Path) -> str:
    try:
        name = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        if name:
            return str(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--adapter {adapter} has no adapter_config.json that can be read ({type(error).__name__}). Give the "
            "output folder of a run, or one that PEFT saved."
        ) from error
    raise UserError(f"--adapter {adapter} does not name its base. Give it with --model_name.")


def log_to_stderr() -> None:
    """Let the log go to stderr: stdout is for results."""
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
