"""`fsdp-qlora COMMAND`, which is also `python -m fsdp_qlora COMMAND`."""

import difflib
import importlib
import logging
import sys

from fsdp_qlora.errors import ENDINGS, TrainingError, UserError
from fsdp_qlora.messages import shown
from fsdp_qlora.program.parser import Parser
from fsdp_qlora.program.table import COMMANDS
from fsdp_qlora.redact import guard_output
from fsdp_qlora.terminal import quiet_libraries
from fsdp_qlora.version import VERSION

PROGRAM = "fsdp-qlora"


def program() -> int:
    """The entry point of the installed program."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run a command. Returns the exit status: 2 for bad input, 0 when it is done, else as in errors.ENDINGS."""
    guard_output()
    if argv[:1] in (["--help"], ["-h"]):
        print(usage())
        return 0
    if argv[:1] in (["--version"], ["-V"]):
        print(f"{PROGRAM} {VERSION}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        print(f"error: {_why_none(argv)}\n{usage()}", file=sys.stderr)
        return 2
    name, *words = argv
    if name == "quantize" and {"--list", "--prune"} & set(words):
        print(f"The cache has a command of its own: {PROGRAM} cache", file=sys.stderr)
        name = "cache"
    return run_command(name, words)


def run_command(name: str, words: list[str]) -> int:
    """Run a row of the table. Returns the exit status."""
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    if hasattr(module, "main"):
        return int(module.main(words))
    parser = Parser(name, module.DESCRIPTION)
    module.add_options(parser)
    quiet_libraries()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        args, others = parser.split(words)
        if command.takes_training_options:
            module.run(args, others)
        elif others:
            raise UserError(f"Unknown option {others[0]}. See --help.")
        else:
            module.run(args)
    except (UserError, TrainingError) as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return ENDINGS["interrupted"].exit_code
    return 0


def usage() -> str:
    lines = [f"  {name:12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROGRAM} COMMAND [--help]", *lines, f"  {'--version':12}print the version"])


def _why_none(argv: list[str]) -> str:
    if not argv:
        return "a command is needed."
    close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
    if argv[0].startswith("--") and not close:
        return f"the command comes first: {PROGRAM} train {argv[0]} ..."
    return f"no command is named {argv[0]!r}." + (f" Did you mean {close[0]}?" if close else "")
