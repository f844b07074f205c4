"""The saved weights of a service: their records and folders."""

import shutil
import time
from pathlib import Path

from fsdp_qlora.service import names
from fsdp_qlora.service.entries import CheckpointEntry, is_integer
from fsdp_qlora.service.records import Records
from fsdp_qlora.service.wall_clock import WallClock
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

SAMPLER_WEIGHTS = "sampler_weights"
_UNNAMED = "unnamed-"
_KEPT_UNNAMED = 8  # sampler weights without a name, of a model
_IDLE_SECONDS = 3600.0  # after which older unnamed weights are deleted that nobody samples from
_SHORTEST_LIFE = 3600  # seconds, as the protocol says
_LONGEST_LIFE = 10 * 366 * 24 * 3600


class SavedWeights:
    """Weights by their tinker:// paths."""

    def __init__(self, records: Records, folder: Path, clock: WallClock) -> None:
        self.records = records
        self.folder = folder
        self.clock = clock
        self._started = time.monotonic()
        self._sampled_at: dict[str, float] = {}

    def entry(self, uri: str) -> CheckpointEntry:
        """The entry of saved weights. Raises UserError if there are none."""
        names.parts_of(uri)
        entry = self.records.checkpoints.get(uri)
        if entry is None:
            raise UserError(f"There are no saved weights {shown(uri)}.")
        return entry

    def folder_of(self, uri: str) -> Path:
        """The folder of saved weights. Raises UserError if there are none."""
        self.entry(uri)
        return names.folder_below(self.folder, *names.parts_of(uri))

    def state_folder(self, model: str, seq: int) -> Path:
        """The folder of a model's own state after the request of this number."""
        return names.folder_below(self.folder, model, "live", str(seq))

    # --- new ones ---

    def name_new(self, model: str, kind: str, name: str | None, seq: int) -> str:
        """The path of weights that a request saves. Raises UserError if the name is not allowed."""
        if name is None:
            return names.weights_path(model, kind, f"{_UNNAMED}{seq:08d}")
        if name.startswith(_UNNAMED):
            raise UserError(f"The name {shown(name)} is reserved for weights without a name.")
        return names.weights_path(model, kind, name)

    def check_new(self, uri: str, request: str, *, overwrites: bool) -> None:
        """Raise UserError if the name is taken by another request, and may not be overwritten.

        request: the id of the one that saves.
        """
        taken = self.records.checkpoints.get(uri)
        if taken is not None and taken["piece"] != request and not overwrites:
            raise UserError(f"There are weights named {names.parts_of(uri)[2]} already.")

    def expiry(self, seconds: object) -> float | None:
        """When weights with this time to live expire; None for never.

        Raises UserError if the time is not allowed.
        """
        if seconds is None:
            return None
        if not is_integer(seconds) or not _SHORTEST_LIFE <= seconds <= _LONGEST_LIFE:
            raise UserError(
                f"ttl_seconds is a number from {_SHORTEST_LIFE} (an hour) to {_LONGEST_LIFE} (ten "
                "years), or null."
            )
        return self.clock.now() + seconds

    # --- what becomes of them ---

    def set_expiry(self, uri: str, seconds: object) -> None:
        # Together, as the weights may be saved anew meanwhile.
        with self.records.all_or_none():
            self.records.checkpoints.put(uri, self.entry(uri) | {"expires": self.expiry(seconds)})

    def note_sampling(self, uri: str) -> None:
        """Record that somebody samples from these weights."""
        self._sampled_at[uri] = time.monotonic()

    def delete(self, uri: str) -> None:
        """Delete saved weights. Raises UserError if there are none."""
        # The entry first: a kill may leave a folder without an entry, but no entry of lost weights.
        folder = self.folder_of(uri)
        self.records.checkpoints.delete(uri)
        self._sampled_at.pop(uri, None)
        model, _, name = names.parts_of(uri)
        if name.startswith(_UNNAMED):
            self.records.samplers.delete(unnamed_sampler(model, int(name.removeprefix(_UNNAMED))))
        shutil.rmtree(folder, ignore_errors=True)

    def delete_expired(self) -> None:
        for uri, entry in self.of_model():
            if entry["expires"] and entry["expires"] < self.clock.now():
                self.delete(uri)

    def delete_idle(self, model: str) -> None:
        """Delete a model's unnamed weights that nobody has sampled from for a while.

        The newest ones stay.
        """
        unnamed = [uri for uri, _ in self.of_model(model, f"{SAMPLER_WEIGHTS}/{_UNNAMED}")]
        # One more comes with the request that calls this.
        for uri in unnamed[: 1 - _KEPT_UNNAMED]:
            if time.monotonic() - self._sampled_at.get(uri, self._started) > _IDLE_SECONDS:
                self.delete(uri)

    def of_model(self, model: str = "", beginning: str = "") -> list[tuple[str, CheckpointEntry]]:
        """The paths and entries of a model's weights, or of all; the oldest first."""
        pattern = f"tinker://{model}/{beginning}%" if model else "%"
        found = self.records.checkpoints.find(pattern)
        return [(uri, entry) for uri, entry in found if names.has_form("checkpoint", uri)]


def unnamed_sampler(model: str, seq: int) -> str:
    """The name of the sampler whose weights a model's request has saved without a name."""
    session, _, number = model.partition(":train:")
    return f"{session}:sample:{number}-{seq}"
