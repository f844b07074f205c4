"""llama.cpp's converters are found, run on what training made, and their failures are reported."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_qlora.__main__ import main
from fsdp_qlora.data.text.rendering import prompt_record
from fsdp_qlora.data.text.templates import TEMPLATES, find_template
from tests.commands.test_merge import make_adapter

Models = Callable[..., Path]
# It writes its own arguments as the file, and fails where the folder's name says so.
STAND_IN = """\
import json, sys
out = sys.argv[sys.argv.index("--outfile") + 1]
open(out, "w").write(json.dumps(sys.argv[:1] + [word for word in sys.argv[1:] if word != out]))
sys.exit(3 if "broken" in sys.argv[1] else 0)
"""
QUANTIZER = f"""\
#!{sys.executable}
import sys
if sys.argv[1] == "--help":
    print("Allowed: 15 or Q4_K_M : 4.58G")
else:
    source, out, kind = sys.argv[1:]
    open(out, "w").write(kind + open(source).read())
"""


def stand_in_llama_cpp(clone: Path) -> Path:
    """A folder with programs of the names of llama.cpp's, which record how they are called."""
    (clone / "build/bin").mkdir(parents=True)
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (clone / name).write_text(STAND_IN)
    quantizer = clone / "build/bin/llama-quantize"
    quantizer.write_text(QUANTIZER)
    quantizer.chmod(0o755)
    return clone


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    return stand_in_llama_cpp(tmp_path / "llama.cpp")


def convert(*argv: object) -> int:
    return main(["gguf", *map(str, argv)])


def test_models_and_adapters_are_given_to_the_converter_that_is_found(
    clone: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged, out = tmp_path / "merged", tmp_path / "out.gguf"
    merged.mkdir()
    (merged / "training.json").write_text(json.dumps({"base": {"name": "owner/base"}}))
    of_model = [str(clone / "convert_hf_to_gguf.py"), str(merged), "--outtype", "q8_0", "--outfile"]
    assert convert("--model", merged, "--out", out, "--type", "q8_0", "--llama_cpp", clone) == 0
    assert json.loads(out.read_text()) == [*of_model, "--model-name", "base"]
    base, out = models("llama"), tmp_path / "lora.gguf"
    adapter = make_adapter(base, tmp_path / "adapter", rank_pattern={"k_proj": 2})
    monkeypatch.setenv("LLAMA_CPP", str(clone))
    assert convert("--adapter", adapter, "--base", base, "--out", out) == 0
    of_adapter = [str(clone / "convert_lora_to_gguf.py"), str(adapter), "--outtype", "f16", "--outfile"]
    assert json.loads(out.read_text()) == [*of_adapter, "--base", str(base)]
    assert convert("--model", merged, "--out", tmp_path / "q4.gguf", "--type", "q4_k_m") == 0
    assert (tmp_path / "q4.gguf").read_text().startswith('q4_k_m["') and '"f16"' in (tmp_path / "q4.gguf").read_text()
    assert not list(tmp_path.glob(".*"))


def test_gguf_refuses_unsupported_input_and_leaves_no_file(
    clone: Path, models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, out, broken = models("llama"), tmp_path / "out.gguf", tmp_path / "broken"
    broken.mkdir()
    dora = make_adapter(base, tmp_path / "dora", use_dora=True)
    rslora = make_adapter(base, tmp_path / "rslora", use_rslora=True)
    adapter = make_adapter(base, tmp_path / "adapter")
    (tmp_path / "theirs.gguf").touch()
    given = ("--llama_cpp", clone)
    for argv, words in {
        ("--model", broken, *given): "convert_hf_to_gguf.py ended with status 3",
        ("--model", base, "--llama_cpp", tmp_path): "run `git clone https://github.com/ggml-org/llama.cpp`",
        ("--model", base, "--type", "q4_k_z", *given): "--type q4_k_z is not a type that",
        ("--adapter", adapter, "--base", base, "--type", "q4_k_m", *given): "an adapter is written as auto, bf16",
        ("--adapter", dora, "--base", base, *given): "has use_dora, which llama.cpp does not apply",
        ("--adapter", rslora, "--base", base, *given): "has use_rslora, which llama.cpp does not apply",
        ("--adapter", adapter): "--adapter needs --base",
        ("--model", tmp_path / "absent"): "there is no such folder",
        ("--model", base, "--out", tmp_path / "theirs.gguf"): "exists already",
        (): "Give --model DIR or --adapter DIR",
    }.items():
        assert convert("--out", out, *argv) == 2, words
        assert words in capfd.readouterr().err
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_a_modelfile_has_the_prompt_format_of_the_training(tmp_path: Path) -> None:
    folder, modelfile = tmp_path / "merged", tmp_path / "Modelfile"
    folder.mkdir()
    (tmp_path / "template.txt").write_text("Q: {question}\nA: {answer} <end>")
    records = {
        "alpaca": prompt_record("alpaca", find_template(None)),
        "with an end": prompt_record("alpaca", find_template(str(tmp_path / "template.txt"))),
        "text": {"kind": "text"},
        "chat": {"kind": "chat", "chat_template": None},
    }
    written = {}
    for name, record in records.items():
        (folder / "training.json").write_text(json.dumps({"prompt": record}))
        assert convert("--model", folder, "--modelfile", modelfile) == 0
        first, _, written[name] = modelfile.read_text().partition("\n")
        assert first == f"FROM {folder}"
        modelfile.unlink()
    alpaca = "{{ .System }}\n\n### Instruction:\n{{ .Prompt }}\n\n### Response:{{ .Response }}"
    system = TEMPLATES["alpaca"].system_without_context
    assert written == {
        "alpaca": f'TEMPLATE """{alpaca}"""\nSYSTEM """{system}"""\n',
        "with an end": 'TEMPLATE """Q: {{ .Prompt }}\nA: {{ .Response }} <end>"""\nPARAMETER stop """<end>"""\n',
        "text": 'TEMPLATE """{{ .Prompt }}"""\n',
        "chat": "",  # Ollama reads it from the model's files
    }


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no clone of llama.cpp")
def test_llama_cpp_itself_converts_an_adapter(models: Models, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    base, out = models("llama"), tmp_path / "lora.gguf"
    adapter = make_adapter(base, tmp_path / "adapter", lora_alpha=12)
    assert convert("--adapter", adapter, "--base", base, "--out", out, "--type", "f32") == 0
    reader = gguf.GGUFReader(out)
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(written) == 2 * 14 and reader.fields["adapter.lora.alpha"].contents() == 12
    for which in "AB":
        ours = tensors[f"base_model.model.model.layers.1.mlp.up_proj.lora_{which}.weight"]
        assert torch.equal(torch.tensor(written[f"blk.1.ffn_up.weight.lora_{which.lower()}"]), ours)
