"""A run's progress besides its weights, as stored in a checkpoint's state.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from fsdp_qlora.utils.records import plain

_RECENT = 50  # losses
_MIN_RECENT = 20
_SIGMAS = 8.0


@dataclass
class Progress:
    """step: optimizer steps done. last_eval_step: the step of the last evaluation, -1 for none.
    best_eval_loss: the lowest after a step so far, best_eval_step: when. num_evals_without_best: in a row since then.
    recent_losses: of the last steps, for `spike`.
    loss_scale: for fp16, from LossScale.state. stream: where streamed rows continue, a data.streaming.StreamPosition.
    """

    step: int = 0
    num_tokens: int = 0
    train_seconds: float = 0.0
    num_skipped: int = 0
    loss: float | None = None
    first_eval_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int = -1
    num_evals_without_best: int = 0
    last_eval_step: int = -1
    recent_losses: list[float] = field(default_factory=list)
    loss_scale: dict[str, float] = field(default_factory=dict)
    stream: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        known = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = plain(asdict(self))
        return values

    def add_step(self, record: Mapping[str, Any]) -> float | None:
        """Count a step. If its loss is an outlier, return the median loss before it, else None."""
        self.step = record["step"]
        self.num_tokens += record["num_tokens"]
        self.train_seconds += record["step_seconds"]
        if record.get("skipped"):
            self.num_skipped += 1
            return None
        self.loss = record["loss"]
        usual_loss = spike(self.recent_losses, record["loss"])
        self.recent_losses = [*self.recent_losses, record["loss"]][-_RECENT:]
        return usual_loss

    def add_evaluation(self, eval_loss: float) -> bool:
        """Count an evaluation after the current step; returns whether it is the best.

        That before the first step is not: what is kept as the best must have been trained.
        """
        self.last_eval_step, self.eval_loss = self.step, eval_loss
        if self.first_eval_loss is None:
            self.first_eval_loss = eval_loss
        if self.step == 0:
            return False
        is_best = eval_loss < (math.inf if self.best_eval_loss is None else self.best_eval_loss)
        self.num_evals_without_best += 1
        if is_best:
            self.best_eval_loss, self.best_eval_step, self.num_evals_without_best = eval_loss, self.step, 0
        return is_best

    def summary(self) -> dict[str, float]:
        """The run's final values."""
        names = ("loss", "first_eval_loss", "eval_loss", "num_tokens", "train_seconds")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.best_eval_loss is not None and self.best_eval_step >= 0:
            values |= {"best_eval_loss": self.best_eval_loss, "best_eval_step": self.best_eval_step}
        return values


def spike(recent: list[float], loss: float) -> float | None:
    """The median of `recent` if `loss` is far above it, else None.

    Far means 8 standard deviations and a tenth of the median. The standard deviation is estimated from the median
    absolute deviation, which a few outliers do not change (1.4826 MAD for a normal distribution).
    """
    if len(recent) < _MIN_RECENT:
        return None
    usual = median(recent)
    sigma = 1.4826 * median(abs(value - usual) for value in recent)
    is_far = math.isfinite(loss) and loss > usual + max(_SIGMAS * sigma, 0.1 * usual)
    return usual if is_far else None
