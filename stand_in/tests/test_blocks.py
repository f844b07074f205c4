"""What a decoder block of qlora asks of the GPU in a micro-batch, as docs/gpu.md says; counted on
the stand-in.
"""

import json

import pytest

from benchmarks.standin_memory import SHAPES
from stand_in.environment import run
from tests.helpers.run import ROOT


def test_a_block_keeps_what_the_formula_says_and_asks_for_so_many_kernels(tmp_path):
    [rank] = run(
        [ROOT / "stand_in/programs/blocks.py", "8b"], tmp_path, settings={"PHANTOM_GIB": 80}
    )
    assert rank.status == 0, rank.output
    found = json.loads(rank.output.splitlines()[-1])
    sizes = SHAPES["8b"]
    hidden = sizes["hidden_size"]
    inner = sizes["intermediate_size"]
    heads = 128 * sizes["num_attention_heads"]
    groups = 128 * sizes["num_key_value_heads"]
    # The inputs of both norms; queries, keys, values and what attention makes of them; gate and up:
    # in 16 bits.
    formula = 2 * (2 * hidden + 2 * heads + 2 * groups + 2 * inner)
    assert found["none"][1] == pytest.approx(formula, rel=0.05) and found["none"][0] <= 192
    assert found["all"][1] == pytest.approx(2 * hidden, rel=0.1) and found["all"][0] <= 246


@pytest.mark.slow
def test_padded_experts_ask_for_less_than_half_of_the_kernels(tmp_path):
    [rank] = run(
        [ROOT / "stand_in/programs/expert_launches.py", "2048"],
        tmp_path,
        settings={"PHANTOM_GIB": 80, "PHANTOM_CC": 86},
    )
    assert rank.status == 0, rank.output
    found = json.loads(rank.output.splitlines()[-1])
    assert found["padded"]["kernels"] <= 900 and found["plain"]["kernels"] > 2500, found
