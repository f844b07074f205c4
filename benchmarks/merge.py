"""Peak memory and seconds of `merge`: `python benchmarks/merge.py`.

Makes a random bf16 llama of 1.5 GB with untied embeddings and a LoRA adapter of rank 16 on every linear layer, then
merges in fresh processes. Memory is the whole process's peak resident memory, with Python and torch. Exits with 1 if
it is above the two largest tensors and 600 MB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MORE_BYTES = 600e6
MEASURED = """
import json, re, sys
from fsdp_qlora.__main__ import main
status = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())  # rusage has that of the parent too
print(json.dumps({"status": status, "peak": int(peak[1]) * 1024}))
"""


def make(folder: Path, args: argparse.Namespace) -> int:
    """The base and the adapter; returns the bytes of the two largest tensors."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=args.hidden // 256,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="500MB")
    sizes = sorted(parameter.nbytes for parameter in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(str(folder / "adapter"))
    print(f"{sum(sizes) / 1e9:.2f} GB, the two largest tensors {sum(sizes[-2:]) / 1e6:.0f} MB", flush=True)
    return sum(sizes[-2:])


def measure(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "out"
    command = [sys.executable, "-c", MEASURED, "merge", "--adapter", str(folder / "adapter"), "--out", str(out)]
    command += ["--model_name", str(folder / "base"), *words]
    started = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found.pop("status") == 0
    shutil.rmtree(out)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        allowed = make(folder, args) + MORE_BYTES
        for title, words in {
            "original": (),
            "dequantized (nf4)": ("--base", "dequantized", "--train_type", "qlora"),
        }.items():
            results[title] = measure(folder, *words)
            print(f"{title}: {results[title]['peak'] / 1e6:.0f} MB, allowed {allowed / 1e6:.0f}", flush=True)
    if args.output:
        args.output.write_text(json.dumps({"allowed": allowed, **results}, indent=2) + "\n")
    sys.exit(any(result["peak"] > allowed for result in results.values()))


if __name__ == "__main__":
    main()
