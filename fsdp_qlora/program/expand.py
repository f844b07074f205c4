"""`fsdp-qlora expand`."""

import argparse

from fsdp_qlora.program.model_options import add_folders, folders

DESCRIPTION = (
    "Add blocks to a model that change nothing until they are trained (LLaMA Pro, Wu et al. 2024), for train types "
    "bnb_llama_pro and hqq_llama_pro. The result is a model folder; its config.json says which blocks are new."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_folders(parser)
    parser.add_argument(
        "--expansion_rate", type=float, default=0.1, help="new blocks as a share of the model's (default: 0.1)"
    )


def run(args: argparse.Namespace) -> None:
    model, out = folders(args)
    from fsdp_qlora.commands.expand import expand_model

    expand_model(model, out, expansion_rate=args.expansion_rate)
