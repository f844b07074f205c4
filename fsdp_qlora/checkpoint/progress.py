"""A run's progress apart from its weights, as stored in a checkpoint's state.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from fsdp_qlora.utils.records import plain

# Losses to compare with, at most and at least: fewer do not tell how far losses scatter.
_RECENT = 50
_MIN_RECENT = 20
_SIGMAS = 8.0


@dataclass
class Evaluations:
    """Losses and scores of a run's evaluations.

    last_eval_step: step of the last evaluation, -1 for none. first_eval_score: of the first
    evaluation that had a score; eval_score: of the last one, None if it had none. best_by: the
    measure that chooses the best evaluation, `loss` or the name of a score. best_eval_loss,
    best_eval_score: the lowest loss or the highest score after step 0; None where the other one
    chooses. best_eval_step: its step. num_evals_without_best: number of evaluations since then.
    """

    first_eval_loss: float | None = None
    eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int = -1
    num_evals_without_best: int = 0
    last_eval_step: int = -1
    best_by: str = "loss"
    first_eval_score: float | None = None
    eval_score: float | None = None
    best_eval_score: float | None = None

    def add_evaluation(
        self, step: int, eval_loss: float | None, score: float | None = None
    ) -> bool:
        """Count an evaluation after a step. Returns whether it is the best by `best_by`.

        An evaluation before the first step is never the best: the best adapter must have been
        trained. NaN is never the best, either.

        Args:
            eval_loss: None where there is no held-out loss.
            score: None where answers are not scored; NaN counts as None.
        """
        if score is not None and math.isnan(score):
            score = None  # as a checkpoint stores it: a resumed run goes on with the same values
        self.last_eval_step = step
        self.eval_loss = eval_loss
        self.eval_score = score
        if self.first_eval_loss is None:
            self.first_eval_loss = eval_loss
        if self.first_eval_score is None:
            self.first_eval_score = score
        if step == 0:
            return False
        is_best = self._is_best()
        self.num_evals_without_best += 1
        if is_best:
            if self.best_by == "loss":
                self.best_eval_loss = eval_loss
            else:
                self.best_eval_score = score
            self.best_eval_step = step
            self.num_evals_without_best = 0
        return is_best

    def describe_best(self) -> str:
        """The value that a better evaluation has to pass, and its step."""
        if self.best_eval_step < 0:
            return f"a finite {self.best_by}"
        if self.best_by == "loss":
            return f"a lower loss than {self.best_eval_loss:.4f} of step {self.best_eval_step}"
        return (
            f"a higher {self.best_by} than {self.best_eval_score:.4f} of step {self.best_eval_step}"
        )

    def _is_best(self) -> bool:
        """Whether the last evaluation is better than all before."""
        if self.best_by == "loss":
            return is_below(self.eval_loss, self.best_eval_loss)
        return is_below(negative(self.eval_score), negative(self.best_eval_score))


def is_below(value: float | None, limit: float | None) -> bool:
    """Whether a value is below a limit. None and NaN are not; no limit is infinity."""
    return value is not None and value < (math.inf if limit is None else limit)


def negative(value: float | None) -> float | None:
    """The negative of a value; None has none."""
    return None if value is None else -value


def measure_of(progress: Mapping[str, Any], step: int) -> float | None:
    """The value of a checkpoint by which the best one is chosen: the lowest of all is the best.

    Args:
        progress: of the checkpoint of `step`, as in its state.json.
    Returns:
        The held-out loss or the negative score; None if the run was not evaluated at this step, the
        value is not finite, or it is of the base, before the first step.
    """
    if step == 0 or progress.get("last_eval_step") != step:
        return None
    value: float | None = progress.get("eval_loss")
    if progress.get("best_by", "loss") != "loss":
        value = negative(progress.get("eval_score"))
    return value if value is not None and math.isfinite(value) else None


@dataclass
class Progress(Evaluations):
    """Counters and losses of a run, under their names in state.json.

    step: number of completed optimizer steps. recent_losses: losses of the last steps, for `spike`.
    loss_scale: `LossScale.state` of an fp16 run. stream: the position of the rows' source, such as
    `mark_of` the last answers of training/rl/rollout_file.py. idle: `IdleSteps.state`. reward_gap:
    `RewardGap.state`.
    """

    step: int = 0
    num_tokens: int = 0
    train_seconds: float = 0.0
    num_skipped: int = 0
    loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    loss_scale: dict[str, float] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    reward_gap: dict[str, float | None] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        # Without names that it does not know: an earlier or later version may have saved them.
        names = {entry.name for entry in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = plain(asdict(self))
        return values

    def add_step(self, record: Mapping[str, Any]) -> float | None:
        """Count a step. If its loss is an outlier, return the median loss before it, else None."""
        self.step = record["step"]
        self.num_tokens += record["num_tokens"]
        self.train_seconds += record["step_seconds"]
        # A step whose gradients have overflowed in fp16: its loss says nothing.
        if record.get("skipped"):
            self.num_skipped += 1
            return None
        self.loss = record["loss"]
        usual_loss = spike(self.recent_losses, record["loss"])
        self.recent_losses = [*self.recent_losses, record["loss"]][-_RECENT:]
        return usual_loss

    def summary(self) -> dict[str, float]:
        """The run's final values."""
        names = ["loss", "first_eval_loss", "eval_loss", "num_tokens", "train_seconds"]
        names += ["first_eval_score", "eval_score"]
        if self.best_eval_step >= 0:
            names += ["best_eval_loss", "best_eval_score", "best_eval_step"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def spike(recent: list[float], loss: float) -> float | None:
    """The median of `recent` if `loss` is far above it, else None.

    "Far above" means by 8 standard deviations and by a tenth of the median. The standard deviation
    is estimated as 1.4826 times the median absolute deviation (exact for a normal distribution),
    which few outliers do not change.
    """
    if len(recent) < _MIN_RECENT:
        return None
    # Nearly equal losses have a tiny deviation, hence also a tenth of the median.
    center = median(recent)
    sigma = 1.4826 * median(abs(value - center) for value in recent)
    is_far = math.isfinite(loss) and loss > center + max(_SIGMAS * sigma, 0.1 * center)
    return center if is_far else None
