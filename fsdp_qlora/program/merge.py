"""`merge`: an adapter and its base become one model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.errors import UserError
from fsdp_qlora.program.run_options import run_options
from fsdp_qlora.storage.locations import folder_error

if TYPE_CHECKING:
    from fsdp_qlora.commands.merge import TrainedOn

DESCRIPTION = (
    "Merge an adapter (LoRA, DoRA and their variants; ours or PEFT's) into its base, as a folder that transformers and "
    "vLLM load without PEFT. A piece of a tensor is in memory at a time. The base and how it was quantized are read "
    "from the run's config.yaml beside the adapter; every option of training may be given instead, such as "
    "--model_name and --train_type."
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", required=True, help="folder of the adapter")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to make")
    parser.add_argument(
        "--base",
        choices=["original", "dequantized"],
        help="what the adapter is added to: the weights in the base's files, or these after the run's quantization, "
        "which the adapter was trained on (default: original; with --verify, the better one)",
    )
    parser.add_argument(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="of the merged weights; auto is that of the base"
    )
    parser.add_argument(
        "--verify",
        metavar="ROWS",
        help="compare both bases with the trained model on a file of rows: loss, and divergence of the predictions",
    )
    parser.add_argument("--verify_rows", type=int, default=64, metavar="N", help="rows to compare on (default: 64)")


def run(args: argparse.Namespace, others: list[str]) -> None:
    """Merge as the options say.

    Args:
        others: options of training.
    """
    if error := folder_error("out", args.out):
        raise UserError(error)
    config = run_options(Path(args.adapter).expanduser(), others)
    import torch

    from fsdp_qlora.commands.merge import check_base, one_process, open_merge, write_merged
    from fsdp_qlora.commands.model_folder import check_is_new, free_at_once
    from fsdp_qlora.commands.verify import compare, read_rows
    from fsdp_qlora.distributed import read_ranks

    free_at_once()
    out = Path(args.out)
    check_is_new(out)
    ranks = read_ranks(config.device)
    merge = open_merge(Path(args.adapter), trained_on(config))
    if args.base or not args.verify:
        check_base(merge, args.base or "original")
    rows = read_rows(config, merge, args.verify, args.verify_rows) if args.verify else None
    dtype = getattr(torch, DTYPES[args.dtype]) if args.dtype in DTYPES else None
    with one_process(ranks) as mesh:
        better = compare(merge, rows, ranks, mesh, dtype) if rows else "original"
        write_merged(merge, merge.on(args.base or better, ranks, mesh, dtype), out)


def trained_on(config: TrainConfig) -> "TrainedOn":
    """The base of a run's adapter."""
    from fsdp_qlora.adapters.first_values import reduces_base
    from fsdp_qlora.commands.merge import TrainedOn
    from fsdp_qlora.device import choose_device
    from fsdp_qlora.planning.plan import quantizer_options
    from fsdp_qlora.precision import PRECISIONS, choose_precision
    from fsdp_qlora.train_types import TRAIN_TYPES

    quantizer = TRAIN_TYPES[config.train_type].quantizer
    return TrainedOn(
        model_name=config.model,
        trust_remote_code=config.trust_remote_code,
        quantizer=quantizer,
        options=quantizer_options(config, quantizer),
        precision=PRECISIONS[choose_precision(config.precision, choose_device(config.device, 0))],
        reduces_base=reduces_base(config.init_lora_weights),
    )
