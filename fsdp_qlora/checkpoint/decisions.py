"""Decisions of the run that is continued, where this start's options leave them open.

They are read once, by rank 0, from the run's folder, from the checkpoint to start from or from the
mirror. The rows per step and the run's id are not among them: `choose_start` gives these, once the
contents of model and rows have shown that it is the same run.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_qlora.checkpoint.checkpoint import STATE
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.run_folder import is_finished, read_run
from fsdp_qlora.config.cli import current_options
from fsdp_qlora.config.learn import read_learn
from fsdp_qlora.data.taken_rows import TAKEN
from fsdp_qlora.data.text.rendering import TEMPLATE
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RECORD, RUN


@dataclass(frozen=True)
class Decisions:
    """Choices of an earlier run."""

    context_length: int | None = None
    """The maximum tokens per row in the run that continues, if this start leaves it open."""
    fills_template: bool = False
    """Whether its instructions were filled into a plain template, though the model has one for
    chats.
    """
    keeps_empty: bool = False
    """Whether the run that continues learns the empty blocks for reasoning of its chat template."""
    taken: Sequence[Mapping[str, Any]] | None = None
    """The part of each dataset that the run takes, empty for all rows of all; None if this start
    decides it.
    """
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The options of the run, if --auto has chosen some of them for as many ranks."""


@dataclass(frozen=True)
class EarlierRun:
    """Where a run may be that this start continues, and what this start leaves open."""

    output_dir: str
    start_from: str
    """auto, off or a folder."""
    mirror: str | None
    adapter: str | None
    model_name: str
    dataset: Sequence[str]
    context_length: int | str
    max_steps: int
    is_preview: bool
    replaces: bool
    """Whether a finished run or another one in the folder is replaced."""
    num_ranks: int | None
    """The ranks for which --auto or --context_parallel_size auto chooses settings; None without."""

    @property
    def folder(self) -> Path | None:
        """The folder of a run or checkpoint; None if this start begins a run."""
        if self.start_from == "off":
            return None
        path = self.output_dir if self.continues_folder else self.start_from
        return Path(path).expanduser()

    @property
    def continues_folder(self) -> bool:
        """Whether the run in output_dir continues, and not one that is named."""
        return self.start_from == "auto"

    def decisions(self) -> Decisions:
        """Read what the run has decided.

        Raises:
            UserError: its files are damaged, and something of them is needed.
        """
        record = self._record()
        return Decisions(
            context_length=self._context_length(record),
            fills_template=self.fills_template(record),
            keeps_empty=self._keeps_empty(record),
            taken=self._taken(record),
            settings=self._settings(),
        )

    def _record(self) -> dict[str, Any]:
        """The run.json of the run, or the same of its checkpoint; empty if there is none."""
        if self.folder is None:
            return {}
        record = read_json(self.folder / RUN) or read_json(self.folder / STATE).get("about", {})
        leaves_rows = self.context_length == "auto" or self.max_steps > 0
        is_open = leaves_rows or not self.is_preview
        if not record and self.continues_folder and self.mirror and is_open:
            # A mirror that cannot be reached is an error only when the run resumes.
            with contextlib.suppress(OSError):
                record = open_store(self.mirror).run()
        return record

    def _context_length(self, record: Mapping[str, Any]) -> int | None:
        """The length of the run's rows.

        A run that may be another one counts as `_may_continue` says.
        """
        if self.context_length != "auto" or not self._may_continue(record):
            return None
        context_length = record.get("options", {}).get("context_length")
        return context_length if isinstance(context_length, int) else None

    def _may_continue(self, record: Mapping[str, Any]) -> bool:
        """Whether this start may continue the run of a record.

        A run that may be another one, to be replaced or not touched, counts if it is unfinished
        and of the same --dataset.
        """
        if self.folder is None:
            return False
        if self.continues_folder and (self.replaces or self.is_preview):
            is_of_these_rows = record.get("options", {}).get("dataset") == list(self.dataset)
            return is_of_these_rows and not is_finished(self.folder)
        return True

    def _keeps_empty(self, record: Mapping[str, Any]) -> bool:
        """Whether the run learns empty blocks for reasoning.

        Runs that began before these were only read have no record of what they learn.
        """
        if not record or not self._may_continue(record):
            return False
        return "learn" not in record or read_learn(record["learn"]).keeps_empty

    def _taken(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """The part of each dataset that the run takes.

        Runs that began before parts were taken have no record of it: they take all rows.
        """
        if not record or not self._may_continue(record):
            return None
        # Another number of steps is another run.
        if record.get("options", {}).get("max_steps") != self.max_steps:
            return None
        return list(record.get(TAKEN, ()))

    def fills_template(self, record: Mapping[str, Any]) -> bool:
        """Whether the run, or the adapter that is trained further, has prompts of a template.

        Args:
            record: of the run, which may be on its mirror; else the folders alone are looked at.
        """
        folders = [self.folder] if self.folder else []
        if self.adapter:
            folders.append(Path(self.adapter).expanduser())
        # A result and an adapter have no run.json.
        records = [read_json(folder / name) for folder in folders for name in (RUN, STATE, RECORD)]
        if not self.replaces:
            records.append(dict(record))  # that of the mirror, where the folder has none
        for before in records:
            # Another model's prompts are no reason: this one replaces it.
            is_of_model = before.get("options", {}).get("model_name") in (None, self.model_name)
            prompt = before.get("about", before).get("prompt") or {}
            if is_of_model and prompt.get("kind") == TEMPLATE:
                return True
        return False

    def _settings(self) -> dict[str, Any]:
        """The options of the run that --auto has started on as many ranks; none if it has not."""
        if self.num_ranks is None or not self.continues_folder or self.replaces:
            return {}
        run = read_run(Path(self.output_dir).expanduser())
        options = current_options(run.get("options", {}))
        return options if options["auto"] and run["world_size"] == self.num_ranks else {}


def agree_on_decisions(earlier: EarlierRun, ranks: Ranks, store: dist.Store | None) -> Decisions:
    """Read the decisions on rank 0 and send them to all ranks, which may not see its folder.

    Args:
        store: of `connect`; None for a single process, or one that plans for others.
    """
    if store is None:
        return earlier.decisions()
    read = json.dumps(dataclasses.asdict(earlier.decisions())) if ranks.is_rank_0 else ""
    [sent, *_] = all_gather_via_store(read, "the decisions of the run", ranks, store)
    return Decisions(**json.loads(sent))
