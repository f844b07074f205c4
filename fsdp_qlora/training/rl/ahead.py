"""Answers one generation ahead: a server samples the next generation while this one trains.

Learning is then one step off-policy (Noukhovitch et al. 2024).

A schedule says which weights sample, and no race: generation 0 is sampled with the weights that
the run begins with, and generation g with those from before the training of generation g - 1. So
a run gives the same answers however fast the server is.

A checkpoint names the adapter that samples the generation after it. Its folder is kept as long as
a checkpoint is there that names it: a run that was killed asks with it again, by the same seeds.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.engine import PromptTokens
from fsdp_qlora.training.rl.server_engine import ServerEngine, completions_of
from fsdp_qlora.training.rl.waiting import BY_GLOO

log = logging.getLogger("fsdp_qlora")

KEY = "ahead"
"""The key in a source's position of the adapter that samples the next generation."""


@dataclass(frozen=True)
class _Sampler:
    """The adapter that samples a generation: its version, and its name with a hash."""

    version: int
    name: str


@dataclass(frozen=True)
class _Asked:
    """A generation that the server was asked for.

    task: on rank 0, of `ServerEngine.ask`.
    """

    prompts: PromptTokens
    task: Future[str] | None


@dataclass(eq=False)
class Ahead:
    """Has a server answer the next generation's prompts during training. `complete` is an `Engine`.

    Every rank calls each method, with the same result.
    """

    engine: ServerEngine
    prompts_of: Callable[[int], PromptTokens]
    """Gives the prompts of a generation's answers; none behind the last one."""
    versions_needed: Callable[[], set[int]]
    """Gives the versions with which a run may continue from a checkpoint."""
    version: int = 0
    """Optimizer steps of the weights that sampled what `complete` has returned last."""
    _sampler: _Sampler | None = None
    _asked: _Asked | None = None

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        if position.get(KEY):
            self._sampler = _Sampler(**position[KEY])

    def position(self) -> dict[str, Any]:
        """The entry of a source's position from which to go on."""
        return {KEY: vars(self._sampler)} if self._sampler else {}

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        generation: int,
        version: int,
        images: Sequence[RowImages] | None = None,
    ) -> list[Completion]:
        """Wait for a generation's answers, and have the next one's asked with the weights of now.

        Raises:
            RolloutError: the server has failed, maybe some time ago.
            RunStopped: the ranks have agreed to stop.
        """
        if self._asked is None:
            self._find_sampler(version)
            self._ask(PromptTokens.of(prompts, images), generation)
        completions = self._wait(version)
        assert self._sampler is not None
        self.version = self._sampler.version
        self._asked = None
        following = self.prompts_of(generation + 1)
        if following.ids:
            if self.version != version:
                self._publish(version)
            self._ask(following, generation + 1)
        return completions

    def of_current_weights(self, version: int) -> tuple[PromptTokens, list[Completion]] | None:
        """Wait for the next generation, which the weights of now sample: its prompts and answers.

        `complete` returns the same answers later. None behind the last generation.
        """
        return (self._asked.prompts, self._wait(version)) if self._asked else None

    def close(self) -> None:
        """End the threads that still ask."""
        self.engine.server.is_closed = True

    def _find_sampler(self, version: int) -> None:
        """Take the adapter that the checkpoint names, or else the weights of now."""
        if self._sampler is not None:
            names = ""
            if self.engine.ranks.is_rank_0:
                names = self.engine.name_of(self._sampler.version)
            if all_gather_strings(names, BY_GLOO)[0] == self._sampler.name:
                return
            log.warning(
                "The adapter %s of the checkpoint is not in %s: the next answers are sampled with "
                "the weights of step %d.",
                self._sampler.name,
                self.engine.prefix.parent,
                version,
            )
        self._publish(version)

    def _publish(self, version: int) -> None:
        """Save the adapter of now, for the next generation."""
        # What a checkpoint names is the newest adapter when it is saved, or the one before.
        self.engine.publish(version, self.versions_needed)
        name = self.engine.name_of(version) if self.engine.ranks.is_rank_0 else ""
        self._sampler = _Sampler(version, all_gather_strings(name, BY_GLOO)[0])

    def _ask(self, prompts: PromptTokens, generation: int) -> None:
        assert self._sampler is not None
        task = None
        if self.engine.ranks.is_rank_0:
            task = begun(partial(self.engine.ask, self._sampler.version, prompts, generation))
        self._asked = _Asked(prompts, task)

    def _wait(self, step: int) -> list[Completion]:
        assert self._asked is not None
        engine = self.engine
        text = engine.server.result_of(self._asked.task, engine.control, engine.ranks, step)
        return completions_of(text)


def prompts_of_generation(data: RunData, schedule: Schedule, generation: int) -> PromptTokens:
    """The prompts of a generation's answers, as often as each has answers; none behind the last."""
    first = generation * schedule.num_iterations
    for _, rows in schedule.rows_of_steps(data.train_rows, first=first):
        prompts = data.prompts.chosen(rows)
        images = [prompts.images(place) for place in range(len(rows))]
        return PromptTokens([prompts.ids(place) for place in range(len(rows))], images)
    return PromptTokens([], [])


def versions_of_checkpoints(checkpoints: Path, num_iterations: int) -> set[int]:
    """The versions of the adapters that runs from the checkpoints in a folder need.

    Counts those that are being written, too.
    """
    versions = set()
    for path in checkpoints.glob("*"):
        number = re.search(r"step_(\d+)", path.name)
        # After a generation's steps the next one is due, whose adapter is from before them. In the
        # middle of them it is the one after, whose adapter is from before them, too.
        if number and int(number[1]) > 0:
            versions.add((int(number[1]) - 1) // num_iterations * num_iterations)
    return versions
