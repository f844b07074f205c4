"""Every option of training, once: its name, type, default, limit, marks and help.

A field is the flag, the YAML key and the attribute. Its type is annotated with its limit and its
marks (marks.py). The sentence under it is its help (text.py), and the `== ... ==` comments are the
headings of `--help`. The fields are in base_options.py, learning_options.py and run_options.py;
this file has what follows from them. conflicts.py lists the options that exclude each other.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_type_hints

from fsdp_qlora.config.base_options import BaseOptions
from fsdp_qlora.config.learning_options import LearningOptions
from fsdp_qlora.config.marks import (
    REPLACE,
    Limit,
    Mark,
)
from fsdp_qlora.config.objectives import OBJECTIVES, Objective
from fsdp_qlora.config.run_options import RunOptions
from fsdp_qlora.config.train_types import QUANT_TYPES, TRAIN_TYPES, TrainType

Group = TypeVar("Group")

MOST_OF_AUTO = 4096  # tokens, of --context_length auto


# A dataclass has its last base's fields first: those of the base, of learning, of the run.
@dataclass(frozen=True)
class TrainConfig(RunOptions, LearningOptions, BaseOptions):
    """Options of one training run."""

    @property
    def kind(self) -> TrainType:
        """The adapter, quantizer and trained part that `train_type` means."""
        kind = TRAIN_TYPES[self.train_type]
        # bnb_4bit in the table stands for all quantizers of --quant_type
        if kind.quantizer == "bnb_4bit":
            return kind._replace(quantizer=QUANT_TYPES[self.quant_type])
        return kind

    @property
    def objective_row(self) -> Objective:
        """The row of OBJECTIVES that `objective` names."""
        return OBJECTIVES[self.objective]

    @property
    def samples_answers(self) -> bool:
        """Whether the run learns from answers that it samples, and not from the dataset's."""
        return self.objective_row.kind_of_rows(self).is_sampled

    @property
    def best_measure(self) -> str:
        """The measure that chooses the best checkpoint: `best_by`, or its default."""
        return self.best_by or ("reward" if self.samples_answers else "loss")

    @property
    def hang_seconds(self) -> float:
        """The limit of waits for servers and reward functions."""
        # 0 minutes are no limit. A clock cannot wait forever, so no limit is 10 million seconds.
        return min(60 * self.hang_minutes or math.inf, 1e7)

    @property
    def context_size(self) -> int:
        """Ranks that share each micro-batch, 1 as long as auto has not decided."""
        return 1 if self.context_parallel_size == "auto" else self.context_parallel_size

    @property
    def start_from(self) -> str:
        """Where `resume` starts: auto, off or a folder."""
        start = self.resume.removesuffix(REPLACE)
        # YAML 1.1 spells off as no and false, too
        return "off" if start.lower() in ("no", "false") else start

    @property
    def is_preview(self) -> bool:
        """Whether the run is only shown, by one process, and nothing is trained."""
        return self.dry_run is not False

    @property
    def longest_row(self) -> int:
        """The tokens of `context_length`; while it is auto, its maximum."""
        return MOST_OF_AUTO if isinstance(self.context_length, str) else self.context_length

    def pick(self, cls: type[Group], *, prefix: str = "", **others: Any) -> Group:
        """The options that belong together, as the dataclass that a library function takes.

        Args:
            cls: a dataclass; each field that is not in `others` is the option of that name.
            prefix: text before the options' names that the fields do not have; an option without
                it is taken where there is none with it.
        Raises:
            AttributeError: a field is no option and not given, even if it has a default.
        """
        names = [field.name for field in fields(cls) if field.init and field.name not in others]  # type: ignore[arg-type]
        for name in names:
            option = prefix + name if hasattr(self, prefix + name) else name
            others[name] = getattr(self, option)
        return cls(**others)


DEFAULTS = TrainConfig()

# once, because it evaluates the annotations of all fields
_HINTS = get_type_hints(TrainConfig, include_extras=True)


def marks_of(name: str) -> tuple[Mark | Limit, ...]:
    """The annotations of an option's type."""
    return getattr(_HINTS[name], "__metadata__", ())


def names_marked(mark: Mark) -> tuple[str, ...]:
    """The options with a mark, in the order of the fields."""
    return tuple(name for name in _HINTS if mark in marks_of(name))


RESULT_OPTIONS = {
    name
    for name in _HINTS
    for mark in marks_of(name)
    if isinstance(mark, Mark) and mark.is_of_result
} - {"adapter"}  # a folder of this machine
"""The options that commands read from the files of a result."""


LIMITS = {name: mark for name in _HINTS for mark in marks_of(name) if isinstance(mark, Limit)}
"""Option -> the limit of its values."""


def option_types() -> dict[str, Any]:
    """Option -> its type, without marks; the type of a name out of a table is a Literal."""
    types = get_type_hints(TrainConfig)
    for name, limit in LIMITS.items():
        if limit.choices:
            types[name] = Literal[limit.choices]
    return types
