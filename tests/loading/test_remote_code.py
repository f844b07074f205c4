"""Models that bring Python code of their own: it runs when it was asked for, and only then."""

import json
import shutil
from pathlib import Path

import pytest

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok

CODE = """
import os, pathlib
pathlib.Path({marker!r}).touch()
from transformers import {base} as Base
class {name}(Base):
{body}
"""


def make_own(source: Path, folder: Path, marker: Path, *, model: bool) -> Path:
    """A copy of a llama with config and model (or only the tokenizer) in code of its own."""
    shutil.copytree(source, folder)

    def edit(file: str, **changes: object) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **changes}))

    def write(file: str, base: str, name: str, body: str) -> None:
        (folder / file).write_text(CODE.format(marker=str(marker), base=base, name=name, body=body))

    if model:
        write("own_config.py", "LlamaConfig", "OwnConfig", "    model_type = 'own'")
        body = "    from .own_config import OwnConfig as config_class"
        write("own_model.py", "LlamaForCausalLM", "OwnModel", body)
        auto_map = {
            "AutoConfig": "own_config.OwnConfig",
            "AutoModelForCausalLM": "own_model.OwnModel",
        }
        edit("config.json", model_type="own", architectures=["OwnModel"], auto_map=auto_map)
    else:
        write("own_tokenizer.py", "PreTrainedTokenizerFast", "OwnTokenizer", "    pass")
        auto_map = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
        edit("tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    return folder


@pytest.mark.parametrize("model", [True, False], ids=["model", "tokenizer"])
def test_remote_code_runs_only_with_trust_remote_code(model, models, tmp_path):
    marker = tmp_path / "has_run"
    folder = make_own(models(), tmp_path / "model", marker, model=model)
    common = {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "lr": 1e-3,
        "precision": "fp32",
    }
    statuses, output = run_ranks(
        1, flags(model_name=folder, output_dir=tmp_path / "out", **common), tmp_path / "logs"
    )
    if model:
        assert (
            statuses == [2]
            and ("needs its own Python code") in output
            and ("--trust_remote_code true") in output
        )
    assert not marker.exists()
    output = train_ok(2, tmp_path / "own", model_name=folder, trust_remote_code=True, **common)
    assert marker.exists() and "The model's own code may run (--trust_remote_code)" in output
    assert "own_config.py" in output if model else "own_tokenizer.py" in output
    train_ok(2, tmp_path / "plain", model_name=models(), **common)
    assert read_metrics(tmp_path / "own") == read_metrics(tmp_path / "plain")


def test_a_results_config_cannot_enable_remote_code(models, tmp_path, capsys):
    marker = tmp_path / "has_run"
    run = tmp_path / "run"
    folder = make_own(models(), tmp_path / "model", marker, model=True)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(6))
    options = {
        "model_name": folder,
        "dataset": rows,
        "max_steps": 1,
        "eval_fraction": 0.3,
        "trust_remote_code": True,
    }
    train_ok(1, run, **options)  # config.yaml and state.json say all of this
    published = shutil.copytree(run / "best", tmp_path / "published")
    record = json.loads((published / "training.json").read_text())
    more = {"trust_remote_code": True, "lora_target_modules": ["all", "--trust_remote_code=true"]}
    record["settings"] |= more
    record["base"]["name"] = str(folder)
    (published / "training.json").write_text(json.dumps(record))
    marker.unlink()
    out = flags(out=tmp_path / "out")
    for argv in (
        ["generate", *flags(adapter=run, prompt="red", nproc_per_node=1)],
        ["generate", *flags(adapter=run / "best", prompt="red", nproc_per_node=1)],
        ["evaluate", *flags(adapter=published, dataset=rows, nproc_per_node=1)],
        ["merge", *flags(adapter=published), *out],
        ["merge", *flags(adapter=run), *out],
        ["export", str(run), *out],
    ):
        assert main(argv) == 2 and not marker.exists(), argv
        assert capsys.readouterr().err.count("error: ") == 1
    assert (
        main(["merge", *flags(adapter=run, trust_remote_code=True), *out]) == 0 and marker.exists()
    )
