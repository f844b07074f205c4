"""Preferences on rows with images train adapters in towers as a plain loop of PEFT does."""

import functools
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.config.text import TOWERS
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS
from tests.helpers.run import train_ok
from tests.parity.test_images import OPTIONS, check_as_plain
from tests.parity.test_tower_adapters import DECODER, LAYERS, WORDS
from tests.preferences.image_pairs import STEPS, make_model, plain, write_image_pairs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_model(tmp_path_factory.mktemp(family), family)
        write_image_pairs(folder)
        return folder

    return make


def options_of(folder: Path, family: str, objective: str, ranks: int) -> dict[str, Any]:
    return {
        **OPTIONS,
        "model_name": folder,
        "dataset": folder / ("labels.jsonl" if objective == "kto" else "pairs.jsonl"),
        "objective": objective,
        "num_epochs": STEPS,
        "lora_target_modules": ",".join((*LINEARS, *WORDS.get(family, TOWERS))),
        "batch_size": 2,
        "gradient_accumulation_steps": 4 // ranks,
    }


@pytest.mark.parametrize(
    ("family", "objective", "ranks", "changed"),
    [
        ("qwen3_vl", "dpo", 2, {"recompute": "all", "use_cpu_offload": True}),
        ("gemma3", "dpo", 1, {"recompute": "none"}),
        ("qwen3_vl", "kto", 1, {}),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                ("qwen3_vl", "dpo", 1, {"recompute": "none"}),
                ("gemma3", "dpo", 2, {"recompute": "all"}),
                ("qwen3_vl", "orpo", 2, {"recompute": "none"}),
                ("gemma3", "kto", 2, {}),
                ("qwen3_vl", "dpo", 2, {"precompute_reference": True}),
            )
        ),
    ],
)
def test_towers_train_on_preferences_as_in_a_plain_loop(
    family, objective, ranks, changed, folders, tmp_path
):
    folder = folders(family)
    train_ok(ranks, tmp_path / "out", **options_of(folder, family, objective, ranks), **changed)
    layers = rf"model\.({DECODER}|{LAYERS[family]})"
    check_as_plain(tmp_path / "out", plain(family, folder, objective, layers))
