"""Losses of every train type, way of saving memory,
number format and optimizer: those of the CPU.
"""

import pytest

from tests.gpu.cases import CASES, STEPS, fingerprint, read_reference
from tests.gpu.check import holds
from tests.gpu.losses import run_cases


@pytest.fixture(scope="module")
def results(request, inputs, tmp_path_factory):
    """Of the cases that were selected (-k), run together since most of a run is imports."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    return run_cases(
        {name: CASES[name] for name in CASES if name in wanted},
        inputs,
        tmp_path_factory.mktemp("runs"),
    )


def test_the_models_are_those_of_the_reference(folders):
    found = {name: fingerprint(folder) for name, folder in folders.items()}
    assert found == read_reference()["models"], (
        "made by another version of torch: run tests.gpu.make_reference again"
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_cpu(name, results):
    case = CASES[name]
    result = results[name]
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    assert len(result.losses) == STEPS
    expected = read_reference()["losses"][case.same_as or name]
    holds(
        result.losses == pytest.approx(expected, rel=case.tolerance),
        f"{result.losses}, on the CPU {expected}",
    )
