"""`fsdp-qlora quantize`."""

import argparse

from fsdp_qlora.program.model_options import add_folders, folders

DESCRIPTION = (
    "Save a model in bitsandbytes' 4-bit format, as a folder that training and transformers load, with or without "
    "a GPU and a piece of a tensor in memory at a time (a mixture of experts is loaded by training only: "
    "bitsandbytes has no format for experts)."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_folders(parser)
    parser.add_argument("--quant_type", choices=["nf4", "fp4"], default="nf4", help="4-bit format (default: nf4)")
    parser.add_argument(
        "--double_quant", choices=["true", "false"], default="true", help="quantize the scales too (default: true)"
    )
    parser.add_argument(
        "--trust_remote_code", choices=["true", "false"], default="false", help="as in training (default: false)"
    )


def run(args: argparse.Namespace) -> None:
    model, out = folders(args)
    from fsdp_qlora.commands.quantize import quantize_model

    quantize_model(
        model,
        out,
        quant_type=args.quant_type,
        double_quant=args.double_quant == "true",
        trust_remote_code=args.trust_remote_code == "true",
    )
