"""The models that have been in memory since the start of a service."""

import time
from dataclasses import dataclass


@dataclass
class ModelState:
    """A model as rank 0 knows it. Times are those of time.monotonic()."""

    saved_at: float
    """When its state was saved last; before that, when it came into memory first."""
    used_at: float | None = None
    """When its last request began; None if it is not in memory."""
    steps: int = 0
    """Optimizer steps since its state was saved."""
    has_gradients: bool = False
    """Whether it has gradients of passes without a step, which a saved state has not."""


class ModelStates:
    """Which models are in memory, and which of them must be saved.

    Args:
        save_times: steps and seconds after which a model's state is saved; 0 for never.
    """

    def __init__(self, save_times: tuple[int, float]) -> None:
        self._save_steps, self._save_seconds = save_times
        self._states: dict[str, ModelState] = {}

    def in_memory(self) -> set[str]:
        return {model for model, state in self._states.items() if state.used_at is not None}

    def note_use(self, model: str) -> None:
        """A request of the model begins, for which it is in memory."""
        self._state(model).used_at = time.monotonic()

    def least_recently_used(self, *, besides: str) -> str:
        """The model in memory, besides one, whose last request is the oldest."""
        others = self.in_memory() - {besides}
        return min(others, key=lambda model: self._states[model].used_at or 0.0)

    def remove(self, model: str) -> None:
        """A model leaves memory."""
        state = self._states.get(model)
        if state is not None:
            state.used_at = None
            state.has_gradients = False

    def has_gradients(self, model: str) -> bool:
        return self._state(model).has_gradients

    def note_gradients(self, model: str, *, has_gradients: bool) -> None:
        self._state(model).has_gradients = has_gradients

    def note_saved(self, model: str) -> None:
        """The model's state is saved, or the next try is due as if it were."""
        state = self._state(model)
        state.saved_at = time.monotonic()
        state.steps = 0

    def note_step(self, model: str) -> bool:
        """Count an optimizer step; returns whether the model's state is to be saved."""
        state = self._state(model)
        state.steps += 1
        is_due_by_steps = 0 < self._save_steps <= state.steps
        return is_due_by_steps or 0 < self._save_seconds < time.monotonic() - state.saved_at

    def forget(self, model: str) -> None:
        self._states.pop(model, None)

    def _state(self, model: str) -> ModelState:
        if model not in self._states:
            self._states[model] = ModelState(saved_at=time.monotonic())
        return self._states[model]
