"""Captures into CUDA graphs refuse what the CUDA driver refuses, and replays compute again what
was captured.
"""

import json

import pytest

from stand_in.environment import run
from tests.helpers.run import ROOT

PROGRAMS = ROOT / "stand_in/programs"
UNSUPPORTED = 900
INVALIDATED = 901
MERGE = 902
UNMATCHED = 903
UNJOINED = 904
ISOLATION = 905
IMPLICIT = 906
CAPTURED_EVENT = 907
WRONG_THREAD = 908
ILLEGAL_STATE = 401


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    [rank] = run([PROGRAMS / "captures.py"], tmp_path_factory.mktemp("captures"))
    assert rank.status == 0, rank.output[-4000:]
    return json.loads(rank.output.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "work",
        "pinned copy",
        "work of the default stream",
        "work of another stream",
        "fork and join",
        "relaxed allocation",
        "allocation of a relaxed capture",
        "allocation by another thread",
    ],
)
def test_a_capture_goes_on_beside(name, captures):
    assert captures[name] == [0, 0]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("allocation by another thread, global", UNSUPPORTED),
        ("allocation", UNSUPPORTED),
        ("pinned allocation", UNSUPPORTED),
        ("registration", UNSUPPORTED),
        ("destruction of a graph", UNSUPPORTED),
        ("wait for the stream", UNSUPPORTED),
        ("query of the stream", UNSUPPORTED),
        ("wait for the stream, relaxed", UNSUPPORTED),
        ("wait for the device", UNSUPPORTED),
        ("wait for the device by another thread", UNSUPPORTED),
        ("wait for an earlier event", UNSUPPORTED),
        ("blocking copy", UNSUPPORTED),
        ("pageable copy", UNSUPPORTED),
        ("wait for a captured event", CAPTURED_EVENT),
        ("query of a captured event", CAPTURED_EVENT),
        ("dependency on an earlier event", ISOLATION),
        ("dependency on another capture", MERGE),
        ("dependency of the default stream", IMPLICIT),
        ("default stream beside a blocking one", IMPLICIT),
        ("end on a fork", UNMATCHED),
        ("work after a refusal", INVALIDATED),
    ],
)
def test_a_capture_is_refused_and_invalidated_by(name, code, captures):
    assert captures[name] == [code, INVALIDATED]


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("fork", [0, UNJOINED]),
        ("end by another thread", [WRONG_THREAD, 0]),
        ("capture of a captured stream", [ILLEGAL_STATE, 0]),
        ("end without a capture", [0, ILLEGAL_STATE]),
        ("capture of the default stream", [UNSUPPORTED, 0]),
        ("query of an event of an ended capture", [0, CAPTURED_EVENT]),
    ],
)
def test_a_capture_begins_and_ends_as_it_should(name, codes, captures):
    assert captures[name] == codes


def test_torch_raises_the_errors_of_the_driver_and_goes_on(captures):
    assert captures["torch"] == [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ]
    assert captures["after"]


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    [rank] = run(
        [PROGRAMS / "replays.py"],
        tmp_path_factory.mktemp("replays"),
        settings={"PHANTOM_VALUES": 1, "PHANTOM_POISON": 1},
    )
    assert rank.status == 0, rank.output[-4000:]
    return json.loads(rank.output.splitlines()[-1])


def test_replays_compute_what_the_same_work_computes_without_a_graph(replays):
    assert set(replays["differences"].values()) == {0.0}, replays["differences"]


def test_a_replay_is_one_launch_and_its_pool_is_counted(replays):
    launches = replays["launches"]
    assert launches["products at the capture"] == 0
    assert launches["at the replays"] == launches["graphs"] == 2
    assert launches["captured"] == 2 * 2  # a product and relu
    assert launches["waits"] == 0
    assert launches["pool"] == launches["allocated at the capture"] == launches["released"] > 0


def test_after_a_failed_capture_torch_draws_captures_and_frees_memory(tmp_path):
    program = [PROGRAMS / "failed_capture.py"]
    [rank] = run(program, tmp_path, settings={"PHANTOM_GIB": 0.31})
    assert rank.status == 0, rank.output[-4000:]
    found = json.loads(rank.output.splitlines()[-1])
    assert "during capture" in found.pop("error")
    # Later captures of the same pool use its memory.
    assert found == {"draws": True, "captures": True, "frees": True, "more": 0}
