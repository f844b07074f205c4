"""What a decoder block asks of the GPU in a micro-batch of qlora, counted on the stand-in."""

import json

import pytest

from benchmarks.standin_memory import SHAPES
from tests.phantom.environment import run
from tests.tiny import ROOT

# With an accumulated gradient. With recompute 75 are products, 82 decode 20 weights, 40 are rotary embeddings, and 14
# are FSDP2's sums of the adapters' gradients.
MOST_KERNELS = {"all": 246, "none": 192}
MORE_KERNELS = {"8b": 0, "70b": 5}  # 4,096 of its tokens are more than a piece of model/fused.py


@pytest.mark.parametrize("shape", ["8b", pytest.param("70b", marks=pytest.mark.slow)])
def test_a_block_keeps_what_the_formula_says_and_asks_for_so_many_kernels(shape, tmp_path):
    [rank] = run([ROOT / "tests/phantom/programs/blocks.py", shape], tmp_path, settings={"PHANTOM_GIB": 80})
    assert rank.status == 0, rank.output
    found = json.loads(rank.output.splitlines()[-1])
    sizes = SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads, groups = 128 * sizes["num_attention_heads"], 128 * sizes["num_key_value_heads"]
    # The inputs of both norms; queries, keys, values and what attention makes of them; gate and up: in 16 bits.
    formula = 2 * (2 * hidden + 2 * heads + 2 * groups + 2 * inner)
    assert found["bytes, recompute none"] == pytest.approx(formula, rel=0.05)
    assert found["bytes, recompute all"] == pytest.approx(2 * hidden, rel=0.1)
    for recompute, most in MOST_KERNELS.items():
        assert found[f"kernels, recompute {recompute}"] <= most + MORE_KERNELS[shape]
