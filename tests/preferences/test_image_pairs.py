"""Preferences on rows with images train as in a plain loop of PEFT."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.reference import LINEARS
from tests.helpers.run import train_ok
from tests.parity.test_images import OPTIONS, PROCESSORS, check_as_plain
from tests.parity.test_multimodal import make_multimodal
from tests.preferences.image_pairs import STEPS, plain, write_image_pairs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_multimodal(tmp_path_factory.mktemp(family), family)
        PROCESSORS[family](folder)
        write_image_pairs(folder)
        return folder

    return make


def options_of(folder: Path, objective: str) -> dict[str, Any]:
    return {
        **OPTIONS,
        "model_name": folder,
        "dataset": folder / ("labels.jsonl" if objective == "kto" else "pairs.jsonl"),
        "objective": objective,
        "num_epochs": STEPS,
        "lora_target_modules": ",".join(LINEARS),
    }


@pytest.mark.parametrize(
    ("family", "objective", "ranks", "changed"),
    [
        ("qwen3_vl", "dpo", 2, {"recompute": "all", "use_cpu_offload": True}),
        ("gemma3", "dpo", 1, {"recompute": "none"}),
        ("qwen3_vl", "kto", 1, {}),
        ("qwen3_vl", "orpo", 1, {}),
    ],
)
def test_preferences_on_images_train_as_in_a_plain_loop(
    family, objective, ranks, changed, folders, tmp_path
):
    folder = folders(family)
    output = train_ok(
        ranks,
        tmp_path / "out",
        **options_of(folder, objective),
        batch_size=2,
        gradient_accumulation_steps=4 // ranks,
        **changed,
    )
    assert ("Rows are padded" in output) == (family == "gemma3")
    check_as_plain(tmp_path / "out", plain(family, folder, objective))
