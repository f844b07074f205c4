"""An environment: a counter that has to be counted down. `--environment
examples/agent/counter.py:Counter`
"""

from typing import Any


class Counter:
    """Each call takes one off the count; the episode succeeds if it ends at 0."""

    def reset(self, count: int, **row: Any) -> None:
        """Begin with a row's count."""
        self.left = count

    def take(self) -> str:
        """Take one off the count. Returns whether there are more, or the count is done."""
        self.left -= 1
        return "more" if self.left > 0 else "done"

    def get_reward(self) -> float:
        """1 if all was taken, and nothing more."""
        return float(self.left == 0)
