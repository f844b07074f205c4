"""The part of a command that stays on rank 0 while the ranks execute it."""

from dataclasses import dataclass

from fsdp_qlora.service.commands import Command
from fsdp_qlora.service.entries import CheckpointEntry


@dataclass(frozen=True, eq=False)
class Job:
    """A command, and the work of rank 0 after all ranks have executed it."""

    command: Command
    is_internal: bool = False
    """Whether no client waits for its result: it repeats a request, or is the service's own."""
    answer: bytes | None = None
    """The answer to its request, where the ranks give none."""
    checkpoint: tuple[str, CheckpointEntry] | None = None
    """The tinker:// path and the entry of the weights that it saves."""
    saves_state_at: int | None = None
    """The number of the request after which it saves the model's state, if it does."""
