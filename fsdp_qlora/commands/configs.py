"""The command `configs`: the settings that come with the program."""

import argparse

from fsdp_qlora.config.text import describe_config, shipped_configs
from fsdp_qlora.utils.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print these settings")


def run(args: argparse.Namespace) -> None:
    """List the settings that come with the program; `fsdp-qlora train --config NAME` uses them. With NAME they are
    printed, to be kept in a file and changed.
    """
    configs = shipped_configs()
    if args.name is None:
        for name, path in configs.items():
            print(f"{name:20}{describe_config(path)}")
    elif args.name in configs:
        print(configs[args.name].read_text(encoding="utf-8"), end="")
    else:
        raise UserError(f"No settings are named {args.name!r}. There are: {', '.join(configs)}.")
