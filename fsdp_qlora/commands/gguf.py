"""The command `gguf`: a merged model or an adapter as a file for llama.cpp or Ollama."""

import argparse
import logging
from pathlib import Path

from fsdp_qlora.commands.run_config import adapter_folder
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import refusal_named, staged_file
from fsdp_qlora.utils.text import format_bytes

log = logging.getLogger("fsdp_qlora")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder of a model, such as one that `merge` wrote")
    parser.add_argument("--adapter", metavar="DIR", help="folder of a LoRA adapter, or its name on the hub")
    parser.add_argument("--base", metavar="DIR", help="the adapter's base; a GGUF file needs its config.json alone")
    parser.add_argument("--out", metavar="FILE", help="GGUF file to write")
    parser.add_argument(
        "--type",
        default="f16",
        help="f16 (the default), bf16, f32, q8_0, auto, or a type of llama-quantize such as q4_k_m",
    )
    parser.add_argument("--llama_cpp", metavar="DIR", help="clone of llama.cpp (default: LLAMA_CPP, then PATH)")
    parser.add_argument("--modelfile", metavar="FILE", help="Modelfile to write, for `ollama create NAME -f FILE`")


def run(args: argparse.Namespace) -> None:
    """Write a merged model as a GGUF file with llama.cpp's own converter, convert_hf_to_gguf.py. With --adapter instead
    of --model it is the LoRA adapter alone, by convert_lora_to_gguf.py, for a base in GGUF. --modelfile writes a
    Modelfile for Ollama; without --out it names the folders themselves, because Ollama reads safetensors.
    """
    if bool(args.model) == bool(args.adapter):
        raise UserError("Give --model DIR or --adapter DIR.")
    if args.adapter and not args.base:
        raise UserError("--adapter needs --base DIR: the adapter's base, or a folder with its config.json.")
    if not args.out and not args.modelfile:
        raise UserError("Give --out FILE, --modelfile FILE, or both.")
    for option in ("out", "modelfile"):
        if (name := getattr(args, option)) and Path(name).exists():
            raise UserError(f"--{option} {name} exists already. Give another file.")
    folder = Path(args.model) if args.model else adapter_folder(args.adapter)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    from fsdp_qlora.export import llama_cpp

    base = Path(args.base) if args.adapter else None
    if base:
        llama_cpp.check_adapter(folder)
    out = Path(args.out) if args.out else folder
    if args.out:
        llama_cpp.write_gguf(folder, out, args.type, base=base, llama_cpp=args.llama_cpp)
        log.info("Saved: %s (%s)", out, format_bytes(out.stat().st_size))
    if args.modelfile:
        text = llama_cpp.modelfile(base or out, out if base else None, folder)
        with refusal_named("modelfile", args.modelfile), staged_file(Path(args.modelfile)) as partial:
            partial.write_text(text, encoding="utf-8")
        log.info("Saved: %s (use it: ollama create NAME -f %s)", args.modelfile, args.modelfile)
