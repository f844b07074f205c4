"""The program `fsdp-qlora COMMAND`, also `python -m fsdp_qlora` and `torchrun -m fsdp_qlora`.

A command is a function in fsdp_qlora/commands/, beside one that adds its options. What it works
with imports torch, and is imported when it runs, so that --help and wrong options answer at once.
"""

import argparse
import difflib
import errno
import logging
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

from fsdp_qlora import __version__
from fsdp_qlora.commands import inference, models, plan, serve, tools, train
from fsdp_qlora.config.cli import is_option
from fsdp_qlora.utils.errors import (
    ENDINGS,
    Crashed,
    LostRank,
    RunStopped,
    TrainingError,
    UserError,
    how_it_ends,
    paths_refused,
    print_error,
)
from fsdp_qlora.utils.redact import guard_output, lost_output
from fsdp_qlora.utils.text import LineHandler, quiet_libraries

log = logging.getLogger("fsdp_qlora")

PROGRAM = "fsdp-qlora"
_ALIKE = 0.7  # of difflib: how much of an option's name a wrong one must have
_FLAG = re.compile("^--[^=]+")
# Other programs' names of commands.
_SAME = {"chat": ["generate"], "inference": ["generate"], "sft": ["train"], "finetune": ["train"]}


class Command(NamedTuple):
    """A command of `fsdp-qlora`.

    summary: one line of `fsdp-qlora --help`.
    run: called with the parsed options, or with the words where there is no `add_options`; it may
        return the exit status. Its docstring is the description in the command's own --help.
    """

    summary: str
    run: Callable[[Any], int | None]
    add_options: Callable[[argparse.ArgumentParser], None] | None = None


COMMANDS = {
    "train": Command("fine-tune a model", train.main),
    "teach": Command(
        "compute a teacher's probabilities for a dataset", train.teach, train.teach_options
    ),
    "plan": Command("estimate memory, speed and cost", plan.run, plan.add_options),
    "export": Command("export a checkpoint as an adapter", models.export, models.export_options),
    "merge": Command("merge an adapter into its base", models.merge, models.merge_options),
    "generate": Command("generate text", inference.generate, inference.generate_options),
    "evaluate": Command(
        "measure loss and perplexity, or lm-eval tasks",
        inference.evaluate,
        inference.evaluate_options,
    ),
    "serve": Command(
        "run a training server for custom loops (Tinker API)", serve.run, serve.add_options
    ),
    "report": Command(
        "draw the curves of runs in one HTML file", tools.report, tools.report_options
    ),
    "quantize": Command("quantize a model and save it", models.quantize, models.quantize_options),
    "expand": Command(
        "insert identity blocks to train (LLaMA Pro)", models.expand, models.expand_options
    ),
    "configs": Command(
        "list the settings that come with the program", tools.configs, tools.configs_options
    ),
    "completion": Command(
        "print the shell completion setup for bash and zsh", tools.completion, lambda parser: None
    ),
    "env": Command("print facts for a bug report", tools.env, lambda parser: None),
    "doctor": Command("check this machine before a run", tools.doctor, lambda parser: None),
}
# The commands whose `training_options` may hold words for `parse_train_config`.
_TAKE_TRAINING_OPTIONS = ("teach", "plan", "export", "merge", "generate", "evaluate", "serve")


def program() -> int:
    """The entry point of the installed program."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run a command.

    Returns the exit status: 2 for bad input, 0 when it is done, else as in errors.ENDINGS.
    """
    guard_output()  # also for the reader of a pipe, such as `head`, that has read enough
    try:
        with paths_refused():
            status = _choose(argv)
    except (UserError, TrainingError, LostRank, Crashed, RunStopped) as error:
        print_error(error)
        status = how_it_ends(error).exit_code
    except KeyboardInterrupt:
        status = ENDINGS["interrupted"].exit_code
    # Now, so that a full disk or a closed pipe is noticed here and not when Python ends.
    sys.stdout.flush()
    lost = lost_output()
    # A run's results are in its folder.
    if status or lost is None or lost.errno == errno.EPIPE or argv[0] == "train":
        return status
    print(f"error: The output could not be written: {lost.strerror}.", file=sys.stderr)
    return 1


