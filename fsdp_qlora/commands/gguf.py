"""The command `gguf`: a merged model or an adapter as a file for llama.cpp."""

import argparse
import importlib.util
import logging
from pathlib import Path

from fsdp_qlora.commands.run_config import adapter_folder
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")


_GGUF_TYPES = ("f16", "q8_0", "f32")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder of a model, such as one of `merge`")
    parser.add_argument("--adapter", metavar="DIR", help="folder of a LoRA adapter, or its name on the hub")
    parser.add_argument("--base", metavar="DIR", help="the adapter's base; only its config.json is needed")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to make")
    parser.add_argument(
        "--type", default="f16", help="f16 (the default), q8_0, f32, or with llama.cpp's package q4_k_m and the like"
    )


def run(args: argparse.Namespace) -> None:
    """Write a merged model as a GGUF file, for llama.cpp and what is built on it. Llama, Mistral, Qwen2, Qwen3 and
    Gemma models with a BPE tokenizer are converted, in f16, q8_0 or f32; the package llama-cpp-python makes q4_k_m and
    the like of the first. With --adapter instead of --model it is the LoRA adapter alone, for a base in GGUF.
    """
    if bool(args.model) == bool(args.adapter):
        raise UserError("Give --model DIR or --adapter DIR.")
    if args.adapter and not args.base:
        raise UserError("--adapter needs --base DIR: the adapter's base, or a folder with its config.json.")
    folder, out = Path(args.model) if args.model else adapter_folder(args.adapter), Path(args.out)
    if out.exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.type not in _GGUF_TYPES and (args.adapter or importlib.util.find_spec("llama_cpp") is None):
        raise UserError(
            f'--type {args.type} is made by llama.cpp, of a model: pip install "fsdp_qlora[llama-cpp]". Or write f16, '
            f"of which its program makes it: llama-quantize F16.gguf OUT.gguf {args.type}"
        )
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    try:
        from fsdp_qlora.export.gguf import write_adapter, write_model, write_quantized
    except ModuleNotFoundError as error:
        raise UserError('gguf needs the package gguf: pip install "fsdp_qlora[gguf]"') from error
    if args.adapter:
        write_adapter(folder, Path(args.base), out)
    elif args.type in _GGUF_TYPES:
        write_model(folder, out, args.type)
    else:
        write_quantized(folder, out, args.type)
    log.info("Saved: %s (%.2f GB)", out, out.stat().st_size / 1e9)
