"""`fsdp-qlora COMMAND`, which is also `python -m fsdp_qlora COMMAND`."""

import contextlib
import difflib
import errno
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

from fsdp_qlora.cli.commands import COMMANDS, Command
from fsdp_qlora.config.cli import Parser, with_underscores
from fsdp_qlora.errors import ENDINGS, LostRank, TrainingError, UserError, how_it_ends, paths_refused, print_error
from fsdp_qlora.output.redact import guard_output, lost_output
from fsdp_qlora.output.text import LineHandler, quiet_libraries
from fsdp_qlora.version import VERSION

log = logging.getLogger("fsdp_qlora")

PROGRAM = "fsdp-qlora"
_SAME = {"chat": ["generate"], "inference": ["generate"], "sft": ["train"], "finetune": ["train"]}  # as others call it


def program() -> int:
    """The entry point of the installed program."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run a command. Returns the exit status: 2 for bad input, 0 when it is done, else as in errors.ENDINGS."""
    guard_output()  # also for the reader of a pipe, such as `head`, that has read enough
    try:
        with paths_refused():
            status = _choose(argv)
    except (UserError, TrainingError, LostRank) as error:
        print_error(error)
        status = how_it_ends(error).exit_code
    except KeyboardInterrupt:
        status = ENDINGS["interrupted"].exit_code
    sys.stdout.flush()
    lost = lost_output()
    if status or lost is None or lost.errno == errno.EPIPE or argv[0] == "train":  # a run's results are in its folder
        return status
    print(f"error: The output could not be written: {lost.strerror}.", file=sys.stderr)
    return 1


def _choose(argv: list[str]) -> int:
    if argv[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if argv[:1] in (["--version"], ["-V"]):
        print(f"{PROGRAM} {VERSION}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        raise UserError(f"{_explain_unknown(argv)}\n{usage()}")
    name, *words = argv
    command = COMMANDS[name]
    if command.add_options is None:
        return int(command.run(words) or 0)
    return _run(name, command, words)


def _run(name: str, command: Command, words: list[str]) -> int:
    """Run a command; its arguments have `words`, all of them, and `training_options`, those that it does not know."""
    assert command.add_options is not None
    parser = Parser(prog=f"{PROGRAM} {name}", description=command.run.__doc__, allow_abbrev=False)
    command.add_options(parser)
    quiet_libraries()
    args, others = parser.parse_known_args(with_underscores(words))
    args.words, args.training_options = words, others
    if others and not command.takes_training_options:
        raise UserError(f"Unknown option {others[0]}. See --help.")
    with _logging_to(sys.stderr if getattr(args, "json", False) else sys.stdout):
        return int(command.run(args) or 0)


@contextlib.contextmanager
def _logging_to(stream: TextIO) -> Iterator[None]:
    handler = LineHandler(stream)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


def usage() -> str:
    lines = [f"  {name:12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROGRAM} COMMAND [--help]", *lines, f"  {'--version':12}print the version"])


def _explain_unknown(argv: list[str]) -> str:
    if not argv:
        return "a command is needed."
    close = _SAME.get(argv[0]) or difflib.get_close_matches(argv[0], COMMANDS, n=1)
    if argv[0].startswith("--") and not close:
        return f"the command comes first: {PROGRAM} train {argv[0]} ..."
    return f"no command is named {argv[0]!r}." + (f" Did you mean {close[0]}?" if close else "")
