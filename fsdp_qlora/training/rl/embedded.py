"""The embedded engine: the run's own sharded model answers its prompts, each rank its share of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.generate import Answer, SamplingOptions, TextGenerator, gather_answers
from fsdp_qlora.training.rl.engine import Completion, check_stop


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
        own = [Answer(place, list(prompts[place])) for place in range(rank, count, number_of_ranks)]
        beat = partial(check_stop, self.control, self.ranks, version)
        with self.gathered():
            for first in range(0, -(-count // number_of_ranks), self.at_a_time):  # as often on every rank
                generator.generate(own[first : first + self.at_a_time], beat=beat)
        found: list[Any] = gather_answers(own, lambda answer: [answer.tokens, answer.is_done], self.ranks.device)
        return [Completion(*answer) for answer in found]
