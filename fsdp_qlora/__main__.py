"""`python -m fsdp_qlora <command>`: what is done beside training."""

import importlib
import sys

from fsdp_qlora.errors import UserError

# name -> (module with a `main(argv) -> exit status`, imported when it is asked for; what it does)
COMMANDS = {
    "quantize": (
        "fsdp_qlora.commands.quantize",
        "save a model in 4 bits; list and prune the cache of quantized weights",
    ),
}


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for bad input."""
    lines = [f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()]
    usage = "\n".join(["usage: python -m fsdp_qlora COMMAND [--help]", *lines, "To train: python train.py --help"])
    if argv[:1] in (["--help"], ["-h"]):
        print(usage)
        return 0
    if not argv or argv[0] not in COMMANDS:
        print(
            f"error: {f'no command is named {argv[0]!r}' if argv else 'a command is needed'}.\n{usage}", file=sys.stderr
        )
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
