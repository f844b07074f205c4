"""The engine of a run's rollouts: what answers its prompts, its own model or a server."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Completion(NamedTuple):
    """An answer to a prompt.

    token_ids: with the end token, if it ended by itself. is_done: whether it did; otherwise it was cut at
    max_completion_length. logps: the engine's own log-probability of each token, where it is asked for.
    """

    token_ids: list[int]
    is_done: bool
    logps: list[float] | None = None


class Engine(Protocol):
    """Answers prompts with the weights that the run has now."""

    def complete(self, prompts: Sequence[Sequence[int]], number: int, version: int) -> list[list[Completion]]:
        """Answer each prompt num_generations times. Called on every rank with all prompts; returns all answers there.

        Args:
            prompts: token ids. number: of the generation in the run; an answer's seed follows from the run's, this
            number and its place. version: optimizer steps that the weights have had.
        """
