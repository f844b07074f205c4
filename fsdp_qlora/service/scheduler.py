"""Takes the requests of clients on rank 0, and turns them into commands for all ranks.

Requests of a model are done in the order of their numbers, whatever order they come in. A request
that cannot be done fails alone, and its number counts as used: a client goes on with the next one.
"""

import base64
import contextlib
import json
import logging
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from fsdp_qlora.service.command_reader import Base, CommandReader, WantedSample
from fsdp_qlora.service.records import DONE, FAILED, WAITING, QueuedRequest, Records
from fsdp_qlora.service.request_queue import RequestQueue
from fsdp_qlora.service.sampling import SampleGroup
from fsdp_qlora.service.saved_weights import SavedWeights
from fsdp_qlora.service.sessions import Sessions
from fsdp_qlora.service.wall_clock import WallClock
from fsdp_qlora.service.worker import Command, Result
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import shown

log = logging.getLogger("fsdp_qlora")

# Seconds between two checks for what has expired.
_SWEEP_SECONDS = 60.0
# Results of requests, besides those that a model's state needs, and their bytes.
_KEPT_RESULTS = 20_000
_KEPT_BYTES = 2**30
# Tries of a request during which the service ends: it may be the cause.
_MOST_TRIES = 3
# Time for which a sampler of a single request is kept at least.
_DIRECT_SECONDS = 3600.0
# Tokens of waiting prompts that are looked at for those to answer together; what is read is kept.
_MOST_LOOKED_AT = 2**22
# Characters of an error that a client gets.
LONGEST_REASON = 2000
_SAVES = ("save_weights", "save_weights_for_sampler")


