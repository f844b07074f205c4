"""Memory that a large model's step takes on a card of 24 GiB: what the stand-in for CUDA has
counted.
"""

import json

import pytest

from tests.gpu.check import HAS_VALUES, IS_STAND_IN
from tests.gpu.reserved import FIGURES, SHAPES, count


@pytest.mark.skipif(IS_STAND_IN and HAS_VALUES, reason="the CPU would compute models of 8B and 70B")
@pytest.mark.parametrize("name", SHAPES)
def test_reserved_memory_is_what_the_stand_in_has_counted(name, tmp_path):
    found = count(name, tmp_path)
    expected = json.loads(FIGURES.read_text())["bytes"][name]
    assert found["loaded"] == pytest.approx(expected["loaded"], rel=0.01)
    assert found["reserved"] == pytest.approx(expected["reserved"], rel=0.03), found
