"""The options that decide a run's rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_qlora.config.objectives import LABELS, PAIRS, TEXTS, RowKind
from fsdp_qlora.data.text.image_processor import ImageProcessor


@dataclass(frozen=True)
class TextOptions:
    """The options that decide how a row becomes text. Each is the option of the same name."""

    dataset_format: str
    columns: tuple[str, ...]
    prompt_template: str | None
    learn: str
    """The words of --learn in one text."""
    objective: str = "sft"
    row_kind: RowKind = TEXTS
    """The kind of rows that the objective learns from."""
    rating_threshold: float | None = None
    max_completion_length: int = 0
    image_processor: ImageProcessor | None = None
    """The model's, if it has one; no option."""
    tools: Mapping[str, list[dict[str, Any]]] | None = None
    """JSON schemas of the tools of each environment by its name, "" for the only one; no option."""

    @property
    def makes_rows(self) -> bool:
        """Whether a run's rows are completions of the dataset's, which are prompts."""
        return self.row_kind.is_sampled

    @property
    def has_teacher(self) -> bool:
        """Whether rows have columns of what a teacher sees."""
        return self.row_kind.has_teacher

    @property
    def requested_format(self) -> str:
        """The format that the options ask for."""
        if self.dataset_format != "auto":
            return self.dataset_format
        # The columns do not tell these rows: a text may have a label or a rating, too.
        formats = {(LABELS, False): "label", (LABELS, True): "rating", (PAIRS, True): "ratings"}
        return formats.get((self.row_kind, self.rating_threshold is not None), "auto")


@dataclass(frozen=True)
class DataOptions:
    """The options that decide a run's rows, with the program's names and meanings."""

    text: TextOptions
    dataset: tuple[str, ...]
    eval_dataset: tuple[str, ...]
    eval_fraction: float
    context_length: Literal["auto"] | int
    dataset_samples: int | None
    max_bad_rows: float
    shuffle: bool
    drop_duplicates: bool
    seed: int

    @property
    def longest_row(self) -> int:
        """`context_length`, once it is decided."""
        assert isinstance(self.context_length, int)
        return self.context_length
