"""Groups of ranks beside the group of all, and texts that ranks send each other."""

import datetime
import os
import tracemalloc

import torch
import torch.distributed as dist

from fsdp_qlora.distributed.context import join_context
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    start_process_group,
    stop_process_group,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.shards import build_mesh
from tests.helpers.run import on_ranks

CPU = torch.device("cpu")


def _groups_of_two_machines() -> int:
    rank = int(os.environ["RANK"])
    ranks = Ranks(rank, rank % 2, 4, 2, CPU)
    start_process_group(ranks, timeout_minutes=77)
    assert join_context(ranks, 4).group is dist.group.WORLD
    mesh = build_mesh(ranks, sharding_strategy="hybrid_full_shard")
    context = join_context(ranks, 2)
    assert context.group is not None
    groups = [*mesh.get_all_groups(), context.group]
    assert {dist.get_world_size(group) for group in groups} == {2}
    waits = {group._get_backend(CPU).options._timeout for group in groups}  # type: ignore[attr-defined]
    assert waits == {datetime.timedelta(minutes=77)}

    assert all_gather_strings("é" * rank, CPU) == ["", "é", "éé", "ééé"]
    text = "e" * 2**20
    tracemalloc.start()
    assert all_gather_strings(text, CPU) == [text] * 4
    assert tracemalloc.get_traced_memory()[1] < 8 * len(text)  # no list of its bytes
    del mesh, groups, context
    stop_process_group()
    return 0


def test_groups_of_some_ranks_wait_as_long_as_all_and_texts_are_no_lists(tmp_path):
    statuses, output = on_ranks(4, _groups_of_two_machines, (), tmp_path)
    assert statuses == [0] * 4, output
