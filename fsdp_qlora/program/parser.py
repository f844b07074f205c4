"""The parser of the commands that are not training."""

import argparse
from typing import NoReturn

from fsdp_qlora.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours, and which leaves the options of training to their own parser."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"fsdp-qlora {name}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See --help.")

    def split(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """This command's options, and the words of the others."""
        parts = [word.partition("=") for word in argv]
        names = [
            name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name for name, _, _ in parts
        ]
        return self.parse_known_args([name + sep + value for name, (_, sep, value) in zip(names, parts, strict=True)])
