"""The figures that the GPU's tests compare with are of this code: noticed here, where no GPU is
needed.
"""

import pytest

from tests.gpu.cases import CASES, COMMON, MODEL, fingerprint, make_models, read_reference
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok


def test_reference_losses_for_gpu_tests_match_the_code(tmp_path):
    folders = make_models(tmp_path / "models")
    reference = read_reference()
    what_to_do = "CUDA_VISIBLE_DEVICES= python -m tests.gpu.make_reference"
    assert {name: fingerprint(folder) for name, folder in folders.items()} == reference["models"], (
        what_to_do
    )
    options = {**COMMON, **CASES["qlora"].options, "model_name": folders[MODEL]}
    options["dataset"] = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    train_ok(1, tmp_path / "out", **options)
    assert read_metrics(tmp_path / "out") == pytest.approx(
        reference["losses"]["qlora"], rel=1e-5
    ), what_to_do
