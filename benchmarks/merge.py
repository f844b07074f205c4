"""Peak memory and seconds of `merge`: `python -m benchmarks.merge [--shape 70b]`.

Writes a random llama in bf16 (some blocks, embeddings and head) and a LoRA adapter of rank 16 on
every linear layer; then merges in fresh processes. Memory is the whole process's peak resident
memory, with Python and torch. Needs twice the model's size on disk (`--folder`), which is free
again at the end. Exits with 1 above the two largest tensors and 600 MB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import describe_machine, write_results
from fsdp_qlora.utils.safetensors_files import PackedFiles, TensorForm

ROOT = Path(__file__).resolve().parent.parent
RANK = 16
MORE_BYTES = 600e6
SHAPES = {
    "1.4 GB": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 12,
    },
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
    },
}
_PIECE = 2**25  # elements written at a time, the same ones again and again


MEASURED = """
import json, re, sys
from fsdp_qlora.__main__ import main
status = main(sys.argv[1:])
# rusage counts the parent too.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps({"status": status, "peak": int(peak[1]) * 1024}))
"""


def write_base(folder: Path, config: LlamaConfig) -> dict[str, torch.Size]:
    """Returns the shapes of its tensors."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    folder.mkdir()
    config.save_pretrained(folder)
    files = PackedFiles(
        folder, {name: TensorForm(torch.bfloat16, shape) for name, shape in shapes.items()}
    )
    files.create()
    values = torch.empty(_PIECE, dtype=torch.bfloat16).normal_(0, 0.02)
    for name, shape in shapes.items():
        for start in range(0, shape.numel(), _PIECE):
            files.write(name, 2 * start, values[: shape.numel() - start])
    return shapes


def write_adapter(folder: Path, base: Path, shapes: dict[str, torch.Size]) -> None:
    """A LoRA adapter in PEFT's format on all linear layers of the blocks."""
    linears = [name.removesuffix(".weight") for name in shapes if "_proj." in name]
    tensors = {}
    for name in linears:
        rows, columns = shapes[f"{name}.weight"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns) * 0.01
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK) * 0.01
    targets = sorted({name.rpartition(".")[2] for name in linears})
    adapter = LoraConfig(
        r=RANK, target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=str(base)
    )
    folder.mkdir()
    adapter.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")


def measure(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "out"
    command = [
        sys.executable,
        "-c",
        MEASURED,
        "merge",
        "--adapter",
        str(folder / "adapter"),
        "--out",
        str(out),
    ]
    command += ["--model_name", str(folder / "base"), *words]
    started = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found.pop("status") == 0
    shutil.rmtree(out)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.4 GB")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder with enough room (default: the system's temporary folder)",
    )
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        shapes = write_base(folder / "base", LlamaConfig(**SHAPES[args.shape]))
        write_adapter(folder / "adapter", folder / "base", shapes)
        sizes = sorted(2 * shape.numel() for shape in shapes.values())
        result |= {
            "model_bytes": sum(sizes),
            "largest_bytes": sizes[-2:],
            "allowed": sum(sizes[-2:]) + MORE_BYTES,
        }
        for title, words in {
            "original": (),
            "dequantized (nf4)": ("--base", "dequantized", "--train_type", "qlora"),
        }.items():
            result[title] = measure(folder, *words)
            print(json.dumps({title: result[title], "allowed": result["allowed"]}), flush=True)
    if args.output:
        command = f"python -m benchmarks.merge --shape {args.shape}"
        write_results(
            args.output, command, {"machine": describe_machine(torch.device("cpu")), **result}
        )
    return int(
        any(
            result[title]["peak"] > result["allowed"] for title in ("original", "dequantized (nf4)")
        )
    )


if __name__ == "__main__":
    sys.exit(main())
