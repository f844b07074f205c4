"""`gguf`: a merged model, or an adapter, as a GGUF file for llama.cpp."""

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

DESCRIPTION = (
    "Write a merged model as a GGUF file, for llama.cpp and what is built on it. llama and qwen2 with a byte-level BPE "
    "tokenizer are converted here, in f16, q8_0 or f32; other models and types by llama.cpp's own programs, in "
    "--llama_cpp. With --adapter instead of --model it is the LoRA adapter alone, for a base in GGUF."
)
_OWN = ("f16", "q8_0", "f32")
_OF_CONVERTER = (*_OWN, "bf16", "auto")  # of llama.cpp's script; its other types come from llama-quantize


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder of a model, such as one of `merge`")
    parser.add_argument("--adapter", metavar="DIR", help="folder of a LoRA adapter")
    parser.add_argument("--base", metavar="DIR", help="the adapter's base; only its config.json is needed")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to make")
    parser.add_argument("--type", default="f16", help="f16, q8_0 or f32; with --llama_cpp also q4_k_m and the like")
    parser.add_argument("--llama_cpp", metavar="DIR", help="folder of llama.cpp, whose programs convert then")


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not fit together. Raises UserError."""
    if bool(args.model) == bool(args.adapter):
        raise UserError("Give --model DIR or --adapter DIR.")
    if args.adapter and not args.base:
        raise UserError("--adapter needs --base DIR: the adapter's base, or a folder with its config.json.")
    if Path(args.out).exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.type not in _OWN and not args.llama_cpp:
        raise UserError(f"--type {args.type} is made by llama.cpp's programs: give its folder in --llama_cpp.")
    if (folder := Path(args.model or args.adapter)) and not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")


def run(args: argparse.Namespace) -> None:
    """Convert as the options say."""
    check(args)
    logging.getLogger("gguf").setLevel(logging.WARNING)  # the package tells of partial files and bytes' order
    out = Path(args.out)
    if args.llama_cpp:
        _convert_there(args, Path(args.llama_cpp), out)
    else:
        try:
            from fsdp_qlora.gguf_export.write import write_adapter, write_model
        except ModuleNotFoundError as error:
            raise UserError('gguf needs the package gguf: pip install "fsdp_qlora[gguf]"') from error
        if args.model:
            write_model(Path(args.model), out, args.type)
        else:
            write_adapter(Path(args.adapter), Path(args.base), out)
    log.info("Saved: %s (%.2f GB)", out, out.stat().st_size / 1e9)


def _convert_there(args: argparse.Namespace, folder: Path, out: Path) -> None:
    """Convert with llama.cpp's own programs."""
    if args.adapter:
        words = [_program(folder, "convert_lora_to_gguf.py"), args.adapter, "--base", args.base, "--outfile", str(out)]
        _call([sys.executable, *words])
        return
    script = _program(folder, "convert_hf_to_gguf.py")
    if args.type in _OF_CONVERTER:
        _call([sys.executable, script, args.model, "--outfile", str(out), "--outtype", args.type])
        return
    quantize = _program(folder, "llama-quantize", "build/bin/llama-quantize")
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".gguf_") as name:
        half = str(Path(name) / "f16.gguf")
        _call([sys.executable, script, args.model, "--outfile", half, "--outtype", "f16"])
        _call([quantize, half, str(out), args.type])


def _program(folder: Path, *names: str) -> str:
    for name in names:
        if (folder / name).is_file():
            return str(folder / name)
    raise UserError(
        f"--llama_cpp {folder} has no {' or '.join(names)}. Give a clone of llama.cpp, built for its types."
    )


def _call(command: list[str]) -> None:
    log.info("Running: %s", " ".join(command))
    if status := subprocess.run(command, check=False).returncode:
        raise UserError(f"{Path(command[-1 if command[0] != sys.executable else 1]).name} ended with status {status}.")
