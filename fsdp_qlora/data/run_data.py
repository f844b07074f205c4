"""The options that decide a run's rows, and the rows."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fsdp_qlora.config.objectives import LABELS, PAIRS, PROMPTS, TEXTS, RowKind
from fsdp_qlora.data.batches.data_report import DataReport
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows
from fsdp_qlora.data.batches.schedule import Mixture, RowsInMemory, RowSource
from fsdp_qlora.data.batches.streaming import RowStream
from fsdp_qlora.data.content import Row
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.utils.redact import redact_values


@dataclass(frozen=True)
class TextOptions:
    """The options that decide how a row becomes text. Each is the option of the same name."""

    dataset_format: str
    columns: tuple[str, ...]
    prompt_template: str | None
    learn: str
    objective: str = "sft"
    row_kind: RowKind = TEXTS
    """The kind of rows that the objective learns from."""
    rating_threshold: float | None = None
    max_completion_length: int = 0
    image_processor: ImageProcessor | None = None
    """The model's, if it has one; no option."""

    @property
    def makes_rows(self) -> bool:
        """Whether a run's rows are completions of the dataset's, which are prompts."""
        return self.row_kind == PROMPTS

    @property
    def asked_format(self) -> str:
        """The format that the options ask for; rows with a label or ratings are told by the objective and threshold."""
        told = {(LABELS, False): "label", (LABELS, True): "rating", (PAIRS, True): "ratings"}
        by_objective = told.get((self.row_kind, self.rating_threshold is not None), "auto")
        return by_objective if self.dataset_format == "auto" else self.dataset_format


@dataclass(frozen=True)
class DataOptions:
    """The options that decide a run's rows. Each is the option of the same name, and its help says what it means."""

    text: TextOptions
    dataset: tuple[str, ...]
    eval_dataset: tuple[str, ...]
    eval_fraction: float
    context_length: Literal["auto"] | int
    dataset_samples: int | None
    max_bad_rows: float
    seed: int
    streaming: bool = False
    shuffle_buffer: int = 10_000
    max_steps: int = -1

    @property
    def longest_row(self) -> int:
        """`context_length`, once it is decided."""
        assert isinstance(self.context_length, int)
        return self.context_length


@dataclass(frozen=True)
class Prompt:
    """A row of a run that learns from its own completions.

    number: of the row in the dataset. ids: the tokens before a completion. asked: text or messages, as reward functions
    get it. columns: all others.
    """

    number: int
    ids: list[int]
    asked: Any
    columns: Row


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run; row i of its table is prompt i. digest: of the table with completions of full length."""

    rows: tuple[Prompt, ...]
    max_completion_length: int
    digest: str


@dataclass(frozen=True)
class RunData:
    """The rows of a run."""

    train: TokenizedRows
    """All rows; the first ones of a stream, to look at."""
    train_rows: np.ndarray
    """Indices of the rows of `train` to train on, int64."""
    evaluation: TokenizedRows = NO_ROWS
    eval_sets: dict[str, np.ndarray] = field(default_factory=dict)
    """The name of each evaluation, the main one first -> indices of its rows of `evaluation`, int64."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """For the result's card, as JSON. data: name, format and number of rows of each dataset; eval_data: the same;
    prompt: as `prompt_record`, of the first dataset."""
    reports: tuple[DataReport, ...] = ()
    """The reports on each dataset to train on; on the first rows of a stream."""
    eval_reports: tuple[DataReport, ...] = ()
    mixture: Mixture | None = None
    """The datasets' parts in an epoch, if they have weights."""
    stream: RowStream | None = None
    """Reads the rows to train on, if they are streamed."""
    context_length: int = 0
    """The most tokens of a row, as asked for or decided."""
    image_processor: ImageProcessor | None = None
    """Makes the pixels of the rows' images, if the model has one."""
    prompts: Prompts | None = None
    """The rows, if the run learns from completions that it makes."""

    @property
    def completion_length(self) -> int:
        """The most tokens that follow a row of `train` when it is learned: those of a prompt's completion."""
        return self.prompts.max_completion_length if self.prompts else 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row of `train`, of a prompt with the longest completion, int64 [rows]."""
        return self.train.lengths + self.completion_length

    @property
    def have_images(self) -> bool:
        """Whether rows have images; of a stream the first ones."""
        return len(self.train.images) + len(self.evaluation.images) > 0

    @property
    def source(self) -> RowSource:
        """Gives the rows to train on."""
        return self.stream or RowsInMemory(self.train, self.train_rows)

    @property
    def eval_rows(self) -> np.ndarray:
        """Indices of the rows of `evaluation` to evaluate on, int64."""
        return np.concatenate([np.arange(0), *self.eval_sets.values()])

    @property
    def rows_per_epoch(self) -> int | None:
        """None if it is unknown."""
        if self.stream is not None:
            return self.stream.num_rows
        return sum(self.mixture.rows_per_epoch) if self.mixture else len(self.train_rows)

    @property
    def identity(self) -> list[object]:
        """Distinguishes the rows from others."""
        about: list[object] = [self.stream.source.identity] if self.stream is not None else []
        about += [derive_seed([prompt.columns for prompt in self.prompts.rows])] if self.prompts else []
        digest = self.prompts.digest if self.prompts else self.train.digest
        return [digest, self.evaluation.digest, len(self.eval_rows), *about]

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """(place, reason) of every row that was left out; a stream logs them as they come."""
        reports = self.eval_reports if self.stream is not None else self.reports + self.eval_reports
        return [place for report in reports for place in report.places()]

    def describe_left_out(self) -> list[str]:
        """A line for the end, if rows were left out: how many of those that were read before training."""
        reports = self.reports + self.eval_reports
        left, total = sum(each.num_rejected for each in reports), sum(each.num_rows for each in reports)
        return [f"Rows left out: {left:,} of {total:,}"] if left else []

    def files(self) -> dict[str, str]:
        """Files for the run's folder, name -> text: rejected.jsonl, if rows were left out."""
        lines = [json.dumps(redact_values({"row": place, "reason": reason})) + "\n" for place, reason in self.rejected]
        return {"rejected.jsonl": "".join(lines)} if lines else {}
