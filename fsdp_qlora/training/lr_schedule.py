"""The learning rate of each step."""

import math
from collections.abc import Callable

# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0: linear warm-up, then the schedule."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * SCHEDULES[schedule](progress)
