"""With PHANTOM_VALUES=1 operators, random numbers and collectives on the stand-in are those of the
CPU.
"""

import json

import pytest

from stand_in.environment import run
from tests.helpers.run import ROOT

NANS_OF_BF16 = 2 * 127  # of either sign, and one of them stays as it is


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    ended = run(
        [ROOT / "stand_in/programs/with_values.py"],
        tmp_path_factory.mktemp("values"),
        ranks=2,
        settings={"PHANTOM_VALUES": 1, "PHANTOM_POISON": 1},
    )
    assert [rank.status for rank in ended] == [0, 0], "\n".join(
        rank.output[-4000:] for rank in ended
    )
    return [
        json.loads(next(line for line in rank.output.splitlines() if line.startswith("{")))
        for rank in ended
    ]


def test_operators_and_their_gradients_are_those_of_the_cpu(found):
    # The device's attention in bf16 rounds its result, and the gradient that comes back.
    halves = {"flash", "packed", "flash, dropout"}
    for rank in found:
        errors = rank["errors"]
        assert {
            name: errors[name]
            for name in errors
            if errors[name] > (5e-3 if name in halves else 1e-6)
        } == {}
        assert rank["errors"]["dropout and random numbers"] == 0


def test_collectives_move_and_add_all_bytes(found):
    for rank in found:
        assert all(rank["arrived"].values()), rank["arrived"]


def test_foreach_copy_changes_nans_as_on_a_gpu(found):
    for rank in found:
        assert rank["changed"] == [0, NANS_OF_BF16 - 1]


def test_a_kernel_that_no_one_computes_is_named(found):
    for rank in found:
        assert rank["strays"] == {}
        assert any("add" in name.lower() for name in rank["strays in the end"]), rank


@pytest.mark.slow
def test_a_program_may_have_a_package_tests_beside_it(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    script = tmp_path / "program.py"
    script.write_text("import torch\nprint(torch.ones(3, device='cuda').sum().item())\n")
    [ended] = run([script], tmp_path / "run", settings={"PHANTOM_VALUES": 1}, is_fresh=True)
    assert ended.status == 0 and ended.output.endswith("3.0\n"), ended.output


def test_weights_rounded_on_the_device_have_the_bytes_of_the_cpu(tmp_path):
    program = ROOT / "stand_in/programs/rounded_weights.py"
    [ended] = run([program], tmp_path, settings={"PHANTOM_VALUES": 1, "PHANTOM_POISON": 1})
    assert ended.status == 0, ended.output[-4000:]
    line = next(line for line in ended.output.splitlines() if line.startswith("{"))
    assert json.loads(line) == {"forms": 7, "unlike": []}
