"""The position of the training thread, as reported by itself."""

import time

# In their order within a step: the others wait for a rank in an earlier phase.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")


class Heartbeat:
    """The step and phase that the training thread has reached, and when."""

    def __init__(self) -> None:
        self.step, self.phase, self.at = 0, PHASES[0], time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """Record that this rank has reached a phase (see PHASES) of a step. Cheap."""
        self.step, self.phase, self.at = step, phase, time.monotonic()
