"""The embedded engine: the run's own sharded model answers its prompts, each rank its share of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.generate import Completion, SamplingOptions, TextGenerator, gather_completions
from fsdp_qlora.training.rl.engine import check_stop


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
