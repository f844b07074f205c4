"""Names of models that `plan` knows: how they are written, what is near them, and what `train`
takes for them.
"""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.planning.known_models import KNOWN_MODELS, known_sizes
from fsdp_qlora.planning.offers.describe import command_line
from fsdp_qlora.utils.hub import is_hub_name

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def _trained(**options: Any) -> TrainConfig:
    """The options of the command that a plan prints, read from it as a shell and `train` do."""
    placed = SimpleNamespace(placement=SimpleNamespace(options={"sharding_strategy": "full_shard"}))
    run: Any = SimpleNamespace(
        config=TrainConfig(**options),
        placed=placed,
        gpus=SimpleNamespace(num_gpus=2),
    )
    program, command, *words = shlex.split(command_line(run))
    assert (program, command) == ("fsdp-qlora", "train")
    assert {"--model_name", "--dataset"} <= {*words}
    return parse_train_config(words)


def test_the_command_of_a_plan_names_the_models_owner():
    for name in KNOWN_MODELS:
        trained = _trained(model_name=name, teacher=name, objective="distill")
        assert is_hub_name(trained.model_name) and trained.teacher == trained.model_name
        assert known_sizes(trained.model_name) == known_sizes(name) is not None, name


@pytest.mark.parametrize(
    ("written", "trained"),
    [
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("llama3.1:70b", "meta-llama/Llama-3.1-70B"),
        ("qwq-32b", "Qwen/QwQ-32B"),  # has the sizes of another model
        ("qwen3-8b-base", "Qwen/Qwen3-8B-Base"),
        ("gemma-3-4b-it", "google/gemma-3-4b-it"),  # the table has -pt
        ("mistral-7b-instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("someone/qwen3-8b", "someone/qwen3-8b"),
        ("{folder}", "{folder}"),
        ("{folder}/config.json", "{folder}"),
    ],
)
def test_a_planned_model_is_trained_by_its_hub_name_or_folder(written, trained, tmp_path):
    folder = tmp_path / "a model's"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert _trained(model_name=written.format(folder=folder)).model_name == trained.format(
        folder=folder
    )


def test_train_refuses_a_plans_own_name_with_that_of_the_hub(capsys):
    assert main(["train", "--model_name", "gpt-oss-20b", "--dataset", "alpaca_demo"]) == 2
    assert "openai/gpt-oss-20b" in capsys.readouterr().err


GEMMA_4 = ["gemma-4-e2b", "gemma-4-e4b", "gemma-4-26b-a4b", "gemma-4-31b"]
LLAMA_3 = [
    *("llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
    *("llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b"),
]


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("Gemma 4", GEMMA_4),
        ("google/gemma-4-12b-it", GEMMA_4),
        ("gema4", GEMMA_4),
        ("llama 3", LLAMA_3),
        ("lama-3-9b", LLAMA_3),
        ("gpt oss", ["gpt-oss-20b", "gpt-oss-120b"]),
        ("gptoss-200b", ["gpt-oss-20b", "gpt-oss-120b"]),
        ("Llama-4-Maverick", ["llama-4-scout"]),
        ("smollm2", ["smollm2-135m", "smollm2-360m", "smollm2-1.7b"]),
        ("nothing-like-it", []),
    ],
)
def test_an_unknown_size_is_refused_with_all_of_its_family(written, near, capsys):
    assert main(["plan", "--gpu", "H100", "--model_name", written]) == 2
    said = capsys.readouterr().err
    listed = said.partition("with similar names: ")[2].rstrip(".\n")
    assert listed.split(", ") == (near or [""])


@pytest.mark.parametrize(
    ("written", "family"), [("Qwen3", "qwen3-"), ("quen 3", "qwen3-"), ("Mistral", "mistral-")]
)
def test_a_family_has_no_models_of_its_neighbours(written, family, capsys):
    main(["plan", "--gpu", "H100", "--model_name", written])
    listed = capsys.readouterr().err.partition("with similar names: ")[2].rstrip(".\n").split(", ")
    wanted = {
        name
        for name, entry in KNOWN_MODELS.items()
        if name.startswith(family) and not isinstance(entry, str)
    }
    assert {*listed} == wanted
