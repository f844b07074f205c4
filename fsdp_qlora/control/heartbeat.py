"""Where the training thread is, told by itself."""

import time

# In their order within a step: a rank in an earlier one keeps the others waiting.
PHASES = ("rows", "compute", "exchange", "update", "evaluate", "save")


class Heartbeat:
    """The step and phase that the training thread has reached, and when."""

    def __init__(self) -> None:
        self.step, self.phase, self.at = 0, PHASES[0], time.monotonic()

    def beat(self, step: int, phase: str) -> None:
        """Note that this rank has come to a phase (see PHASES) of a step. Cheap."""
        self.step, self.phase, self.at = step, phase, time.monotonic()
