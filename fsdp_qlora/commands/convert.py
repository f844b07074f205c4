"""The command `convert`: takes a config of another trainer, axolotl's, LLaMA-Factory's, TRL's or torchtune's."""

import argparse
from pathlib import Path

from fsdp_qlora.config.convert import convert


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="THEIRS.yaml", help="config of axolotl, LLaMA-Factory, TRL or torchtune")


def run(args: argparse.Namespace) -> None:
    """Print the config of another trainer as a file for --config. Options without an equivalent become comments, with a
    reason. fsdp-qlora convert theirs.yaml > mine.yaml; then fsdp-qlora train --config mine.yaml --dry_run true.
    """
    print(convert(Path(args.config).expanduser()), end="")
