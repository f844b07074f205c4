"""Plays the episodes of a generation, and keeps each turn on the disk."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.distributed.process_group import all_gather_strings, raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.training.episodes.played_episode import Episode, Stage
from fsdp_qlora.training.episodes.transcript import FAILED, Transcript
from fsdp_qlora.utils.errors import RolloutError
from fsdp_qlora.utils.text import printable

# (episodes, count, generation, version): plays episodes until all are over. Called on every rank;
# rank 0 alone has the episodes, of which there are `count`. The seed of a turn follows from the
# run's, the generation, the episode's place and the number of the turn. version: optimizer steps
# that the weights have had.
TurnEngine = Callable[[Sequence[Episode], int, int, int], None]


@dataclass(eq=False)
class Episodes:
    """Plays episodes with a run's engine.

    stage: on rank 0, which has the environments; None on the others.
    """

    engine: TurnEngine
    stage: Stage | None
    ranks: Ranks
    rewards: Mapping[str, str]
    """The name of each environment's own reward, by the environment's name."""

    def play(self, prompts: Sequence[Prompt], generation: int, step: int) -> list[Transcript]:
        """Play an episode to each prompt. Called on every rank, with the same result.

        Raises:
            RolloutError: the engine has failed, or more than half of the environments.
            RunStopped: the ranks have agreed to stop.
        """
        episodes = self._episodes(prompts, step)
        try:
            self.engine(episodes, len(prompts), generation, step)
        finally:
            for episode in episodes:
                episode.abandon()
        text = ""
        with raise_on_all_ranks(RolloutError, self.ranks.device):
            if self.stage:
                transcripts = [episode.transcript for episode in episodes]
                refuse_failures(transcripts)
                text = json.dumps([transcript.to_json() for transcript in transcripts])
        [text, *_] = all_gather_strings(text, torch.device("cpu"))
        return [Transcript.from_json(record) for record in json.loads(text)]

    def close(self) -> None:
        """End the environments and remove the turns, which rollouts.jsonl has."""
        if self.stage:
            self.stage.environments.close()
            self.stage.file.clear()

    def _episodes(self, prompts: Sequence[Prompt], step: int) -> list[Episode]:
        """The episodes, as far as they have come; none on other ranks than 0."""
        if self.stage is None:
            return []
        # They are there if the run was stopped in the middle of these episodes, or later, and goes
        # on from the checkpoint before them, whose weights have sampled them.
        known = self.stage.file.read(step)
        if not known:
            self.stage.file.clear()
        begin = partial(Episode, self.stage)
        return [
            begin(prompt, step, place, known.get(place)) for place, prompt in enumerate(prompts)
        ]


def refuse_failures(transcripts: Sequence[Transcript]) -> None:
    """Raise RolloutError if more than half of the environments have failed."""
    problems = [transcript.problem for transcript in transcripts if transcript.end == FAILED]
    if 2 * len(problems) > len(transcripts):
        raise RolloutError(
            f"The environment failed in {len(problems)} of {len(transcripts)} episodes. The first: "
            f"{printable(problems[0])}. No weight was updated."
        )
