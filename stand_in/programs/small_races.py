"""Small uses of streams, pinned memory and collectives: each once as it should be, and once with a
fault.

The last line is JSON: {name: [findings of the right one, findings of the wrong one]}.
"""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist

from stand_in.races import Races, checking

SIZE = 1000
side = torch.cuda.Stream()


def on_device() -> torch.Tensor:
    return torch.ones(SIZE, device="cuda")


def a_stream_reads_what_another_one_writes(right: bool) -> None:
    x = on_device()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.current_stream().wait_stream(side)


def an_event_is_recorded_before_the_work(right: bool) -> None:
    x = on_device()
    side.wait_stream(torch.cuda.current_stream())
    early = side.record_event()
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_event(side.record_event() if right else early)
    x.sum()
    torch.cuda.synchronize()


def memory_is_freed_while_a_side_stream_reads_it(right: bool) -> None:
    x = on_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if right:
        x.record_stream(side)
    del x
    on_device()


def the_host_writes_what_is_being_copied(right: bool) -> None:
    host = torch.zeros(SIZE).pin_memory()
    host.to("cuda", non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    host.fill_(1)


def the_host_reads_what_is_being_copied(right: bool) -> None:
    host = on_device().to("cpu", non_blocking=True)
    if right:
        torch.cuda.current_stream().record_event().synchronize()
    host.tolist()


def a_collective_is_not_waited_for(right: bool) -> None:
    x = on_device()
    work = dist.all_reduce(x, async_op=True)
    if right:
        work.wait()
    x.sum()
    work.wait()


def parts_of_one_tensor_are_apart(right: bool) -> None:
    x = on_device()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[: SIZE // 2].add_(1)
    x[SIZE // 2 - (not right) :].add_(1)
    torch.cuda.current_stream().wait_stream(side)


def a_graph_reads_what_a_stream_writes(right: bool) -> None:
    x = on_device()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()


def a_stream_reads_what_a_graph_writes(right: bool) -> None:
    x = on_device()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.synchronize()


def findings(program: Callable[[bool], None], right: bool) -> list[str]:
    races: Races
    with checking() as races:
        program(right)
    torch.cuda.synchronize()
    return list(races.findings)


PROGRAMS = [
    a_stream_reads_what_another_one_writes,
    an_event_is_recorded_before_the_work,
    memory_is_freed_while_a_side_stream_reads_it,
    the_host_writes_what_is_being_copied,
    the_host_reads_what_is_being_copied,
    a_collective_is_not_waited_for,
    parts_of_one_tensor_are_apart,
    a_graph_reads_what_a_stream_writes,
    a_stream_reads_what_a_graph_writes,
]

if __name__ == "__main__":
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    print(
        json.dumps(
            {each.__name__: [findings(each, True), findings(each, False)] for each in PROGRAMS}
        )
    )
