"""The recorder's numbers are those of programs whose numbers are known; what must fail fails with a
clear line.
"""

import json

import pytest

from stand_in.environment import Rank, run
from tests.helpers.run import ROOT

PROGRAMS = ROOT / "stand_in/programs"
MIB = 1 << 20


def last_line(rank: Rank) -> dict:
    assert rank.status == 0, rank.output
    return json.loads(rank.output.splitlines()[-1])


def line_of(program: str, code: str) -> str:
    """Where `code` stands in the program, as the recorder names it."""
    lines = (PROGRAMS / program).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == code)
    return f"stand_in/programs/{program}:{number}"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    [rank] = run([PROGRAMS / "one_rank.py"], tmp_path_factory.mktemp("one_rank"))
    return last_line(rank)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return [
        *map(
            last_line,
            run([PROGRAMS / "two_ranks.py"], tmp_path_factory.mktemp("two_ranks"), ranks=2),
        )
    ]


def test_kernels_and_matrix_products_are_counted_one_by_one(one_rank):
    assert one_rank["kernels"] == 4  # add, mul, fill and the product
    assert one_rank["matrix_products"] == 1


def test_a_wait_is_counted_once_with_the_line_that_caused_it(one_rank):
    copy = line_of("one_rank.py", "device.copy_(pageable)")
    read = line_of("one_rank.py", "device[:1].item()")
    assert [(sync["line"], sync["count"]) for sync in one_rank["syncs"]] == [(copy, 1), (read, 1)]


def test_copies_have_their_bytes_and_whether_the_host_memory_is_pinned(one_rank):
    copies = [(copy["kind"], copy["bytes"], copy["pinned"]) for copy in one_rank["copies"]]
    assert copies == [
        ("host_to_device", 4000, True),
        ("device_to_host", 4000, True),
        ("host_to_device", 4000, False),
        ("device_to_host", 4, True),  # torch reads single values through pinned memory
    ]


def test_kernel_results_are_zero_on_the_stand_in(one_rank):
    assert one_rank["found"] == 0


def test_memory_is_what_the_allocator_asked_for(one_rank):
    memory = one_rank["memory"]
    assert one_rank["mallocs"] == 1
    assert memory["device"] == memory["reserved"]  # torch is the only one who asked
    assert 64 * MIB <= memory["allocated_peak"] <= memory["reserved_peak"] < 128 * MIB


def test_collectives_have_their_bytes_and_their_group(two_ranks):
    whole = 2 * MIB * 2  # elements of both ranks, two bytes each
    for rank in two_ranks:
        collectives = [
            (each["kind"], each["bytes"], each["group_size"]) for each in rank["collectives"]
        ]
        assert collectives == [
            ("all_gather", whole, 2),
            ("reduce_scatter", whole, 2),
            ("all_reduce", whole // 2, 1),
        ]
        groups = [each["group"] for each in rank["collectives"]]
        assert groups[0] == groups[1] != groups[2]


def test_small_messages_between_ranks_arrive(two_ranks):
    for rank in two_ranks:
        assert rank["gathered"] == [1, 10, 2, 20]
        assert rank["summed"] == [3, 30]
        assert rank["sent"] == [2]
        assert rank["objects"] == ["rank 0", "rank 1"]


def test_a_function_that_the_stand_in_lacks_is_named(tmp_path):
    [rank] = run(
        ["-c", "import torch; torch.linalg.svd(torch.ones(4, 4, device='cuda'))"],
        tmp_path,
        is_fresh=True,
    )
    assert rank.status != 0
    assert "phantom: the stand-in lacks symbol cusolver" in rank.output
    assert "add it to stand_in/runtime" in rank.output
