"""The embedded engine: the run's own sharded model answers its prompts, each rank its share of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from fsdp_qlora.control.clock import Heartbeat
from fsdp_qlora.generation.generate import Answer, SamplingOptions, Stops, TextGenerator, gather_answers
from fsdp_qlora.model.precision import Precision
from fsdp_qlora.ranks.ranks import Ranks, derive_seed
from fsdp_qlora.rollouts.engine import Completion


@dataclass(eq=False)
class EmbeddedEngine:
    """Answers prompts as `Engine` says, the same on any number of ranks.

    options: with the run's seed. at_a_time: answers of a rank in one batch, which shares its cache. gathered: the block
    in which weights may stay gathered.
    """

    model: PreTrainedModel
    ranks: Ranks
    precision: Precision
    stops: Stops
    options: SamplingOptions
    num_generations: int
    at_a_time: int
    gathered: Callable[[], contextlib.AbstractContextManager[None]]
    heartbeat: Heartbeat

    def complete(self, prompts: Sequence[Sequence[int]], number: int, version: int) -> list[list[Completion]]:
        seeded = dataclasses.replace(self.options, seed=derive_seed("rollouts", self.options.seed, number))
        generator = TextGenerator(self.model, self.ranks, self.precision, self.stops, seeded)
        rank, number_of_ranks, each = self.ranks.rank, self.ranks.world_size, self.num_generations
        places = range(len(prompts) * each)
        own = [Answer(place, list(prompts[place // each])) for place in places[rank::number_of_ranks]]
        with self.gathered():
            for first in range(0, -(-len(places) // number_of_ranks), self.at_a_time):  # as often on every rank
                generator.generate(own[first : first + self.at_a_time], beat=lambda: self._beat(version))
        found: list[Any] = gather_answers(own, lambda answer: [answer.tokens, answer.is_done], self.ranks.device)
        completions = [Completion(*answer) for answer in found]
        return [completions[first : first + each] for first in range(0, len(completions), each)]

    def _beat(self, step: int) -> None:
        self.heartbeat.beat(step, "rows")
