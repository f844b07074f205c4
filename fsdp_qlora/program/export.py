"""`fsdp-qlora export`."""

import argparse
from pathlib import Path

from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.locations import folder_error, is_repository

DESCRIPTION = (
    "Make of a checkpoint the folder that the run would have saved at that step: an adapter in PEFT's format with its "
    "tokenizer and card, or for full and the llama_pro types a whole model. It needs no GPU, and of the base only the "
    "small files (for the llama_pro types its weights too)."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT|RUN", help="a checkpoint's folder, or a run's: its newest one")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--best", action="store_true", help="take the run's checkpoint of the lowest held-out loss")
    parser.add_argument("--model_name", help="where the run's base model is now; only its small files are needed")
    parser.add_argument("--base_name", metavar="OWNER/NAME", help="the base's name on the hub, as in training")
    parser.add_argument("--push_to_hub", metavar="OWNER/NAME", help="upload the result there, as in training")
    parser.add_argument("--push_public", action="store_true", help="make a new repository public (default: private)")


def run(args: argparse.Namespace) -> None:
    for name in ("base_name", "push_to_hub"):
        if (value := getattr(args, name)) is not None and not is_repository(value):
            raise UserError(f"--{name} is {value!r}, but a name on the hub is OWNER/NAME.")
    if error := folder_error("out", args.out):
        raise UserError(error)
    from fsdp_qlora.commands.export import export_checkpoint

    options = {name: value for name, value in vars(args).items() if name not in ("source", "out")}
    export_checkpoint(Path(args.source).expanduser(), Path(args.out).expanduser(), **options)