def _choose(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if argv[:1] in (["--version"], ["-V"]):
        print(f"{PROGRAM} {__version__}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        raise UserError(f"{_explain_unknown(argv)}\n{usage()}")
    name, *words = argv
    command = COMMANDS[name]
    # `train` reads its words itself, since it has YAML files and groups of help (config/cli.py).
    if command.add_options is None:
        return int(command.run(words) or 0)
    return _run(name, command, words)


class _Parser(argparse.ArgumentParser):
    """argparse, except that errors are raised to the caller.

    flags: the options that were added.
    """

    def __init__(self, **options: Any) -> None:
        self.flags: set[str] = set()
        super().__init__(**options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.flags |= {*action.option_strings}
        return action

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See --help.")


def _run(name: str, command: Command, words: list[str]) -> int:
    """Run a command that has options.

    Its arguments also have `words` (all of them), `training_options` (those that it does not know)
    and `commands` (the names of all).
    """
    assert command.add_options is not None
    parser = _Parser(prog=f"{PROGRAM} {name}", description=command.run.__doc__, allow_abbrev=False)
    command.add_options(parser)
    quiet_libraries()
    # --batch-size and --batch_size are the same option.
    spelled = [_FLAG.sub(lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in words]
    command_words, training_words = _split(spelled, parser.flags)
    _refuse_unknown(name, parser.flags, training_words)
    args, unexpected = parser.parse_known_args(command_words)
    args.words = words
    args.training_options = unexpected + training_words
    args.commands = list(COMMANDS)
    if unexpected and name not in _TAKE_TRAINING_OPTIONS:
        raise UserError(f"Unexpected argument {unexpected[0]!r}. See --help.")
    # With --json stdout has the JSON alone.
    handler = LineHandler(sys.stderr if getattr(args, "json", False) else sys.stdout)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return int(command.run(args) or 0)
    finally:
        log.removeHandler(handler)


def _split(words: list[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a command's own options and places, and those of other options.

    Another option has all words up to the next option. argparse alone would take the value of an
    option that it does not know for a place.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    is_other = False
    for word in words:
        if word in ("-h", "--help"):
            is_other = False
        elif word.startswith("--"):
            is_other = word.partition("=")[0] not in flags
        parts[is_other].append(word)
    return parts


def _refuse_unknown(name: str, flags: Collection[str], others: list[str]) -> None:
    """Refuse an option that neither the command nor training has, and name the nearest one."""
    takes_training = name in _TAKE_TRAINING_OPTIONS
    for word in others:
        if not word.startswith("--"):
            continue
        flag = word.partition("=")[0]
        if takes_training and is_option(flag[2:]):
            continue
        near = difflib.get_close_matches(flag, flags, n=1, cutoff=_ALIKE)
        if near:
            raise UserError(f"Unknown option {flag}; did you mean {near[0]}? See --help.")
        if not takes_training:
            raise UserError(f"Unknown option {flag}. See --help.")


def usage() -> str:
    lines = [f"  {name:12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [f"usage: {PROGRAM} COMMAND [--help]", *lines, f"  {'--version':12}print the version"]
    )


def _explain_unknown(argv: list[str]) -> str:
    if not argv:
        return "a command is needed."
    close = _SAME.get(argv[0]) or difflib.get_close_matches(argv[0], COMMANDS, n=1)
    if argv[0].startswith("--") and not close:
        return f"the command comes first: {PROGRAM} train {argv[0]} ..."
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"no command is named {argv[0]!r}.{hint}"


if __name__ == "__main__":
    sys.exit(program())
