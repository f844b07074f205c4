"""Answers the prompts of a generation: by an engine, one generation ahead, or in episodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.training.episodes.play import Episodes
from fsdp_qlora.training.rl.ahead import Ahead
from fsdp_qlora.training.rl.answers import Answer, answers_of_episodes, answers_of_prompts
from fsdp_qlora.training.rl.engine import Engine


@dataclass(eq=False)
class Answerer:
    """Answers prompts in the way that the options ask for."""

    engine: Engine
    text_of: Callable[[list[int]], str]
    """Gives the text of an answer's tokens."""
    ahead: Ahead | None = None
    """The owner of `engine`, if it answers one generation ahead."""
    episodes: Episodes | None = None
    """Plays episodes in environments, if answers are such."""

    def answers(self, prompts: Sequence[Prompt], generation: int, step: int) -> list[Answer]:
        """Answer each prompt. Called on every rank, with the same result.

        Raises:
            RolloutError: the engine has failed, or too many environments.
            RunStopped: the ranks have agreed to stop.
        """
        if self.episodes:
            transcripts = self.episodes.play(prompts, generation, step)
            return answers_of_episodes(prompts, transcripts, self.text_of)
        images = [prompt.images for prompt in prompts]
        completions = self.engine([prompt.ids for prompt in prompts], generation, step, images)
        return answers_of_prompts(prompts, completions, self.text_of)

    def version(self, step: int) -> int:
        """Optimizer steps of the weights that sampled the last answers. step: taken by now."""
        return self.ahead.version if self.ahead else step

    def own_rewards(self, answers: Sequence[Answer]) -> dict[str, list[float | None]]:
        """The rewards that environments give themselves, by their names.

        An answer in another environment has None.
        """
        values: dict[str, list[float | None]] = {name: [] for name in self.names_of_rewards}
        for answer in answers:
            own_name = self._own_rewards.get(answer.prompt.environment)
            reward = answer.transcript.reward if answer.transcript else None
            for name, of_name in values.items():
                of_name.append(reward if name == own_name else None)
        return values

    @property
    def names_of_rewards(self) -> list[str]:
        """The names of the environments' own rewards."""
        return [*dict.fromkeys(self._own_rewards.values())]

    @property
    def _own_rewards(self) -> Mapping[str, str]:
        """The name of each environment's own reward, by the environment's name."""
        return self.episodes.rewards if self.episodes else {}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        if self.ahead:
            self.ahead.resume(position)

    def position(self) -> dict[str, Any]:
        """The entries of a source's position from which to go on."""
        return self.ahead.position() if self.ahead else {}

    def close(self, *, is_complete: bool) -> None:
        """End threads that still ask, and the environments.

        is_complete: whether the run needs no answers any more.
        """
        if self.ahead:
            self.ahead.close()
        if self.episodes:
            self.episodes.close(keeps_turns=not is_complete)
