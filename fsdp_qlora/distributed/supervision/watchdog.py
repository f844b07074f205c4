"""Ends the process when training hangs or another rank has failed.

It works in the thread of this rank's presence, since the training thread may be the one that hangs.
The training thread may wait in a collective that never ends: NCCL and gloo do not notice that a
peer hangs, and give up only at the group's timeout. So the watchdog reports which rank the others
wait for, writes all threads' stacks to a file, and exits.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp_qlora.distributed.supervision.clock import PHASES, Heartbeat
from fsdp_qlora.distributed.supervision.presence import PAUSE_SECONDS, Presence
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, note_reason, write_line

# For the other ranks to report their positions. In a hang the last heartbeats of all ranks are
# within one step, so all notice it at about the same time.
_ANSWER_SECONDS = 5.0


class Watchdog:
    """Watches this rank's heartbeat and, through its presence, the other ranks during training.

    Args:
        hang_minutes: time without a heartbeat after which the process ends; 0 for no limit.
        output_dir: the folder of hang_rank_N.txt.
    """

    def __init__(
        self, heartbeat: Heartbeat, presence: Presence, *, hang_minutes: float, output_dir: Path
    ) -> None:
        self.heartbeat = heartbeat
        self.presence = presence
        self.ranks = presence.ranks
        self.hang_seconds = hang_minutes * 60
        self.output_dir = output_dir
        self._looked_at = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.heartbeat.beat(self.heartbeat.step, PHASES[0])
        self._looked_at = time.monotonic()
        self.presence.begin_training(lambda: f"at step {self.heartbeat.step + 1}", self._check)
        # Whether all ranks end their training; if not, this rank's silence must end the others.
        is_agreed = False
        try:
            yield
            is_agreed = True
        except RunStopped:
            is_agreed = True
            raise
        finally:
            self.presence.stop()
            if is_agreed:
                self.presence.mark_done()

    def _check(self) -> None:
        """Check once.

        The time is taken at the start, so that the next check notices a pause during this one.
        """
        now = time.monotonic()
        if now - self._looked_at > PAUSE_SECONDS:  # the whole machine was paused
            self.heartbeat.at = now
        self._looked_at = now
        self.presence.check_peers()
        if self.hang_seconds and now - self.heartbeat.at > self.hang_seconds:
            self._end_hanging()

    def _end_hanging(self) -> None:
        # First what needs no other rank and no lock: faulthandler writes from C, whatever holds up
        # the training thread.
        stacks = self.output_dir / f"hang_rank_{self.ranks.rank}.txt"
        with contextlib.suppress(OSError):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            with stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        positions = self._gather_positions()
        # NCCL's record of the last collectives, where there is one.
        with contextlib.suppress(Exception):
            bindings = torch._C._distributed_c10d
            # torch 2.13 has only the second function.
            names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
            dump = next(getattr(bindings, name) for name in names if hasattr(bindings, name))
            stacks.with_suffix(".json").write_bytes(dump())
        message = _describe_hang(positions, self.ranks.world_size, self.hang_seconds)
        if self.ranks.rank == min(positions):  # one message, from the first rank that still answers
            write_line(f"error: {message} Stacks: {stacks.with_name('hang_rank_*.txt')}")
            note_reason(message)
            self.presence.on_end("hung", message)
        # No exception: the main thread would never see it, and an exit of Python waits for threads.
        os._exit(ENDINGS["hung"].exit_code)

    def _gather_positions(self) -> dict[int, dict[str, Any]]:
        """Rank -> its position, for ranks whose watchdogs notice the hang within a few seconds."""
        where, is_waiting = _where(sys._current_frames().get(threading.main_thread().ident or 0))
        beat = self.heartbeat
        position = {
            "step": beat.step,
            "phase": beat.phase,
            "where": where,
            "is_waiting": is_waiting,
        }
        positions = {self.ranks.rank: position}
        end = time.monotonic() + _ANSWER_SECONDS
        with self.presence.using_store() as store:
            store.set(f"hang/{self.ranks.rank}", json.dumps(position))
            while len(positions) < self.ranks.world_size and time.monotonic() < end:
                for rank in set(range(self.ranks.world_size)) - positions.keys():
                    if store.check([f"hang/{rank}"]):
                        positions[rank] = json.loads(store.get(f"hang/{rank}"))
                time.sleep(0.1)
        time.sleep(1)  # the store ends with rank 0, so all ranks must have read it first
        return positions


def _describe_hang(positions: dict[int, dict[str, Any]], world_size: int, seconds: float) -> str:
    def order(rank: int) -> tuple[bool, int, int]:
        position = positions[rank]
        return position["step"], PHASES.index(position["phase"]), position["is_waiting"]

    problem = f"No rank has made progress for {seconds / 60:.3g} minutes"
    silent = sorted(set(range(world_size)) - positions.keys())
    if silent:
        silent_ranks = ", ".join(map(str, silent))
        return (
            f"{problem}. Rank {silent_ranks} does not answer: its process or machine has ended or "
            "is stuck."
        )
    places = "; ".join(
        f"rank {rank} at step {position['step']}, {position['phase']}, in {position['where']}"
        for rank, position in sorted(positions.items())
    )
    # Who is furthest behind is waited for; among equals, one that is not in a collective.
    first = min(map(order, positions))
    late = [rank for rank in sorted(positions) if order(rank) == first]
    if len(late) == world_size:
        return f"{problem}, and all are at the same point: {places}."
    return f"{problem}. The others wait for rank {', '.join(map(str, late))}: {places}."


def _where(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of this package on a thread's stack, and whether it is in a collective.

    A collective is what a thread of torch.distributed waits for.
    """
    is_waiting = frame is not None and "torch/distributed" in frame.f_code.co_filename
    package = str(Path(__file__).parents[2])
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    if frame is None:
        return "other code", is_waiting
    path = Path(frame.f_code.co_filename).relative_to(package)
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})", is_waiting
