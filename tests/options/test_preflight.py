"""What is wrong with files and folders is said before torch is imported."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.commands.train import refuse_early
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.data.sources.file_content import PACKED
from fsdp_qlora.data.sources.files import FILE_KINDS
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import ROOT, flags

pytestmark = pytest.mark.quick


def test_missing_files_are_named_without_torch():
    options = {
        "model_name": "./absent",
        "dataset": "rows.jsonl:0.5",
        "eval_dataset": "chat=../x",
        "sample_prompts": "p.txt",
    }
    code = (
        "import sys, train; print(train.main(sys.argv[1:]), {'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    command = [sys.executable, "-c", code, *flags(**options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    for option, value in options.items():
        assert f"{option} {value}: there is no such " in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_name": "."}, "has no config.json"),
        ({"model_name": "owner/model"}, "model_name owner/model: there is no such local folder"),
        ({"dataset": "alpaka"}, "Did you mean 'alpaca'?"),
        ({"dataset": "rows.jsonl"}, "missing columns. It has: x, y."),
        ({"dataset": "texts.jsonl", "columns": "output=z"}, "columns: "),
    ],
)
def test_names_and_columns_are_refused_without_torch(options, said, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"x": 1, "y": 2}\n')
    (tmp_path / "texts.jsonl").write_text('not JSON\n{"text": "a"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = (
        "import sys, train; print(train.main(sys.argv[1:]), {'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        *flags(**{"model_name": "model", "dataset": "texts.jsonl", **options}),
    ]
    places = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=places, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 set()\n" and said in done.stderr


def test_a_file_of_each_kind_is_known_by_its_name():
    for name in (f"rows{kind}{packed}" for kind, packed in product(FILE_KINDS, ["", *PACKED])):
        with pytest.raises(UserError, match=rf"dataset {name}: there is no such file"):
            refuse_early(TrainConfig(dataset=(name,)))


def test_names_of_the_hub_and_files_that_are_there_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    Path("a=b.jsonl").touch()
    words = (
        "owner/model --dataset owner/rows:main[train][:100] rows.jsonl[test]:0.5 a=b.jsonl:0.5 "
        "alpaca"
    )
    refuse_early(parse_train_config(["--model_name", *words.split()]))


def test_other_options_of_an_unfinished_run_are_named(tmp_path):
    config = TrainConfig(output_dir=str(tmp_path))
    record = {"run_id": "1", "facts": {}, "world_size": 2, "global_batch_size": 2}
    (tmp_path / "run.json").write_text(json.dumps({**record, "options": resolved_options(config)}))
    refuse_early(config)
    with pytest.raises(
        UserError,
        match=r"unfinished run with other settings:\n  --lora_rank was 16 and is 8",
    ):
        refuse_early(TrainConfig(output_dir=str(tmp_path), lora_rank=8))
    refuse_early(TrainConfig(output_dir=str(tmp_path), lora_rank=8, resume="auto:replace"))
