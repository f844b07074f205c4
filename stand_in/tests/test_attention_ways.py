"""The ways of attention on a card, by the operators that torch's CUDA build calls."""

import json

import pytest

from stand_in.environment import run

CUDNN = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
}
FLASH = {"aten::_flash_attention_forward", "aten::_flash_attention_backward"}


@pytest.mark.parametrize(
    ("settings", "equal", "missing"),
    [
        ({"PHANTOM_CC": 89, "PHANTOM_CUDNN": 91900}, {"plain": FLASH, "cudnn": CUDNN}, {}),
        pytest.param(
            {"PHANTOM_CC": 90},
            {"plain": FLASH},
            {"cudnn": "torch does not take it here"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ways_call_their_operators_and_never_wait(settings, equal, missing, tmp_path):
    program = ["-m", "stand_in.programs.attention_ways"]
    [ended] = run(program, tmp_path, settings={"PHANTOM_VALUES": 1, **settings})
    assert ended.status == 0, ended.output[-3000:]
    found = json.loads(next(line for line in ended.output.splitlines() if line[:1] == "{"))
    of_one_length = found["(128, 128)"]
    called = {name: {*way["called"]} for name, way in of_one_length["ways"].items()}
    assert called == equal
    without_flash4 = {key: why for key, why in of_one_length["missing"].items() if key != "fa4"}
    assert without_flash4 == missing and "fa4" in of_one_length["missing"]
    assert [*found["(128, 60)"]["ways"]] == ["plain"]
    for lengths in found.values():
        for way in lengths["ways"].values():
            assert way["syncs"] == 0 and way["error"] < 5e-3
