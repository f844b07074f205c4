"""Rollouts by the model in training itself."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedModel

from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.groups import kept_gathered
from fsdp_qlora.training.episodes.played_episode import Episode
from fsdp_qlora.training.episodes.rounds import Request, Rounds
from fsdp_qlora.training.generation.generator import KeptWeights, TextGenerator
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.waiting import check_stop, run_on_rank_0


class Room(NamedTuple):
    """The room of a rank. at_a_time: answers of `longest` tokens with their prompts."""

    at_a_time: int
    longest: int


@dataclass(eq=False)
class OwnEngine:
    """Has the model in training answer prompts, as `Engine` says, and play episodes.

    In float32 on one kind of device, answers are the same on any number of ranks.
    """

    model: PreTrainedModel
    ranks: Ranks
    control: Control
    precision: Precision
    stops: Stops
    options: SamplingOptions
    room: Room
    weights: KeptWeights
    keeps_gathered: bool
    """Whether the blocks' weights stay gathered for a generation."""
    image_inputs: ImageInputs | None = None
    """Makes the model's arguments for images of prompts, if it takes any."""

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        generation: int,
        version: int,
        images: Sequence[RowImages] | None = None,
    ) -> list[Completion]:
        """Answer each prompt. images: of each prompt; None if none has any."""
        generator = self._generator(generation, self.options.max_new_tokens)
        beat = partial(check_stop, self.control, self.ranks, version)
        with self._gathered():
            return generator.answer_all(prompts, self.room.at_a_time, beat, images=images)

    def play(self, episodes: Sequence[Episode], generation: int, version: int) -> None:
        """Write the turns of episodes as a `TurnEngine`, all that are ready in one round."""
        rounds = Rounds(episodes) if self.ranks.is_rank_0 else None
        next_requests = partial(_requests_of, rounds)
        while True:
            text = run_on_rank_0(next_requests, self.control, self.ranks, version)
            requests = [Request(*values) for values in json.loads(text)]
            if not requests:
                return
            completions = self._turns(requests, generation, version)
            if rounds:
                rounds.take(requests, completions)

    def _turns(
        self, requests: Sequence[Request], generation: int, version: int
    ) -> list[Completion]:
        """Write a turn for each request."""
        most = max(request.room for request in requests)
        longest = max(len(request.token_ids) for request in requests)
        # Requests may have fewer tokens behind them and more before them than planned answers.
        tokens = self.room.at_a_time * self.room.longest
        at_a_time = max(1, min(self.room.at_a_time, tokens // (longest + most)))
        generator = self._generator(generation, most)
        # Those with as much room beside each other: a batch goes on until its last one ends.
        places = sorted(range(len(requests)), key=lambda place: -requests[place].room)
        in_order = [requests[place] for place in places]
        beat = partial(check_stop, self.control, self.ranks, version)
        with self._gathered():
            completions = generator.answer_all(
                [request.token_ids for request in in_order],
                at_a_time,
                beat,
                [self._seed(generation, request) for request in in_order],
                limits=[request.room for request in in_order],
            )
        by_place = dict(zip(places, completions, strict=True))
        return [by_place[place] for place in range(len(requests))]

    def _generator(self, generation: int, most: int) -> TextGenerator:
        """The generator of a generation's answers of `most` tokens at most."""
        # By the number of the generation: a resumed run draws as if it had not stopped.
        seed = self._seed_of(generation)
        options = dataclasses.replace(self.options, seed=seed, max_new_tokens=most)
        return TextGenerator(
            self.model,
            self.ranks,
            self.precision,
            self.stops,
            options,
            self.weights,
            self.image_inputs,
        )

    def _seed_of(self, generation: int) -> int:
        return derive_seed("rollouts", self.options.seed, generation)

    def _seed(self, generation: int, request: Request) -> int:
        """The seed of a turn; a first one has the seed of an answer in its place."""
        parts = ("generate", self._seed_of(generation), request.place)
        return derive_seed(*parts, request.turn) if request.turn else derive_seed(*parts)

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        return kept_gathered(self.model) if self.keeps_gathered else contextlib.nullcontext()


def _requests_of(rounds: Rounds | None) -> str:
    """The next requests as JSON."""
    assert rounds is not None
    return json.dumps(rounds.next())
