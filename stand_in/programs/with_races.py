"""A command of fsdp_qlora under the race checker: `with_races.py OUT.json FAULT COMMAND WORDS...`,
or `.. FAULT chosen COMMAND ..` to compute by the ways that a card would choose.

FAULT is "none" or one of `FAULTS`, which are made in torch's functions where the program (or FSDP2)
calls them. OUT.json gets what was found and what was looked at; "{rank}" in it becomes the rank.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stand_in.programs.with_kernels import choose_kernels
from stand_in.programs.with_long_documents import take_all_for_long
from stand_in.races import checking

OURS = "/fsdp_qlora/"
FSDP2 = "/_fully_shard/"


class Fault(NamedTuple):
    """`instead(original, *args)` is called where a file whose path has `called_from` calls
    `owner.name`.

    within: only if a function whose name begins with this is being run.
    """

    owner: Any
    name: str
    instead: Callable[..., Any]
    called_from: str = ""
    within: str = ""

    def make(self) -> None:
        original = getattr(self.owner, self.name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if self.called_from in frame.f_code.co_filename and is_within(frame, self.within):
                return self.instead(original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(self.owner, self.name, faulty)


def is_within(frame: Any, name: str) -> bool:
    while frame is not None and not frame.f_code.co_name.startswith(name):
        frame = frame.f_back
    return frame is not None


def nothing(original: Any, *_: Any, **__: Any) -> None:
    pass


def not_recorded(*_: Any) -> torch.cuda.Event:
    """An event for which no one waits."""
    return torch.cuda.Event()


def to_and_write(to: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    there: torch.Tensor = to(tensor, *args, **kwargs)
    if there.is_cuda and not tensor.is_cuda and tensor.is_pinned():
        tensor.zero_()
    return there


def cpu_without_waiting(_: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


# The first word of a command that computes by the ways that a card would choose.
CHOSEN = "chosen"
LONG = "long"
Stream = torch.cuda.Stream
FAULTS = {
    "no_wait_for_copies": Fault(Stream, "wait_event", nothing, OURS),
    "no_wait_for_computation": Fault(Stream, "wait_stream", nothing, OURS),
    "no_wait_before_memory_is_freed": Fault(Stream, "wait_event", nothing, OURS, within="release"),
    "no_event": Fault(Stream, "record_event", not_recorded, OURS),
    "fsdp2_waits_for_no_event": Fault(Stream, "wait_event", nothing, FSDP2),
    "fsdp2_waits_for_no_stream": Fault(Stream, "wait_stream", nothing, FSDP2),
    "fsdp2_records_no_event": Fault(Stream, "record_event", not_recorded, FSDP2),
    "no_wait_for_collectives": Fault(dist.Work, "wait", lambda *_: True),
    "host_writes_into_copies": Fault(torch.Tensor, "to", to_and_write, OURS),
    "no_wait_for_tokens": Fault(torch.cuda.Event, "synchronize", nothing, OURS),
    "host_reads_before_it_waits": Fault(torch.Tensor, "cpu", cpu_without_waiting, OURS),
}


def main(out: str, fault: str, *words: str) -> None:
    if fault != "none":
        FAULTS[fault].make()
    if words[0] == CHOSEN:
        choose_kernels()
        words = words[1:]
    if words[0] == LONG:
        take_all_for_long()
        words = words[1:]
    sys.argv = ["fsdp_qlora", *words]
    with checking() as races:
        try:
            runpy.run_module("fsdp_qlora", run_name="__main__", alter_sys=True)
        finally:
            found = {"findings": dict(races.findings), "counts": dict(races.counts)}
            Path(out.format(rank=os.environ["RANK"])).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
