"""The command `expand`: a model with more blocks, which change nothing until they are trained."""

import argparse

from fsdp_qlora.commands.quantize import folder_options, folders


def add_options(parser: argparse.ArgumentParser) -> None:
    folder_options(parser)
    parser.add_argument("--expansion_rate", type=float, default=0.1, help="new blocks per block (default: 0.1)")


def run(args: argparse.Namespace) -> None:
    """Add blocks to a model that change nothing until they are trained (LLaMA Pro, Wu et al. 2024), for train types
    bnb_llama_pro and hqq_llama_pro. The result is a model folder; its config.json says which blocks are new.
    """
    model, out = folders(args)
    from fsdp_qlora.export.expand import expand_model

    expand_model(model, out, expansion_rate=args.expansion_rate)
