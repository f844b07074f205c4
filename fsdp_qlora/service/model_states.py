"""The models that have been in memory since the start of a service."""

import time
from dataclasses import dataclass


@dataclass
class ModelState:
    """The state of a model on rank 0. Times are from time.monotonic()."""

    saved_at: float
    """Time of the last save of its state; before the first save, the time when it came into memory.
    """
    used_at: float | None = None
    """Time when its last request began; None if it is not in memory."""
    steps: int = 0
    """Optimizer steps since its state was saved."""
    has_gradients: bool = False
    """Whether it has gradients of passes without a step. A saved state has none."""


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
        """Record that a request of the model begins, for which it is in memory."""
        self._state(model).used_at = time.monotonic()

    def least_recently_used(self, *, besides: str) -> str:
        """The model in memory with the oldest last request, besides one model."""
        others = self.in_memory() - {besides}
        return min(others, key=lambda model: self._states[model].used_at or 0.0)

    def remove(self, model: str) -> None:
        """Record that a model leaves memory."""
        state = self._states.get(model)
        if state is not None:
            state.used_at = None
            state.has_gradients = False

    def has_gradients(self, model: str) -> bool:
        return self._state(model).has_gradients

    def note_gradients(self, model: str, *, has_gradients: bool) -> None:
        self._state(model).has_gradients = has_gradients

    def note_saved(self, model: str) -> None:
        """Record that the model's state is saved, or that the next try is due as after a save."""
        state = self._state(model)
        state.saved_at = time.monotonic()
        state.steps = 0

    def note_step(self, model: str) -> bool:
        """Count an optimizer step; returns whether to save the model's state now."""
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
