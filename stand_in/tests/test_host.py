"""The host's work for a decoder block in a step of qlora: launches and views, not times."""

import contextlib

import pytest

from benchmarks.host import ROOT, Side, take_turns

# launches, views; of all layers for themselves, adapters in a group of FSDP2's, on one rank
EARLIER = {"all": (226, 565), "none": (177, 388)}


@pytest.mark.slow
def test_a_block_asks_for_half_of_the_launches(tmp_path):
    with (
        contextlib.closing(Side(ROOT, "chosen", 1, tmp_path / "home")) as side,
        contextlib.closing(Side(ROOT, "graphs", 1, tmp_path / "graphs")) as graphs,
    ):
        found = take_turns({"now": side, "graphs": graphs}, rounds=1)
    for recompute, (launches, views) in EARLIER.items():
        counted = found[recompute]["now"]
        assert 0 < counted["launches"] <= launches / 2, (recompute, counted)
        assert 0 < counted["views"] <= views / 2, (recompute, counted)
        assert counted["waits"] == 0
    # Two graphs; copies of input, weights and results, and their addition to other gradients.
    graphed = found["all"]["graphs"]
    assert graphed["launches"] <= 10 and graphed["views"] <= 40 and graphed["waits"] == 0
    # Blocks that keep their activations are no graphs.
    assert found["none"]["graphs"]["launches"] == found["none"]["now"]["launches"]
