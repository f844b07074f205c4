"""The host's work for a decoder block in a step of qlora: launches and views, not times."""

import json

import pytest

from stand_in.environment import run
from tests.helpers.run import ROOT

# launches, views; of all layers for themselves, adapters in a group of FSDP2's, on one rank
EARLIER = {"all": (226, 565), "none": (177, 388)}


@pytest.mark.slow
def test_a_block_asks_for_half_of_the_launches(tmp_path):
    words = [ROOT / "benchmarks/host.py", "--measure", "chosen", "--rounds", "1"]
    [rank] = run(words, tmp_path, settings={"PHANTOM_GIB": 80})
    assert rank.status == 0, rank.output
    found = json.loads(rank.output.splitlines()[-1])
    for recompute, (launches, views) in EARLIER.items():
        counted = found[recompute]
        assert 0 < counted["launches"] <= launches / 2, (recompute, counted)
        assert 0 < counted["views"] <= views / 2, (recompute, counted)
        assert counted["waits"] == 0
