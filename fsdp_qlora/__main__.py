"""`python -m fsdp_qlora COMMAND`: commands other than training.

torch is imported by a command that needs it, so that --help and the cache's list answer at once.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fsdp_qlora.errors import UserError
from fsdp_qlora.messages import shown
from fsdp_qlora.storage.locations import folder_error, is_repository


class _Command(NamedTuple):
    summary: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for bad input."""
    summaries = {name: command.summary for name, command in COMMANDS.items()} | PROGRAMS
    lines = [f"  {name:12}{summary}" for name, summary in summaries.items()]
    usage = "\n".join(["usage: python -m fsdp_qlora COMMAND [--help]", *lines, "To train: python train.py --help"])
    if argv[:1] in (["--help"], ["-h"]):
        print(usage)
        return 0
    if not argv or argv[0] not in summaries:
        print(
            f"error: {f'no command is named {argv[0]!r}' if argv else 'a command is needed'}.\n{usage}", file=sys.stderr
        )
        return 2
    name, *words = argv
    if name == "quantize" and {"--list", "--prune"} & set(words):
        print("The cache has a command of its own: python -m fsdp_qlora cache", file=sys.stderr)
        name = "cache"
    if name in PROGRAMS:
        return int(importlib.import_module(f"fsdp_qlora.program.{name}").main(words))
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"python -m fsdp_qlora {name}", description=command.description)
    command.add_options(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        command.run(parser.parse_args(words))
    except UserError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return 2
    return 0


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--model_name", help="the same as MODEL")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")


def _folders(args: argparse.Namespace) -> tuple[str, Path]:
    model = args.model or args.model_name
    if not model or not args.out:
        raise UserError("Give MODEL and --out DIR. See --help.")
    if error := folder_error("out", args.out):
        raise UserError(error)
    return model, Path(args.out)


def _quantize_options(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument("--quant_type", choices=["nf4", "fp4"], default="nf4", help="4-bit format (default: nf4)")
    parser.add_argument(
        "--double_quant", choices=["true", "false"], default="true", help="quantize the scales too (default: true)"
    )
    parser.add_argument(
        "--trust_remote_code", choices=["true", "false"], default="false", help="as in train.py (default: false)"
    )


def _quantize(args: argparse.Namespace) -> None:
    model, out = _folders(args)
    from fsdp_qlora.commands.quantize import quantize_model

    quantize_model(
        model,
        out,
        quant_type=args.quant_type,
        double_quant=args.double_quant == "true",
        trust_remote_code=args.trust_remote_code == "true",
    )


def _expand_options(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument(
        "--expansion_rate", type=float, default=0.1, help="new blocks as a share of the model's (default: 0.1)"
    )


def _expand(args: argparse.Namespace) -> None:
    model, out = _folders(args)
    from fsdp_qlora.commands.expand import expand_model

    expand_model(model, out, expansion_rate=args.expansion_rate)


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT|RUN", help="a checkpoint's folder, or a run's: its newest one")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--best", action="store_true", help="take the run's checkpoint of the lowest held-out loss")
    parser.add_argument("--model_name", help="where the run's base model is now; only its small files are needed")
    parser.add_argument("--base_name", metavar="OWNER/NAME", help="the base's name on the hub, as in train.py")
    parser.add_argument("--push_to_hub", metavar="OWNER/NAME", help="upload the result there, as in train.py")
    parser.add_argument("--push_public", action="store_true", help="make a new repository public (default: private)")


def _export(args: argparse.Namespace) -> None:
    for name in ("base_name", "push_to_hub"):
        if (value := getattr(args, name)) is not None and not is_repository(value):
            raise UserError(f"--{name} is {value!r}, but a name on the hub is OWNER/NAME.")
    if error := folder_error("out", args.out):
        raise UserError(error)
    from fsdp_qlora.commands.export import export_checkpoint

    options = {name: value for name, value in vars(args).items() if name not in ("source", "out")}
    export_checkpoint(Path(args.source).expanduser(), Path(args.out).expanduser(), **options)


def _cache_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="show the entries and their sizes (the default)")
    parser.add_argument("--json", action="store_true", help="show them for programs")
    parser.add_argument("--prune", nargs="+", metavar="KEY", help="remove entries: their keys, or all")
    parser.add_argument("--quant_cache", metavar="DIR", default="auto", help="the cache's folder, as in train.py")


def _cache(args: argparse.Namespace) -> None:
    from fsdp_qlora.commands.cache import prune, show_entries
    from fsdp_qlora.quant_cache.folders import cache_root

    root = cache_root(args.quant_cache)
    if root is None:
        raise UserError("--quant_cache off has nothing to list or prune. Give its folder, or leave it out.")
    if args.prune:
        prune(root, args.prune)
    else:
        show_entries(root, as_json=args.json)


COMMANDS = {
    "export": _Command(
        "make an adapter of a checkpoint",
        "Make of a checkpoint the folder that the run would have saved at that step: an adapter in PEFT's format with "
        "its tokenizer and card, or for full and the llama_pro types a whole model. It needs no GPU, and of the base "
        "only the small files (for the llama_pro types its weights too).",
        _export_options,
        _export,
    ),
    "quantize": _Command(
        "save a model in 4 bits",
        "Save a model in bitsandbytes' 4-bit format, as a folder that train.py and transformers load, with or without "
        "a GPU and a piece of a tensor in memory at a time (a mixture of experts is loaded by train.py only: "
        "bitsandbytes has no format for experts).",
        _quantize_options,
        _quantize,
    ),
    "expand": _Command(
        "add blocks to a model that change nothing until they are trained",
        "Add blocks to a model that change nothing until they are trained (LLaMA Pro, Wu et al. 2024), for train types "
        "bnb_llama_pro and hqq_llama_pro. The result is a model folder; its config.json says which blocks are new.",
        _expand_options,
        _expand,
    ),
    "cache": _Command(
        "list and prune the cache of quantized weights",
        "List and prune what train.py's --quant_cache keeps.",
        _cache_options,
        _cache,
    ),
}

# Commands whose modules in fsdp_qlora/program have a main(argv) of their own.
PROGRAMS = {
    "merge": "make an adapter and its base one model",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
