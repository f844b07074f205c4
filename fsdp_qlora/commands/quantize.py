"""The command `quantize`: a model saved in bitsandbytes' 4-bit format."""

import argparse
from pathlib import Path

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import refuse_bad_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    folder_options(parser)
    parser.add_argument("--quant_type", choices=["nf4", "fp4"], default="nf4", help="4-bit format (default: nf4)")
    parser.add_argument("--double_quant", choices=["true", "false"], default="true", help="scales too (default: true)")
    parser.add_argument(
        "--trust_remote_code", choices=["true", "false"], default="false", help="run the model's code (default: false)"
    )


def run(args: argparse.Namespace) -> None:
    """Save a model in bitsandbytes' 4-bit format, as a folder that training and transformers load, with or without a
    GPU and a piece of a tensor in memory at a time (a mixture of experts is loaded by training only: bitsandbytes has
    no format for experts).
    """
    model, out = folders(args)
    from fsdp_qlora.export.quantize import quantize_model

    double_quant, with_code = args.double_quant == "true", args.trust_remote_code == "true"
    quantize_model(model, out, quant_type=args.quant_type, double_quant=double_quant, trust_remote_code=with_code)


# --- shared with expand ---


def folder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--model_name", help="the same as MODEL")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")


def folders(args: argparse.Namespace) -> tuple[str, Path]:
    """The model and the folder to make. Raises UserError if one is missing or cannot be a folder."""
    model = args.model or args.model_name
    if not model or not args.out:
        raise UserError("Give MODEL and --out DIR. See --help.")
    refuse_bad_folder("out", args.out)
    return model, Path(args.out)
