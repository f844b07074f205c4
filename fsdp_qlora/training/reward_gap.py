"""Notices rewards that rise in training while the score of held-out answers falls."""

import math
from collections.abc import Mapping
from typing import Any

_EVALUATIONS = 3  # in a row, after which a run is told


class RewardGap:
    """Compares the training reward with the held-out score, from evaluation to evaluation.

    The training reward of an evaluation is the mean over the steps since the one before. A gap
    grows at an evaluation if this mean is higher, and the score lower, than at the evaluation
    before. After three such evaluations in a row there is a warning.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._num_steps = 0
        self._reward: float | None = None
        self._score: float | None = None
        self._num_growing = 0

    def state(self) -> dict[str, float | None]:
        """The values to save in a checkpoint."""
        return {
            "sum": self._sum,
            "num_steps": self._num_steps,
            "reward": self._reward,
            "score": self._score,
            "num_growing": self._num_growing,
        }

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Take up what `state` gave; nothing of a checkpoint of an earlier version."""
        self._sum = float(state.get("sum") or 0.0)
        self._num_steps = int(state.get("num_steps") or 0)
        self._reward = state.get("reward")
        self._score = state.get("score")
        self._num_growing = int(state.get("num_growing") or 0)

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Count a step's reward. Steps without one, such as those on texts, do not count."""
        reward = record.get("reward")
        # NaN where no function applied.
        if reward is not None and not math.isnan(reward):
            self._sum += reward
            self._num_steps += 1

    def evaluated(self, score: float) -> str | None:
        """Count an evaluation's score; returns the warning that is due, else None."""
        if not self._num_steps or math.isnan(score):
            return None
        reward = self._sum / self._num_steps
        earlier = (self._reward, self._score)
        self._sum = 0.0
        self._num_steps = 0
        self._reward = reward
        self._score = score
        if earlier[0] is None or earlier[1] is None:
            return None
        is_growing = reward > earlier[0] and score < earlier[1]
        self._num_growing = self._num_growing + 1 if is_growing else 0
        if self._num_growing != _EVALUATIONS:
            return None
        return (
            f"At {_EVALUATIONS} evaluations in a row the training reward rose (to {reward:.4f}) "
            f"and the held-out score fell (to {score:.4f}): the model may exploit the reward "
            "functions, or know its prompts by heart. Read answers in rollouts.jsonl, raise --beta "
            "or lower --lr; best/ has the best adapter by --best_by reward."
        )
