"""Requests of clients on their way to the scheduler: who they are for, and their numbers."""

from collections.abc import Sequence
from typing import TypeGuard

from fastapi import HTTPException
from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.service.command_reader import Base
from fsdp_qlora.service.entries import SamplerEntry, is_integer
from fsdp_qlora.service.names import has_form, session_of
from fsdp_qlora.service.records import Entries, Entry, QueuedRequest
from fsdp_qlora.service.scheduler import Scheduler
from fsdp_qlora.service.waiting_clients import WaitingClients
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

JsonObject = dict[str, object]


class ClientRequests:
    """Checks the names and numbers of requests, and queues them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.records = scheduler.records
        self.bases: Sequence[Base] = scheduler.reader.bases
        self.trained = self.bases[0].names[0]
        self.waiting = WaitingClients(scheduler.results)

    def known(self, entries: Entries[Entry], name: object) -> Entry:
        """The entry of that name.

        Each name of a request comes through here, or is made of one that has.
        """
        entry = entries.get(str(name)) if has_form(entries.kind, name) else None
        if entry is None:
            raise HTTPException(404, f"There is no {entries.kind} {shown(name)}.")
        return entry

    def known_session(self, name: object) -> None:
        """Check that the session exists, and record that it is in use."""
        entry = self.known(self.records.sessions, name)
        self.scheduler.sessions.note_use(str(name), entry)

    def sampler_entry(self, path: object, base: object) -> SamplerEntry:
        """The entry of a sampler of saved weights, or of a base as it is.

        Raises UserError if there are none.
        """
        now = self.scheduler.clock.now()
        if path is not None:
            self.scheduler.weights.entry(str(path))
            return {"path": str(path), "time": now}
        self.scheduler.reader.base_named(str(base))
        return {"path": None, "base": str(base), "time": now}

    def submit_to_model(
        self,
        kind: str,
        model: object,
        seq: object,
        body: bytes,
        message: pb.ForwardBackwardRequest | None = None,
    ) -> JsonObject:
        """Queue a request for a model that its client has made, by number 0."""
        if not self._is_made(model):
            raise HTTPException(404, f"There is no model {shown(model)}.")
        self.known_session(session_of(model))
        if seq == 0:
            raise UserError("Number 0 is the request that makes the model; others begin at 1.")
        return self.submit(kind, model, seq, body, message)

    def _is_made(self, model: object) -> TypeGuard[str]:
        """Whether a model exists, or the request that makes it has come."""
        if not has_form("model", model):
            return False
        if self.records.models.get(str(model)) is not None:
            return True
        # Clients send the next requests without waiting for the answer.
        return self.scheduler.results.get(f"{model}:0") is not None

    def submit(
        self,
        kind: str,
        target: str,
        seq: object,
        body: bytes,
        message: pb.ForwardBackwardRequest | None = None,
    ) -> JsonObject:
        """Queue a request for a model or sampler. message: the body, where it is protobuf."""
        if not is_number(seq) or not has_form("request", f"{target}:{seq}"):
            raise UserError(
                "The request does not say for which model or sampler it is, and which "
                "of its requests."
            )
        queued = QueuedRequest(f"{target}:{seq}", target, seq, kind, len(body))
        self.scheduler.submit(queued, body, message)
        return {"request_id": queued.id, "model_id": target}


def is_number(value: object) -> TypeGuard[int]:
    """Whether a request may count with it: SQLite's integers have 64 bits."""
    return is_integer(value) and 0 <= value < 2**62
