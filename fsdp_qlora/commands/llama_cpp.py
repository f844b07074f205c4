"""Converts models and adapters to GGUF with llama.cpp's own programs."""

import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

_OF_CONVERTER = ("f16", "q8_0", "f32", "bf16", "auto")  # other types come from llama-quantize


def convert_model(llama_cpp: Path, model: Path, out: Path, kind: str) -> None:
    """Convert a model folder.

    Args:
        llama_cpp: a clone, built for types such as q4_k_m.
    Raises:
        UserError: a program is missing or fails.
    """
    script = _program(llama_cpp, "convert_hf_to_gguf.py")
    if kind in _OF_CONVERTER:
        _call([sys.executable, script, str(model), "--outfile", str(out), "--outtype", kind])
        return
    quantize = _program(llama_cpp, "llama-quantize", "build/bin/llama-quantize")
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".gguf_") as name:
        half = str(Path(name) / "f16.gguf")
        _call([sys.executable, script, str(model), "--outfile", half, "--outtype", "f16"])
        _call([quantize, half, str(out), kind])


def convert_adapter(llama_cpp: Path, adapter: Path, base: Path, out: Path) -> None:
    """Convert a LoRA adapter. Raises UserError as `convert_model`."""
    script = _program(llama_cpp, "convert_lora_to_gguf.py")
    _call([sys.executable, script, str(adapter), "--base", str(base), "--outfile", str(out)])


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
        raise UserError(f"{Path(command[command[0] == sys.executable]).name} ended with status {status}.")
