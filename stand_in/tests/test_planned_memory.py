"""The plan beside what torch's own allocator reserves on the stand-in."""

import json

import pytest

from benchmarks import standin_memory
from benchmarks.standin_memory import CARD_GIB, GIB, RESULTS, SETTINGS, on_stand_in, table
from stand_in.environment import run
from tests.helpers.run import ROOT

CASES = json.loads(RESULTS.read_text())["cases"]
AGAIN = ["8b_ddp", "8b_packed", "8b_host", "moe"]
NIGHTLY = ["8b", "8b_12", "8b_1x512", "8b_int8", "8b_padding_free", "8b_lora", "7b"]


@pytest.mark.quick
def test_stand_in_memory_table_matches_its_file_and_the_plan():
    assert len(CASES) >= 40 and "\n".join(table(CASES)) in (ROOT / "docs/gpu.md").read_text()
    errors = [abs(row["planned"]["reserved"] / row["reserved"] - 1) for row in CASES.values()]
    assert sum(errors) / len(errors) < 0.015 and max(errors) < 0.04
    # What is called fitting has the room that the plan leaves for CUDA.
    fitting = [
        row["reserved"]
        for row in CASES.values()
        if row["planned"]["reserved"] <= (CARD_GIB - 0.9) * GIB
    ]
    assert max(fitting) <= CARD_GIB * GIB


@pytest.fixture(scope="module")
def planned(request):
    return on_stand_in(
        "--plan", "--inside", *AGAIN, *(NIGHTLY if request.config.getoption("nightly") else [])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*AGAIN, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_stand_in_memory_is_as_recorded_and_as_planned(name, planned, tmp_path):
    [rank] = run([standin_memory.__file__, "--inside", name], tmp_path, settings=SETTINGS)
    assert rank.status == 0, rank.output[-3000:]
    measured = json.loads(next(line for line in rank.output.splitlines() if line.startswith("{")))[
        name
    ]
    assert measured["reserved"] == pytest.approx(CASES[name]["reserved"], rel=0.01)
    assert planned[name]["reserved"] == pytest.approx(measured["reserved"], rel=0.04)


@pytest.mark.nightly
def test_a_70b_teaches_an_8b_within_what_is_planned_for_two_cards(tmp_path):
    passes = {"student": ["--shape", "8b"], "teacher": ["--shape", "70b", "--offload"]}
    for name, words in passes.items():
        argv = [ROOT / "tests/gpu/programs/reserved.py", "--distill", name, *words]
        [rank] = run(argv, tmp_path / name, settings=SETTINGS)
        assert rank.status == 0, rank.output[-3000:]
        found = json.loads(next(line for line in rank.output.splitlines() if line.startswith("{")))
        assert (
            0.96 < found["reserved"] / found["planned"] < 1.04 and found["planned"] < CARD_GIB * GIB
        ), found
