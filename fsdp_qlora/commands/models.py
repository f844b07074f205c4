"""The commands that write a model or an adapter: `export`, `merge`, `quantize` and `expand`."""

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_qlora.commands.run_config import (
    adapter_folder,
    add_adapter,
    given_adapter,
    parse_train_config,
    run_options,
)
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import refuse_bad_folder, staged_folder

log = logging.getLogger("fsdp_qlora")

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="CHECKPOINT|RUN",
        help="folder of a checkpoint, or of a run, whose newest checkpoint is exported",
    )
    parser.add_argument(
        "--out", "--output_dir", required=True, metavar="DIR", help="folder to make"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="take the run's checkpoint with the lowest evaluation loss",
    )
    parser.add_argument(
        "--for",
        dest="reader",
        choices=("peft", "vllm"),
        default="peft",
        help="reader of an adapter of experts: PEFT, or vLLM, which needs each expert under its "
        "name in the base's files (default: peft)",
    )


def export(args: argparse.Namespace) -> None:
    """Export a checkpoint as the folder that the run would have saved at that step: an adapter in
    PEFT's format with its tokenizer and card, or for full and the llama_pro types a whole model. It
    needs no GPU and only the small files of the base (for the llama_pro types its weights too).
    --model_name gives the base's place if it has moved. --base_name, --push_to_hub and
    --trust_remote_code work as in training.
    """
    source = Path(args.source).expanduser()
    out = Path(args.out).expanduser()
    refuse_bad_folder("out", args.out)
    parse_train_config(args.training_options)  # wrong ones are reported at once
    from fsdp_qlora.checkpoint import checkpoint
    from fsdp_qlora.checkpoint.saving import find_checkpoint
    from fsdp_qlora.export.model_folder import check_is_new
    from fsdp_qlora.export.upload import upload
    from fsdp_qlora.run.load_model import result_form

    check_is_new(out)
    folder = find_checkpoint(source, best=args.best)
    try:
        # Hashed again: it may have been on a disk for months, or copied.
        state = checkpoint.verify(folder)
    except checkpoint.DamagedCheckpoint as error:
        raise UserError(f"{folder} is damaged: {error}. Give another checkpoint.") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be read now: {error}.") from error
    # The options of the run that the checkpoint belongs to, for this machine's CPU.
    about = state["about"]
    stored = about["options"] | {"precision": about["facts"].get("precision") or "auto"}
    config = parse_train_config(["--device", "cpu", *args.training_options], stored)
    if config.merge_aware and args.reader == "vllm":
        raise UserError(
            f"{source} was trained with --merge_aware, and vLLM would load the adapter beside its "
            "base. Export it without --for vllm, and merge it: fsdp-qlora merge."
        )
    form = replace(result_form(config, _plan(config)), for_server=args.reader == "vllm")
    try:
        # A folder that was cut off would look like a complete result.
        with staged_folder(out) as partial:
            form.save_checkpoint(folder, state, partial)
    except (OSError, TrainingError) as error:
        raise UserError(f"--out {out} cannot be written: {error}.") from error
    log.info("Step %d of %s: %s", state["progress"]["step"], source, out)
    form.log_how_to_load(out)
    # Last: without a network the folder is here all the same.
    if config.push_to_hub and (failure := upload(out, config.push_to_hub)):
        raise UserError(failure)


def _plan(config: TrainConfig) -> Any:
    """The run's model without weights, from the small files of its base."""
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.planning.machine import Machine
    from fsdp_qlora.planning.plan import build_plan, fetch_early, read_model

    try:  # new blocks: the result holds the base's tensors too
        model = read_model(config, with_weights=config.kind.trains_new_blocks)
        fetch_early(config, *model[:2], lambda work, what: work())
    except UserError as error:
        raise UserError(f"{error} Give the base model's place with --model_name.") from error
    return build_plan(config, Machine.of(config, read_ranks("cpu")), *model)


def merge_options(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser, "folder of a run or an adapter, or an adapter's name on the hub")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")
    parser.add_argument(
        "--base",
        choices=["original", "dequantized"],
        default="original",
        help="weights to merge into: the original ones in the base's files, or the dequantized "
        "ones that the adapter was trained on (default: original)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", *_DTYPES],
        default="auto",
        help="number format of the merged weights; auto (default) is the base's",
    )
    parser.add_argument(
        "--format",
        choices=["same"],
        help="format of the merged weights: same rounds them to the format in which the base is "
        "published (MXFP4, NVFP4, FP8)",
    )


