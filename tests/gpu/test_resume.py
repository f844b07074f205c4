"""Runs on a GPU that are stopped and resumed, bit for bit the undisturbed ones with
--deterministic.
"""

import json

import pytest
from safetensors.torch import load_file

from tests.gpu.cases import COMMON
from tests.gpu.check import same
from tests.gpu.losses import output_of, run_all
from tests.helpers.metrics import read_metrics

STEPS = 6
STOP = 4
CASES = {
    "dropout": {"train_type": "qlora", "precision": "bf16", "lora_dropout": 0.1},
    "offloaded, 8 bits": {
        "train_type": "qlora",
        "precision": "bf16",
        "use_cpu_offload": True,
        "optimizer": "adamw_8bit",
    },
    "hqq_dora, fp16": {"train_type": "hqq_dora", "precision": "fp16"},
}


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """(whole runs, resumed ones): their folder, and what ended each.

    All of a kind in one process.
    """
    common = {
        **inputs(),
        **COMMON,
        "max_steps": STEPS,
        "num_epochs": 4,
        "save_every": STOP,
        "deterministic": True,
    }
    whole = tmp_path_factory.mktemp("whole")
    resumed = tmp_path_factory.mktemp("resumed")
    failures = run_all({name: {**common, **CASES[name]} for name in CASES}, whole)
    again = {
        name: {**common, **CASES[name], "resume": checkpoint}
        for name in CASES
        for checkpoint in (output_of(whole, name) / "checkpoints").glob(f"*{STOP}")
    }
    return (whole, failures), (resumed, run_all(again, resumed))


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_at_step_4_ends_as_if_never_stopped(name, runs):
    folders = []
    for folder, failures in runs:
        assert failures.get(name) == "", failures.get(name)
        folders.append(output_of(folder, name))
    whole, resumed = folders
    status = json.loads((resumed / "status.json").read_text())
    assert (status["start_step"], status["step"]) == (STOP, STEPS)
    assert read_metrics(resumed)[-2:] == read_metrics(whole)[-2:]
    found, expected = (
        load_file(folder / "adapter_model.safetensors") for folder in (resumed, whole)
    )
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        same(tensor, expected[key])
