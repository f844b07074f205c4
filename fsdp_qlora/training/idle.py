"""Notices a run that does not learn.

Such as steps in a row without a gradient, or with answers from which nothing can be learned.
"""

import math
from collections.abc import Mapping
from typing import Any

# So many steps in a row are a reason to warn, or all steps of a shorter run. Where rewards are
# rare, a single step without any is usual.
_FEW = 5


class IdleSteps:
    """Counts the last steps from which nothing was learned, and says so once in a run.

    Args:
        total_steps: of the run.
        longest: tokens at which answers are cut, if the run samples any.
    """

    def __init__(self, total_steps: int, longest: int) -> None:
        self._few = min(_FEW, total_steps)
        self._longest = longest
        self._num_idle = 0
        # Steps of which every answer was cut, where there are no rewards.
        self._num_cut = 0
        # The share of answers that were cut, summed over the idle steps.
        self._share_cut = 0.0
        self._has_told = False

    def state(self) -> dict[str, float]:
        """The values to save in a checkpoint."""
        return {
            "num_idle": self._num_idle,
            "num_cut": self._num_cut,
            "share_cut": self._share_cut,
            "has_told": self._has_told,
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take up what `state` gave; nothing of a checkpoint of an earlier version."""
        self._num_idle = int(state.get("num_idle", 0))
        self._num_cut = int(state.get("num_cut", 0))
        self._share_cut = float(state.get("share_cut", 0.0))
        self._has_told = bool(state.get("has_told", False))

    def add(self, record: Mapping[str, Any]) -> str | None:
        """Count a step by its record; returns the warning that is due, else None."""
        if self._has_told or record.get("skipped") or math.isnan(record.get("reward", 0.0)):
            # Numbers that are not finite, and a step without rewards, have messages of their own.
            return None
        share_cut = record.get("completions/clipped_ratio", 0.0)
        # Equal rewards give advantages of 0. A gradient may be left, of the reference's penalty.
        are_equal = record.get("frac_reward_zero_std") == 1
        is_idle = record["grad_norm"] == 0 or are_equal
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._share_cut = self._share_cut + share_cut if is_idle else 0.0
        # Without rewards, only the tokens of answers are learned: not an end that none of them has.
        is_cut = share_cut == 1 and "reward" not in record
        self._num_cut = self._num_cut + 1 if is_cut else 0
        if max(self._num_idle, self._num_cut) < self._few:
            return None
        self._has_told = True
        if self._num_idle >= self._few:
            return self._of_idle(record, are_equal=are_equal)
        return self._of_cut()

    def _of_idle(self, record: Mapping[str, Any], *, are_equal: bool) -> str:
        """The sentences about steps without a gradient, or with rewards that do not differ."""
        reason = "the gradient was 0"
        advice = "Look at the rows: --dry_run samples shows what is learned of them"
        if are_equal:
            reason = (
                f"the answers to each prompt got equal rewards ({record['reward']:.4g} in the mean "
                "of the last step)"
            )
            advice = (
                "Easier prompts, rewards between right and wrong, more --num_generations or a "
                "higher --temperature make them differ"
            )
        cut = self._share_cut / self._num_idle
        # A smaller share would be shown as 0%.
        if cut >= 0.005:
            advice = (
                f"{cut:.0%} of the answers were cut at --max_completion_length "
                f"{self._longest}: raise it. {advice}"
            )
        if "completions/clipped_ratio" in record:
            advice += "; rollouts.jsonl has the answers"
        return f"The last {_steps(self._num_idle)} learned nothing: {reason}. {advice}."

    def _of_cut(self) -> str:
        return (
            f"100% of the answers of the last {_steps(self._num_cut)} were cut at "
            f"--max_completion_length {self._longest}: how an answer ends is not learned. Raise it "
            "if answers are to end."
        )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
