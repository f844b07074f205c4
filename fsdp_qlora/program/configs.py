"""`fsdp-qlora configs`."""

import argparse

from fsdp_qlora.config.text import describe_config, shipped_configs
from fsdp_qlora.errors import UserError

DESCRIPTION = (
    "List the settings that come with the program; `fsdp-qlora train --config NAME` uses them. With NAME they are "
    "printed, to be kept in a file and changed."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print these settings")


def run(args: argparse.Namespace) -> None:
    configs = shipped_configs()
    if args.name is None:
        for name, path in configs.items():
            print(f"{name:20}{describe_config(path)}")
        return
    if args.name not in configs:
        raise UserError(f"No settings are named {args.name!r}. There are: {', '.join(configs)}.")
    print(configs[args.name].read_text(encoding="utf-8"), end="")
