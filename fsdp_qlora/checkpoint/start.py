"""The point at which a run starts."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Start:
    """The point at which a run starts, the same on all ranks. Rank 0 sends it as JSON."""

    run_id: str
    step: int = 0
    folder: str | None = None
    """The checkpoint to load; None for step 0."""
    is_new: bool = True
    """Whether nothing of an earlier start is kept."""
    is_finished: bool = False
    global_batch_size: int | None = None
    """Rows per optimizer step with which the run was started; None for a new run."""
    used_seconds: float = 0.0
    """Duration of earlier starts, for `Budget`."""
    reserve_seconds: float = 0.0
    """The last start's estimate for a step and a save, for `Budget`."""
    failed_starts: int = 0
    """Starts in a row that made no progress."""
    too_few: int | None = None
    """Blocks that computed their inputs again when a start last ran out of memory."""
    ways: dict[str, str] | None = None
    """How the parts of the model have been computed so far, by the names of `Ways`; empty for a run
    of a version that knew one way only, None for a new run.
    """
    state: dict[str, Any] = field(default_factory=dict)
    """The progress and the tensors of the checkpoint's state.json, and whether rows were padded."""

    @property
    def progress(self) -> dict[str, Any]:
        """The progress at the checkpoint; empty for step 0."""
        return self.state.get("progress", {})

    @property
    def tensors(self) -> dict[str, Any]:
        """The description of the checkpoint's tensors; empty for step 0."""
        return self.state.get("tensors", {})

    @property
    def was_padded(self) -> bool | None:
        """Whether the rows of the checkpoint's last step were padded.

        None for step 0, and for a checkpoint of a version that did not note it.
        """
        return self.state.get("padded")

    @property
    def saved_step(self) -> int:
        """The newest checkpoint in the run's own folder, -1 for none."""
        return self.step if self.folder and not self.is_new else -1
