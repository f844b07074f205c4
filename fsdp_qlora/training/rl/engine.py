"""The engine of a run's rollouts: its own model or a server (server.py) answers its prompts; how ranks wait for it."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fsdp_qlora.distributed.process_group import all_gather_strings, gather_numbers, raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.generate import Completion, SamplingOptions, TextGenerator, gather_completions
from fsdp_qlora.utils.errors import RolloutError, RunStopped

_PULSE_SECONDS = 0.5  # between two signs of life


class Engine(Protocol):
    """Answers prompts with the weights that the run has now."""

    def complete(self, prompts: Sequence[Sequence[int]], number: int, version: int) -> list[Completion]:
        """Answer each prompt; one is given as often as it has answers. Called on every rank with all, and returns all.

        Args:
            prompts: token ids. number: of the generation in the run; an answer's seed follows from the run's, this
            number and its place. version: optimizer steps that the weights have had.
        """


def check_stop(control: Control, ranks: Ranks, step: int, *, is_done: bool = False) -> bool:
    """Show that this rank lives, and stop all ranks if one is asked to. Returns whether rank 0 `is_done`.

    Raises:
        RunStopped: on every rank.
    """
    numbers = gather_numbers([is_done, *control.flags(step)], ranks.device)
    control.heartbeat.beat(step, "rows")
    control.agree(numbers[:, 1:])
    if control.stop:
        state, reason = control.stop
        raise RunStopped(state, f"Stopped while step {step + 1} waited for answers ({reason}).")
    return bool(numbers[0, 0])


def run_on_rank_0(work: Callable[[], str], control: Control, ranks: Ranks, step: int) -> str:
    """Run `work` in a thread of rank 0, and return its text on every rank; meanwhile all ranks `check_stop`.

    Raises:
        RunStopped: on every rank. RolloutError: of `work`; the same on every rank.
    """
    text, task = "", begun(work) if ranks.is_rank_0 else None
    while not check_stop(control, ranks, step, is_done=task is not None and task.done()):
        wait([task] if task else [], _PULSE_SECONDS)
    with raise_on_all_ranks(RolloutError, ranks.device):
        if task:
            text = task.result()
    return all_gather_strings(text, ranks.device)[0]


@dataclass(eq=False)
class EmbeddedEngine:
    """Answers prompts as `Engine` says, the same on any number of ranks.

    options: with the run's seed. at_a_time: answers of a rank in one batch, which shares its cache. gathered: the block
    in which weights may stay gathered.
    """

    generator_with: Callable[[SamplingOptions], TextGenerator]
    ranks: Ranks
    control: Control
    options: SamplingOptions
    at_a_time: int
    gathered: Callable[[], contextlib.AbstractContextManager[None]]

    def complete(self, prompts: Sequence[Sequence[int]], number: int, version: int) -> list[Completion]:
        seed = derive_seed("rollouts", self.options.seed, number)
        generator = self.generator_with(dataclasses.replace(self.options, seed=seed))
        rank, number_of_ranks, count = self.ranks.rank, self.ranks.world_size, len(prompts)
        places, own = range(rank, count, number_of_ranks), dict[int, Completion]()
        beat = partial(check_stop, self.control, self.ranks, version)
        with self.gathered():
            for first in range(0, -(-count // number_of_ranks), self.at_a_time):  # as often on every rank
                batch = {place: prompts[place] for place in places[first : first + self.at_a_time]}
                own |= generator.generate(batch, beat=beat)
        return gather_completions(own, self.ranks.device)
