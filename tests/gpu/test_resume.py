"""A run on a GPU that is stopped and resumed, bit for bit the undisturbed one with --deterministic."""

import json

import pytest
from safetensors.torch import load_file

from tests.gpu.cases import COMMON
from tests.gpu.check import same
from tests.gpu.runs import run
from tests.tiny import flags, read_metrics

STEPS, STOP = 6, 4


@pytest.mark.parametrize(
    "options",
    [
        {"train_type": "qlora", "precision": "bf16", "lora_dropout": 0.1},
        {"train_type": "hqq_dora", "precision": "fp16"},
        {"train_type": "qlora", "precision": "bf16", "use_cpu_offload": True, "optimizer": "adamw_8bit"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_run_resumed_at_step_4_ends_as_if_never_stopped(options, inputs, tmp_path):
    def arguments(**more):
        given = {**inputs(), **COMMON, "max_steps": STEPS, "num_epochs": 4, "save_every": STOP, "deterministic": True}
        return ["train.py", "--nproc_per_node", "1", *flags(**{**given, **options, **more})]

    run(arguments(output_dir=tmp_path / "whole"), tmp_path / "logs")
    [checkpoint] = [
        folder for folder in (tmp_path / "whole/checkpoints").iterdir() if folder.name.endswith(str(STOP))
    ]  # fmt: skip
    run(arguments(output_dir=tmp_path / "resumed", resume=checkpoint), tmp_path / "logs_resumed")
    status = json.loads((tmp_path / "resumed/status.json").read_text())
    assert (status["start_step"], status["step"]) == (STOP, STEPS)
    assert read_metrics(tmp_path / "resumed")[-2:] == read_metrics(tmp_path / "whole")[-2:]
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("resumed", "whole"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        same(tensor, expected[name])
