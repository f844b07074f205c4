"""The command `merge`: an adapter and its base become one model."""

import argparse
from pathlib import Path

from fsdp_qlora.commands.run_config import adapter_folder, run_options
from fsdp_qlora.utils.files import refuse_bad_folder

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", required=True, help="folder of the adapter, or its name on the hub")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to make")
    parser.add_argument(
        "--base",
        choices=["original", "dequantized"],
        help="weights to merge into: those of the base's files, or the dequantized ones that the adapter was trained "
        "on (default: original; with --verify, the better one)",
    )
    parser.add_argument("--dtype", choices=["auto", *_DTYPES], default="auto", help="number format; auto is the base's")
    parser.add_argument("--verify", metavar="ROWS", help="compare both bases with the trained model: loss, divergence")
    parser.add_argument("--verify_rows", type=int, default=64, metavar="N", help="rows to compare on (default: 64)")


def run(args: argparse.Namespace) -> None:
    """Merge an adapter (LoRA, DoRA and their variants; ours or PEFT's) into its base, as a folder that transformers and
    vLLM load without PEFT. Memory holds one piece of a tensor at a time. The base and how it was quantized are read
    from the run's config.yaml beside the adapter; every option of training may be given instead, such as --model_name
    and --train_type.
    """
    refuse_bad_folder("out", args.out)
    folder = adapter_folder(args.adapter)
    config = run_options(folder, args.training_options)
    import torch

    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.export.merge import check_base, one_process, open_merge, write_merged
    from fsdp_qlora.export.model_folder import check_is_new, return_freed_memory
    from fsdp_qlora.export.verify import compare, read_rows

    return_freed_memory()
    out = Path(args.out)
    check_is_new(out)
    ranks = read_ranks(config.device)
    merge = open_merge(folder, config)
    if args.base or not args.verify:
        check_base(merge, args.base or "original")
    rows = read_rows(merge, args.verify, args.verify_rows) if args.verify else None
    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype in _DTYPES else None
    with one_process(ranks) as mesh:
        better = compare(merge, rows, ranks, mesh, dtype) if rows else "original"
        write_merged(merge, merge.on(args.base or better, ranks, mesh, dtype), out)
