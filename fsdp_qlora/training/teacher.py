"""Another model that a run learns from: its top tokens come from files or from a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.teacher_cache import TeacherCache


class Teacher(Protocol):
    """Tells the collator the top tokens of targets."""

    def targets(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The values that `Divergence` reads, for the targets of some rows, as `TargetValues`."""

    def request(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int
    ) -> None:
        """Get its top tokens for sampled completions, the next rows. Called on every rank."""


@dataclass(eq=False)
class CachedTeacher:
    """A `Teacher` whose files have the values of all rows."""

    caches: Mapping[str, TeacherCache]
    """By the digest of their table."""

    def targets(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        return self.caches[table.digest].target_values(table, rows)

    def request(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int
    ) -> None:
        raise AssertionError("files have no values of sampled completions")
