"""The host waits for the GPU at listed places only: elsewhere it would stop preparing the kernels that follow."""

import pytest

from tests.gpu.runs import last_line, run

# Per step: all ranks' numbers come back.
PER_STEP = {"fsdp_qlora/ranks/distributed.py:gather_numbers": 1}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("offload", [[], ["--offload"]], ids=["resident", "offloaded"])
def test_a_step_waits_for_the_gpu_at_listed_places_only(offload, micro_batches, tmp_path):
    program = ["-m", "tests.gpu.programs.syncs", "--micro_batches", micro_batches, *offload]
    found = last_line(run(program, tmp_path))
    assert {place: count for place, count in found.items() if count > PER_STEP.get(place, 0)} == {}, found
