"""The sessions of clients, and what is deleted with them."""

import secrets
import shutil
from collections.abc import Collection

from fsdp_qlora.service.entries import Metadata, SessionEntry
from fsdp_qlora.service.names import session_of
from fsdp_qlora.service.records import Records
from fsdp_qlora.service.saved_weights import SavedWeights
from fsdp_qlora.service.wall_clock import WallClock

# Time after which a client that says nothing has gone.
_IDLE_SECONDS = 30 * 24 * 3600.0
# Time for which a session is kept that its client has finished.
_FINISHED_SECONDS = 24 * 3600.0
# Time between two notes that a session is in use: heartbeats come often, and each note is a write.
_NOTED_SECONDS = 3600.0


class Sessions:
    """Sessions, which samplers and models belong to.

    What has no use after its session goes with it: its samplers, and models of which no weights are
    saved.
    """

    def __init__(self, records: Records, weights: SavedWeights, clock: WallClock) -> None:
        self.records = records
        self.weights = weights
        self.clock = clock
        self._started = clock.now()

    def create(self, metadata: Metadata, display_name: str | None) -> str:
        """Make a session; returns its name."""
        session = secrets.token_hex(16)
        now = self.clock.now()
        entry: SessionEntry = {
            "user_metadata": metadata,
            "display_name": display_name,
            "time": now,
            "used": now,
        }
        self.records.sessions.put(session, entry)
        return session

    def note_use(self, session: str, entry: SessionEntry) -> None:
        """Record that a session's client is there.

        entry: the session's entry.
        """
        if self.clock.now() - entry.get("used", 0.0) > _NOTED_SECONDS:
            self.records.sessions.put(session, entry | {"used": self.clock.now()})

    def note_end(self, session: str, entry: SessionEntry) -> None:
        """Record that a session's client has finished it."""
        self.records.sessions.put(session, entry | {"used": self.clock.now(), "is_finished": True})

    def forget_idle(self, keeping: Collection[str]) -> list[str]:
        """Delete sessions that nobody uses any more; returns the models that are deleted with them.

        Args:
            keeping: models that are in memory.
        """
        # First what belongs to sessions: a session that is made meanwhile is then listed too.
        samplers = list(self.records.samplers.find())
        models = list(self.records.models.find())
        living = {session_of(model) for model in keeping}
        for session, entry in list(self.records.sessions.find()):
            if session in living or not self._is_over(entry):
                living.add(session)
            else:
                self.records.sessions.delete(session)
        for sampler, _ in samplers:
            if session_of(sampler) not in living | {"direct"}:
                self.records.samplers.delete(sampler)
                self.records.forget_target(sampler)
        left = [model for model, _ in models if session_of(model) not in living]
        unsaved = [model for model in left if not self.weights.of_model(model)]
        for model in unsaved:
            self._forget(model)
        return unsaved

    def _is_over(self, entry: SessionEntry) -> bool:
        """Whether a session is finished, or its client has been away for long.

        The time counts from this start at the earliest.
        """
        most = _FINISHED_SECONDS if entry.get("is_finished") else _IDLE_SECONDS
        return self.clock.now() - entry.get("used", self._started) > most

    def _forget(self, model: str) -> None:
        """Delete a model of which no weights are saved."""
        self.records.models.delete(model)
        self.records.forget_target(model)
        # <model>/live/0: the folder of the whole model is two above.
        shutil.rmtree(self.weights.state_folder(model, 0).parents[1], ignore_errors=True)
