"""Some of the GPU's tests on the stand-in: neither they nor their figures may grow old until a card is lent.

All of them take seven minutes: README.md has the command.
"""

from tests.phantom.environment import run
from tests.tiny import ROOT

TESTS = [
    "test_memory.py::test_reserved_memory_is_what_the_stand_in_has_counted[8b on two ranks, 2 x 2048]",
    "test_two_ranks.py::test_out_of_memory_is_named_with_what_helps_and_ends_all_ranks[2]",
]


def test_memory_and_its_lack_are_as_the_tests_for_a_gpu_want_them(tmp_path):
    command = ["-m", "pytest", "-m", "gpu", *(ROOT / "tests/gpu" / test for test in TESTS), "-p", "no:cacheprovider"]
    [rank] = run(command, tmp_path, settings={"FSDP_QLORA_GPU_TESTS": "stand-in"}, is_fresh=True)
    assert rank.status == 0 and "2 passed" in rank.output, rank.output[-6000:]