class Scheduler:
    """The requests that wait, and the models that are in memory.

    Args:
        folder: of checkpoints. bases: the one whose adapters are trained, and others as they are.
            most_rank: of adapters. most_models: in memory. save_times: steps and seconds after
            which a model's state is saved, so that fewer requests must be repeated after a kill; 0
            for never.
    Attributes:
        on_done: is told each request that has a result.
    """

    def __init__(
        self,
        records: Records,
        folder: Path,
        bases: Sequence[Base],
        *,
        most_rank: int,
        most_models: int,
        save_times: tuple[int, float],
    ) -> None:
        self.records = records
        self.most_models = most_models
        self.save_times = save_times
        self.clock = WallClock()
        self.weights = SavedWeights(records, folder, self.clock)
        self.sessions = Sessions(records, self.weights, self.clock)
        self.reader = CommandReader(records, self.weights, self.clock, bases, most_rank)
        self.on_done: Callable[[str], object] = lambda name: None
        self.queue = RequestQueue(records.waiting(), self._first_number)
        self._used_at: dict[str, float] = {}  # the models in memory
        self._saved_at: dict[str, float] = {}
        self._steps: dict[str, int] = {}  # since then
        self._with_gradients: set[str] = set()
        self._samples: dict[str, WantedSample] = {}  # that wait, by their names
        self._alone = records.tried_samples()  # samples that are not answered together with others
        self._in_work: list[QueuedRequest] = []
        self._coming: deque[Command] = deque()
        self._command: Command | None = None  # that the ranks execute
        self._unwritten: dict[str, tuple[str, bytes]] = {}  # failures that the disk has no room for
        self._lock = threading.Lock()  # of the unwritten ones
        self._swept_at = -_SWEEP_SECONDS

    # --- for the web server's threads ---

    def submit(self, request: QueuedRequest, body: bytes) -> None:
        """Take a request, once: one with the same target and number is the same.

        Raises:
            UserError: too many others come before it.
        """
        # Recorded before the client hears of it, so that a kill loses no request.
        self.queue.check(request)
        if self.records.add(request, body) and not self.queue.add(request):
            self._fail(request, f"The model's request {request.seq} has been passed over.")

    def cancel(self, name: str) -> None:
        """Give up a request for samples that has not begun."""
        request = self.queue.remove_sample(name)
        if request:
            self._fail(request, "cancelled")

    def result(self, name: str) -> tuple[str, bytes] | None:
        """State and result of a request; None if it is unknown.

        What is not written yet is not shown.
        """
        return (WAITING, b"") if name in self._unwritten else self.records.result(name)

    # --- for the main thread ---

    def take(self, seconds: float) -> Command | None:
        """The next command; None if there is none within these seconds."""
        # If nothing can be recorded, nothing is begun.
        if not self._write_failures():
            time.sleep(seconds)
            return None
        self._sweep()
        if not self._coming:
            self._begin_next(seconds)
        if not self._coming:
            # There is none, or it has failed: ranks give a sign of life between two requests.
            return None
        self._command = self._coming.popleft()
        with self._failing("read"):
            return self._with_body(self._command)
        return None

    def _begin_next(self, seconds: float) -> None:
        """Turn the next request into commands, if one comes within these seconds and is valid."""
        request = self.queue.take(seconds)
        if request is None:
            return
        self._in_work = [request]
        with self._failing("read"):
            tries = self.records.begin(request.id)
            if tries > _MOST_TRIES:
                raise UserError("The service has ended each time that it worked on this request.")
            # Answered by itself from the second try on, so that it fails no others.
            if tries > 1:
                self._alone.add(request.id)
            self._coming.extend(self._commands_of(request))

    def _with_body(self, command: Command) -> Command:
        # Read only now: bodies of restored requests are many, and would all be in memory.
        if command["kind"] != "forward_backward":
            return command
        body = self.records.body(f"{command['model']}:{command['seq']}")
        return command | {"body": base64.b64encode(body).decode()}

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """In this block any exception fails the requests in work, and nothing else."""
        try:
            yield
        except Exception as error:
            self.refuse(reason_of(error, doing))

    def finish(self, command: Command, results: list[Result]) -> None:
        """Record what a command has led to, and tell the clients that wait for it."""
        with self._failing("recorded"):
            self._record(command, results)

    def _record(self, command: Command, results: list[Result]) -> None:
        # A repeated command has its results already.
        requests = [] if command.get("repeats") else self._in_work
        replaced = None
        with self.records.all_or_none():
            if "uri" in command:
                self.records.put("checkpoint", command["uri"], command["entry"])
            if "live" in command:
                replaced = self._note_live(command["model"], command["live"])
            self.records.finish(
                [
                    (request.id, DONE, result)
                    for request, result in zip(requests, results, strict=False)
                ]
            )
        # Only now does no entry name the old folder.
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._command = None
        self._note_gradients(command)
        if command.get("repeats"):
            return
        self._in_work = []
        for request in requests:
            self._advance(request)
        if self._is_save_due(command):
            self._coming.append(self._save_command(command["model"], command["seq"]))

    def _note_gradients(self, command: Command) -> None:
        if command["kind"] == "forward_backward":
            self._with_gradients.add(command["model"])
        elif command["kind"] in ("optim_step", "load_weights"):
            self._with_gradients.discard(command["model"])

    def _save_command(self, model: str, seq: int) -> Command:
        """The command that saves a model's state after the request of this number.

        The state has no gradients.
        """
        path = str(self.weights.state_folder(model, seq))
        return {
            "kind": "save",
            "model": model,
            "path": path,
            "optimizer": True,
            "answer": {},
            "live": seq,
            "repeats": True,
        }

    def _is_save_due(self, command: Command) -> bool:
        """Whether a model's state is to be saved. Weights that were loaded may be deleted."""
        if command["kind"] != "optim_step":
            return bool(command["kind"] == "load_weights")
        model = command["model"]
        (steps, seconds) = self.save_times
        self._steps[model] = self._steps.get(model, 0) + 1
        is_due_by_steps = 0 < steps <= self._steps[model]
        return is_due_by_steps or 0 < seconds < time.monotonic() - self._saved_at[model]

    def refuse(self, reason: str, lost: Iterable[str] = ()) -> None:
        """Record that the last command, and those that were to follow, cannot be carried out.

        Args:
            lost: models that the ranks have lost by it.
        """
        command = self._command
        requests = self._in_work
        self._command = None
        self._in_work = []
        self._coming.clear()
        for model in {*lost, *self._uncertain(command, requests)}:
            self._used_at.pop(model, None)
            self._with_gradients.discard(model)
            self._coming.append({"kind": "drop", "model": model, "repeats": True})
        if command is not None and "live" in command:
            log.warning("Model %s: its state cannot be saved now. %s", command["model"], reason)
            if self._live_of(command["model"]) != command["live"]:
                shutil.rmtree(command["path"], ignore_errors=True)
            # The next try comes when a save is due again.
            self._note_saved(command["model"])
        # One of several may be the cause: each is tried by itself.
        if len(requests) > 1:
            self._alone |= {request.id for request in requests}
            for request in requests:
                self.queue.add(request)
            return
        for request in requests:
            self._fail(request, reason)

    def _uncertain(self, command: Command | None, requests: Sequence[QueuedRequest]) -> set[str]:
        """The models that may not be in memory, or not where they were.

        The ranks have failed at this command. Each model's next request brings it back from what is
        recorded.
        """
        if command is None or command["kind"] == "asample":
            return set()
        is_live = "live" in command
        # A save reads the model only.
        if command["kind"] == "save" and not is_live:
            return set()
        # Commands that bring one back come before its request's own.
        models = {request.target for request in requests}
        if not is_live or command["model"] not in self._used_at:
            models.add(command["model"])
        return models

    def _fail(self, request: QueuedRequest, reason: str) -> None:
        answer = json.dumps({"error": reason[:LONGEST_REASON], "category": "user"}).encode()
        try:
            self.records.finish([(request.id, FAILED, answer)])
        except sqlite3.Error:
            # The disk is full: the next `take` writes it, and until then it is not shown.
            with self._lock:
                self._unwritten[request.id] = (FAILED, answer)
        self._advance(request)

    def _write_failures(self) -> bool:
        """Write what the disk had no room for; whether all is written."""
        with self._lock:
            unwritten = dict(self._unwritten)
        if not unwritten:
            return True
        try:
            self.records.finish([(name, *result) for name, result in unwritten.items()])
        except sqlite3.Error:
            return False
        with self._lock:
            for name in unwritten:
                del self._unwritten[name]
        for name in unwritten:
            self.on_done(name)
        return True

    def _advance(self, request: QueuedRequest) -> None:
        """Advance to the next request of this model."""
        self._samples.pop(request.id, None)
        self._alone.discard(request.id)
        self.queue.is_over(request)
        self.on_done(request.id)

    def _live_of(self, model: str) -> int:
        """The number of the request after which a model's own state was saved; -1 for none."""
        return int((self.records.get("model", model) or {}).get("live", -1))

    def _first_number(self, model: str) -> int:
        return 1 + max(self._live_of(model), self.records.last_done(model))

    def _commands_of(self, request: QueuedRequest) -> list[Command]:
        """The command for a request, behind those that bring its model back and free memory."""
        if request.kind == "asample":
            return [self._sampling(request)]
        command = self.reader.read(request)
        model = request.target
        before = list[Command]()
        if model not in self._used_at and not command.get("makes"):
            before = self._restored(model)
            if not before:
                raise UserError("The model was not made: the request that makes it has failed.")
        # The models that were used least recently make room.
        while len(self._used_at.keys() - {model}) >= self.most_models:
            oldest = min(self._used_at.keys() - {model}, key=self._used_at.__getitem__)
            del self._used_at[oldest]
            # Its state is saved before, unless that would lose gradients of a pass without a step:
            # then its requests are repeated.
            seq = self.queue.number_of(oldest) - 1
            if oldest not in self._with_gradients and self._live_of(oldest) != seq:
                before.append(self._save_command(oldest, seq))
            before.append({"kind": "drop", "model": oldest, "repeats": True})
        self._used_at[model] = time.monotonic()
        self._saved_at.setdefault(model, time.monotonic())
        return [*before, command]

    def _restored(self, model: str) -> list[Command]:
        """The commands by which a model that was in memory before comes back."""
        live = self.reader.model(model).get("live", -1)
        commands = list[Command]()
        if live >= 0:
            path = str(self.weights.state_folder(model, live))
            commands.append(
                {"kind": "load_weights", "model": model, "path": path, "optimizer": True}
            )
        requests = [
            request
            for request in self.records.done_after(model, live)
            if request.kind not in _SAVES
        ]
        commands += [self.reader.read(request) for request in requests]
        log.info("Model %s: brought back by %d pieces of work.", model, len(commands))
        return [command | {"repeats": True} for command in commands]

    def _note_live(self, model: str, seq: int) -> Path | None:
        """Record a model's saved state, which replaces the requests that led to it.

        Returns the folder of the last state.
        """
        entry = self.reader.model(model)
        before = entry.get("live", -1)
        self.records.put("model", model, entry | {"live": seq})
        self.records.forget_bodies(model, seq)
        self._note_saved(model)
        return self.weights.state_folder(model, before) if 0 <= before != seq else None

    def _note_saved(self, model: str) -> None:
        self._saved_at[model] = time.monotonic()
        self._steps[model] = 0

    # --- samples ---

    def _sampling(self, request: QueuedRequest) -> Command:
        """One command for a request and the others that draw alike from the same weights."""
        wanted = self._wanted(request)
        command = self.reader.sampling(wanted)
        group = SampleGroup([wanted.request])
        others = [] if request.id in self._alone else self.queue.samples()
        looked_at = 0
        for other in others:
            if other.id in self._alone:
                continue
            beside = self._read_other(other)
            if beside is None:
                continue
            looked_at += beside.request.prompt_length
            if looked_at > _MOST_LOOKED_AT:
                break
            if not beside.is_alike(wanted) or not group.has_room_for(beside.request):
                continue
            if self.queue.remove_sample(other.id) is None:
                # It has been cancelled.
                continue
            self._in_work.append(other)
            self.records.begin(other.id)
            group.requests.append(beside.request)
        return command | {"requests": [request.own for request in group.requests]}

    def _read_other(self, request: QueuedRequest) -> WantedSample | None:
        """Read a request as `_wanted` does; None if it cannot be read.

        It then fails now, and is not read again for each command.
        """
        try:
            return self._wanted(request)
        except Exception as error:
            if self.queue.remove_sample(request.id) is not None:
                self._fail(request, reason_of(error, "read"))
            return None

    def _wanted(self, request: QueuedRequest) -> WantedSample:
        """Read each request once: all that wait are looked at for each command."""
        if request.id not in self._samples:
            self._samples[request.id] = self.reader.read_sample(request)
        return self._samples[request.id]

    # --- now and then ---

    def _sweep(self) -> None:
        """Delete what has expired, old results, and what will never have its turn."""
        if time.monotonic() - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = time.monotonic()
        for late in self.queue.take_late():
            self._fail(late.request, late.reason)
        try:
            self.records.forget_old(_KEPT_RESULTS, _KEPT_BYTES)
            self.records.forget_direct_samplers(self.clock.now() - _DIRECT_SECONDS)
            self.weights.delete_expired()
            forgotten = self.sessions.forget_idle(keeping=self._used_at)
        except sqlite3.Error as error:
            log.warning("The service's folder cannot be tidied up now (%s).", error)
            return
        for model in forgotten:
            self._saved_at.pop(model, None)
            self._steps.pop(model, None)
        self.queue.forget_idle()


def reason_of(error: Exception, doing: str) -> str:
    """Why a request fails, in a sentence for its client. doing: what could not be done to it."""
    if isinstance(error, ValidationError):
        return describe_invalid(error)
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, sqlite3.Error):
        return f"The request cannot be {doing}: the service's folder cannot be written ({error})."
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    log.warning("A request could not be %s, and failed. %s", doing, shown(reason))
    return f"The request could not be {doing} ({reason[:500]})."


def describe_invalid(error: ValidationError) -> str:
    """A sentence about the first field of a request that is wrong."""
    first = error.errors(include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'The request'}: {first['msg']}."
