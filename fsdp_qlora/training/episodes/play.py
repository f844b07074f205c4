"""Plays the episodes of a generation, and keeps each turn on the disk."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.distributed.process_group import all_gather_strings, raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.training.episodes.played_episode import Episode, Stage
from fsdp_qlora.training.episodes.transcript import FAILED, Transcript
from fsdp_qlora.utils.errors import RolloutError
from fsdp_qlora.utils.text import printable

# For environments that close themselves when a run stops.
_SECONDS_TO_END = 5.0
# (episodes, generation, version): plays episodes until all are over. Called on every rank; rank 0
# alone has the episodes. The seed of a turn follows from the run's, the generation, the episode's
# place and the number of the turn. version: optimizer steps that the weights have had.
TurnEngine = Callable[[Sequence[Episode], int, int], None]


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
            self.engine(episodes, generation, step)
        except BaseException:
            abandon_all(episodes)
            raise
        text = ""
        with raise_on_all_ranks(RolloutError, self.ranks.device):
            if self.stage:
                transcripts = [episode.transcript for episode in episodes]
                self._refuse_failures(transcripts)
                text = json.dumps([transcript.to_json() for transcript in transcripts])
        [text, *_] = all_gather_strings(text, torch.device("cpu"))
        return [Transcript.from_json(record) for record in json.loads(text)]

    def close(self, *, keeps_turns: bool) -> None:
        """End the environments, and remove the turns unless a resumed run may need them."""
        if not self.stage:
            return
        self.stage.environments.close()
        if not keeps_turns:
            self.stage.file.clear()

    def _refuse_failures(self, transcripts: Sequence[Transcript]) -> None:
        """Raise RolloutError if more than half of the episodes say nothing to learn from."""
        lost = [each for each in transcripts if each.end == FAILED or not each.turns]
        if 2 * len(lost) <= len(transcripts):
            return
        # The next start plays them anew: the environment may have been mended.
        assert self.stage is not None
        self.stage.file.clear()
        failed = [transcript.problem for transcript in lost if transcript.end == FAILED]
        if not failed:
            raise RolloutError(
                f"The environment's first messages leave no room for a turn in {len(lost)} of "
                f"{len(transcripts)} episodes. Give more --max_completion_length, which counts "
                "what reset returns. No weight was updated."
            )
        raise RolloutError(
            f"The environment failed in {len(failed)} of {len(transcripts)} episodes. The first: "
            f"{printable(failed[0])}. No weight was updated."
        )

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


def abandon_all(episodes: Sequence[Episode]) -> None:
    """End the environments of episodes that go on; those that do not end soon are killed later."""
    wait([begun(episode.abandon) for episode in episodes], _SECONDS_TO_END)