def merge(args: argparse.Namespace) -> None:
    """Merge an adapter (LoRA, DoRA and their variants; ours or PEFT's) into its base, as a folder
    that transformers and vLLM load without PEFT. Memory holds one piece of a tensor at a time. The
    base and how it was quantized are read from the run's config.yaml beside the adapter; every
    option of training may be given instead, such as --model_name and --train_type. An adapter that
    was trained with --merge_aware is always merged in the base's format, as it was trained.
    """
    adapter = given_adapter(args)
    if not adapter or not args.out:
        raise UserError("Give RUN and --out DIR. See --help.")
    refuse_bad_folder("out", args.out)
    folder = adapter_folder(adapter)
    config = run_options(folder, args.training_options)
    # Imported here, so that --help and wrong options answer at once.
    import torch

    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.export.as_trained import as_trained
    from fsdp_qlora.export.merge import check_base, one_process, open_merge, write_merged
    from fsdp_qlora.export.model_folder import check_is_new, return_freed_memory
    from fsdp_qlora.export.rounded import rounded

    # Before the first allocation: a merge makes and frees tensors of all sizes.
    return_freed_memory()
    out = Path(args.out)
    check_is_new(out)
    ranks = read_ranks(config.device)
    planned = open_merge(folder, config)
    keeps_format = args.format or config.merge_aware
    if keeps_format and (args.base == "dequantized" or args.dtype != "auto"):
        reason = "an adapter trained with --merge_aware" if config.merge_aware else "--format same"
        raise UserError(
            f"{reason} merges into the weights of the base's files, in their types. Leave out "
            "--base dequantized and --dtype."
        )
    if config.merge_aware:
        with one_process(ranks) as mesh:
            write_merged(planned, as_trained(planned, mesh, ranks.device), out)
        return
    rounded_weights = rounded(planned) if args.format else None
    check_base(planned, args.base)
    if rounded_weights:
        write_merged(planned, rounded_weights, out)
        return
    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype in _DTYPES else None
    with one_process(ranks) as mesh:
        write_merged(planned, planned.on(args.base, ranks, mesh, dtype), out)


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model name on the Hugging Face hub, or local folder",
    )
    parser.add_argument("--model_name", help="the same as MODEL")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")


def _folders(args: argparse.Namespace) -> tuple[str, Path]:
    """The model and the folder to make.

    Raises:
        UserError: one is missing or cannot be a folder.
    """
    model = args.model or args.model_name
    if not model or not args.out:
        raise UserError("Give MODEL and --out DIR. See --help.")
    refuse_bad_folder("out", args.out)
    return model, Path(args.out)


def quantize_options(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument(
        "--quant_type",
        "--format",
        choices=("nf4", "fp4", "mxfp4", "nvfp4", "fp8"),
        default="nf4",
        help="format of the weights (default: nf4)",
    )
    parser.add_argument(
        "--double_quant",
        choices=["true", "false"],
        default="true",
        help="quantization of the scales too, for nf4 and fp4 (default: true)",
    )
    parser.add_argument(
        "--trust_remote_code",
        choices=["true", "false"],
        default="false",
        help="permission to run Python code from the model's files (default: false)",
    )


def quantize(args: argparse.Namespace) -> None:
    """Save a model in bitsandbytes' 4-bit format (nf4, fp4) or in one of compressed-tensors (mxfp4,
    nvfp4, fp8), as a folder that training and transformers load, with or without a GPU and a piece
    of a tensor in memory at a time (a mixture of experts in nf4 or fp4 is loaded by training only:
    bitsandbytes has no format for experts).
    """
    model, out = _folders(args)
    from fsdp_qlora.export.model_folder import quantize_model

    double_quant = args.double_quant == "true"
    with_code = args.trust_remote_code == "true"
    quantize_model(
        model,
        out,
        quant_type=args.quant_type,
        double_quant=double_quant,
        trust_remote_code=with_code,
    )


def expand_options(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument(
        "--expansion_rate",
        type=float,
        default=0.1,
        help="number of new blocks per block (default: 0.1)",
    )


def expand(args: argparse.Namespace) -> None:
    """Insert blocks into a model that change nothing until they are trained (LLaMA Pro, Wu et al.
    2024), for the train types bnb_llama_pro and hqq_llama_pro. The result is a model folder; its
    config.json lists the new blocks.
    """
    model, out = _folders(args)
    from fsdp_qlora.export.expand import expand_model

    expand_model(model, out, expansion_rate=args.expansion_rate)
