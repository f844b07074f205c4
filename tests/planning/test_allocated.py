"""What the plan says is allocated, beside what real steps of small models allocate."""

import json

import pytest

from fsdp_qlora.config.train_types import TRAIN_TYPES
from stand_in import environment
from tests.helpers.run import on_ranks
from tests.planning import allocated

# The others are among these by another name, or differ in what blocks.py measures alone.
FEW = ["full", "qlora"]


def _is_planned(lines: str, train_types: list[str]) -> bool:
    found = json.loads(next(line for line in lines.splitlines() if line.startswith("{")))
    assert [*found] == train_types
    assert {name: planned / most for name, (most, planned) in found.items()} == pytest.approx(
        dict.fromkeys(found, 1.0), rel=0.05
    )
    return True


@pytest.mark.parametrize(
    "train_types",
    [FEW, pytest.param([*TRAIN_TYPES], marks=pytest.mark.nightly)],
    ids=["few", "all"],
)
def test_small_models_allocate_on_a_cpu_what_the_plan_says(tmp_path, train_types):
    statuses, output = on_ranks(1, allocated.main, (train_types,), tmp_path)
    assert statuses == [0] and _is_planned(output, train_types), output


def test_each_of_two_ranks_that_share_a_long_row_needs_half(tmp_path):
    statuses, output = on_ranks(1, allocated.main, ([], (1, 2)), tmp_path)
    assert statuses == [0] and _is_planned(output, ["1", "2"]), output
    (alone, _), (shared, _) = json.loads(
        next(line for line in output.splitlines() if line.startswith("{"))
    ).values()
    assert shared < 0.6 * alone


@pytest.mark.phantom
@pytest.mark.skipif(environment.why_not() is not None, reason="the stand-in for CUDA is not built")
def test_small_models_allocate_on_a_gpu_what_the_plan_says(tmp_path):
    train_types = [*TRAIN_TYPES]
    [rank] = environment.run(
        [allocated.__file__, *train_types], tmp_path, settings={"PHANTOM_GIB": 8}
    )
    assert rank.status == 0 and _is_planned(rank.output, train_types), rank.output
