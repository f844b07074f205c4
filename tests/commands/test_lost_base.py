"""An adapter whose base is in a folder: where it is found, and what is said where it is not."""

import json
from pathlib import Path

import pytest
import yaml

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import run_options
from tests.commands.test_merge import make_adapter

pytestmark = pytest.mark.quick


def _with_base(adapter: Path, name: str) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": name}))
    return adapter


@pytest.mark.parametrize("command", ["merge", "generate", "evaluate"])
@pytest.mark.parametrize("noted", ["Qwen3-8B", "owner/Qwen3-8B", "elsewhere/models/qwen"])
def test_a_base_that_is_elsewhere_is_asked_for_before_anything_is_loaded(
    command, noted, models, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    adapter = _with_base(make_adapter(models("llama"), tmp_path / "adapter"), noted)
    more = {
        "merge": ["--out", "x"],
        "generate": ["--prompt", "hi"],
        "evaluate": ["--dataset", "alpaca_demo"],
    }
    assert main([command, str(adapter), *more[command]]) == 2
    said = capsys.readouterr().err
    assert noted in said and said.endswith("Give the base model's place with --model_name.\n")
    assert run_options(adapter, ["--model_name", "other/base"]).model_name == "other/base"


def test_a_services_checkpoint_is_read_with_the_services_options(models, tmp_path):
    base = models("llama")
    service = tmp_path / "service"
    checkpoint = service / "1f:train:0/weights/home"
    checkpoint.parent.mkdir(parents=True)
    _with_base(make_adapter(base, checkpoint), base.name)
    (service / "service.db").touch()
    (service / "config.yaml").write_text(
        yaml.safe_dump({"model_name": str(base), "train_type": "lora"})
    )
    found = run_options(checkpoint, [])
    assert (found.model_name, found.train_type) == (str(base), "lora")
