"""The options of commands that make a model folder from another one."""

import argparse
from pathlib import Path

from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.locations import folder_error


def add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--model_name", help="the same as MODEL")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")


def folders(args: argparse.Namespace) -> tuple[str, Path]:
    """The model and the folder to make. Raises UserError if one is missing or cannot be a folder."""
    model = args.model or args.model_name
    if not model or not args.out:
        raise UserError("Give MODEL and --out DIR. See --help.")
    if error := folder_error("out", args.out):
        raise UserError(error)
    return model, Path(args.out)
