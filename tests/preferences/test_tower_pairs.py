"""Preferences on rows with images train adapters in towers as a plain loop of PEFT does."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_qlora.config.text import TOWERS
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS
from tests.helpers.run import flags, on_ranks, train_ok
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


def _with_the_policys_features(argv: list[str]) -> int:
    """A run whose reference gets the policy's features of images."""
    import train
    from fsdp_qlora.sharding import reference_towers
    from fsdp_qlora.sharding.both_states import put_behind

    def put_policy_behind(policy: Any, reference: Any) -> Any:
        return put_behind(policy, policy)

    with mock.patch.object(reference_towers, "put_behind", put_policy_behind):
        return train.main(argv)


def test_a_reference_with_features_of_the_policy_is_found_at_the_start(folders, tmp_path):
    options = options_of(folders("qwen3_vl"), "qwen3_vl", "dpo", ranks=2)
    argv = flags(output_dir=tmp_path / "out", quant_cache="off", log_to="stdout", **options)
    statuses, said = on_ranks(2, _with_the_policys_features, (argv,), tmp_path / "logs")
    assert statuses == [2, 2]
    assert "takes values of images from the policy to the reference" in said


@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_towers_train_on_preferences_in_16_bits_near_float32(objective, folders, tmp_path):
    found = []
    for ranks, precision in ((1, "fp32"), (2, "bf16")):
        options = options_of(folders("gemma3"), "gemma3", objective, ranks)
        out = tmp_path / precision
        train_ok(ranks, out, **{**options, "precision": precision})
        found.append((read_metrics(out), read_metrics(out, "grad_norm")))
    for in_32_bits, in_16_bits in zip(*found, strict=True):
        assert in_16_bits == pytest.approx(in_32_bits, rel=2e-2) and in_16_bits != in_32_bits


def test_an_adapter_with_towers_is_the_reference_of_a_further_run(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = options_of(folder, "qwen3_vl", "dpo", ranks=2)
    train_ok(2, tmp_path / "first", **options)
    further = {name: value for name, value in options.items() if "lora" not in name}
    further |= {"adapter": tmp_path / "first"}
    records = []
    for name, changed in (("beside", {}), ("before", {"precompute_reference": True})):
        train_ok(2, tmp_path / name, **further, **changed)
        records.append(read_metrics(tmp_path / name))
    # A step from the reference begins at log 2.
    assert records[0] == pytest.approx(records[1], rel=1e-5)
    assert records[0][0] == pytest.approx(0.693147, rel=1e-5) != records[0][-1]
    config = json.loads((tmp_path / "beside" / "adapter_config.json").read_text())
    assert any("visual" in path for path in config["target_modules"])
