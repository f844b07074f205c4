"""Takes the requests of clients on rank 0, and turns them into commands for all ranks.

Requests of a model are done in the order of their numbers, whatever order they come in. A request
that cannot be done fails alone, and its number counts as used: a client goes on with the next one.
"""

import contextlib
import dataclasses
import logging
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tinker.proto import tinker_public_pb2 as pb

from fsdp_qlora.service import names
from fsdp_qlora.service.command_reader import Base, CommandReader, WantedSample
from fsdp_qlora.service.commands import (
    Command,
    DropModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
)
from fsdp_qlora.service.jobs import Job
from fsdp_qlora.service.messages import PromptScores, encode_samples
from fsdp_qlora.service.model_states import ModelStates
from fsdp_qlora.service.parsed_requests import ParsedRequests
from fsdp_qlora.service.reasons import reason_of
from fsdp_qlora.service.records import DONE, QueuedRequest, Records
from fsdp_qlora.service.request_queue import RequestQueue
from fsdp_qlora.service.results import Results
from fsdp_qlora.service.sample_server import SampleServer
from fsdp_qlora.service.saved_weights import SavedWeights
from fsdp_qlora.service.server_samples import ServerSamples
from fsdp_qlora.service.sessions import Sessions
from fsdp_qlora.service.waiting_samples import WaitingSamples
from fsdp_qlora.service.wall_clock import WallClock
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# Seconds between two checks for what has expired.
_SWEEP_SECONDS = 60.0
# Results of requests, besides those that a model's state needs, and their bytes.
_KEPT_RESULTS = 20_000
_KEPT_BYTES = 2**30
# Tries of a request during which the service ends: it may be the cause.
_MAX_TRIES = 3
# Time for which a sampler of a single request is kept at least.
_DIRECT_SECONDS = 3600.0
_SAVES = ("save_weights", "save_weights_for_sampler")


class Scheduler:
    """The requests that wait, and the job in work.

    Args:
        folder: of checkpoints.
        bases: the one whose adapters are trained, and others as they are.
        max_rank: the maximum rank of adapters.
        max_models: the maximum number of models in memory.
        save_times: steps and seconds after which a model's state is saved, so that fewer requests
            must be repeated after a kill; 0 for never.
        server: answers requests for samples of the first base, if there is one.
    """

    def __init__(
        self,
        records: Records,
        folder: Path,
        bases: Sequence[Base],
        *,
        max_rank: int,
        max_models: int,
        save_times: tuple[int, float],
        server: SampleServer | None = None,
    ) -> None:
        self.records = records
        self.max_models = max_models
        self.clock = WallClock()
        self.weights = SavedWeights(records, folder, self.clock)
        self.sessions = Sessions(records, self.weights, self.clock)
        self.results = Results(records)
        self.parsed = ParsedRequests()
        self.reader = CommandReader(records, self.weights, self.parsed, bases, max_rank)
        self.server = server
        at_server = list[QueuedRequest]()
        for_ranks = list[QueuedRequest]()
        for request in records.waiting():
            (at_server if self._is_for_server(request) else for_ranks).append(request)
        self.queue = RequestQueue(for_ranks, self._first_number)
        self.server_queue = RequestQueue(at_server, self._first_number)
        self.models = ModelStates(save_times)
        alone = records.tried_samples()
        self.samples = WaitingSamples(self.reader, self.queue, alone, self._fail)
        self._in_work: list[QueuedRequest] = []
        self._coming: deque[Job] = deque()
        self._job: Job | None = None  # that the ranks execute
        self._swept_at = -_SWEEP_SECONDS
        if server is not None:
            ServerSamples(
                server,
                self.server_queue,
                read=self._command_for_server,
                done=self._answered,
                fail=self._fail,
            ).start()

    # --- for the web server's threads ---

    def submit(
        self,
        request: QueuedRequest,
        body: bytes,
        message: pb.ForwardBackwardRequest | None = None,
    ) -> None:
        """Queue a request; one with a known target and number is a repetition, and is ignored.

        Args:
            message: the body of a forward_backward, parsed.
        Raises:
            Busy: the client should ask again later.
            UserError: too many others come before it.
        """
        queue = self.server_queue if self._is_for_server(request) else self.queue
        queue.check(request)
        # Recorded before the client hears of it, so that a kill loses no request.
        if not self.records.add(request, body):
            return
        # Before it is in the queue, as it may be its turn at once.
        if message is not None:
            self.parsed.put(request.id, message, request.size)
        if not queue.add(request):
            self._fail(request, f"The model's request {request.seq} has been passed over.")

    def cancel(self, name: str) -> None:
        """Give up a request for samples that has not begun."""
        request = self.server_queue.remove_sample(name) or self.queue.remove_sample(name)
        if request:
            self._fail(request, "cancelled")

    def _is_for_server(self, request: QueuedRequest) -> bool:
        """Whether the server answers a request, and not the ranks."""
        is_sample = self.server is not None and request.kind == "asample"
        return is_sample and self.reader.samples_trained_base(request.target)

    # --- for the server's threads ---

    def _command_for_server(self, request: QueuedRequest) -> Sample | None:
        """The command of a request for samples; None if the ranks draw them, since its prompt has
        images, and servers are asked with tokens. Raises UserError or others.
        """
        wanted = self.samples.read(request)
        if wanted.request.images:
            self.queue.add(request)
            return None
        self._refuse_if_ignored(wanted)
        return self.reader.sampling(wanted)

    def _answered(self, request: QueuedRequest, answers: list[Completion]) -> None:
        """Record a server's answers, or hand them to the ranks for what these find of them."""
        try:
            wanted = self.samples.read(request)
            checked = self._checked_model(wanted)
            # Asked last: it may be found meanwhile that the server ignores the adapter.
            self._refuse_if_ignored(wanted)
            if wanted.request.scores or checked is not None:
                self.samples.answers[request.id] = answers
                self.queue.add(request)
                return
            result = encode_samples(answers, PromptScores())
            self.records.finish([(request.id, DONE, result)])
        except Exception as error:
            self._fail(request, reason_of(error, "recorded"))
        else:
            self._advance(request)

    def _refuse_if_ignored(self, wanted: WantedSample) -> None:
        """Raise UserError if the server is known to ignore the adapter of a request."""
        model = _model_of(wanted)
        if model is None or self.server is None:
            return
        refusal = self.server.checks.refusal(model)
        if refusal is not None:
            raise UserError(refusal)

    def _checked_model(self, wanted: WantedSample) -> str | None:
        """The model of a request's weights, if its answers are to be compared; None if not."""
        model = _model_of(wanted)
        if model is None or self.server is None:
            return None
        saved_by = self.weights.entry(str(wanted.sampler["path"]))["piece"]
        return model if self.server.checks.is_due(model, saved_by) else None

    # --- for the main thread ---

    def take(self, seconds: float) -> Command | None:
        """The next command; None if there is none within these seconds."""
        # If nothing can be recorded, nothing is begun.
        if not self.results.write_failures():
            time.sleep(seconds)
            return None
        self._sweep()
        if not self._coming:
            self._begin_next(seconds)
        if not self._coming:
            # There is none, or it has failed: ranks give a sign of life between two requests.
            return None
        self._job = self._coming.popleft()
        with self._failing("read"):
            return self._with_arrays(self._job.command)
        return None

    def _begin_next(self, seconds: float) -> None:
        """Turn the next request into jobs, if one comes within these seconds and is valid."""
        request = self.queue.take(seconds)
        if request is None:
            return
        self._in_work = [request]
        with self._failing("read"):
            tries = self.records.begin(request.id)
            if tries > _MAX_TRIES:
                raise UserError("The service has ended each time that it worked on this request.")
            # Answered by itself from the second try on, so that it fails no others.
            if tries > 1:
                self.samples.alone.add(request.id)
            self._coming.extend(self._jobs_of(request))

    def _with_arrays(self, command: Command) -> Command:
        # Read only now: bodies of requests to repeat are many, and would all be in memory.
        if not isinstance(command, ForwardBackward) or command.request is not None:
            return command
        request = self.reader.train_request(f"{command.model}:{command.seq}")
        return dataclasses.replace(command, request=request)

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Any exception in the block fails the requests in work, and nothing else."""
        try:
            yield
        except Exception as error:
            self.refuse(reason_of(error, doing))

    # --- results ---

    def finish(self, results: Sequence[bytes]) -> None:
        """Record the results of the last command, and tell the clients that wait for them."""
        assert self._job is not None
        with self._failing("recorded"):
            self._record(self._job, results)

    def _record(self, job: Job, results: Sequence[bytes]) -> None:
        # A repeated request has its result already.
        requests = [] if job.is_internal else self._in_work
        if job.answer is not None:
            results = [job.answer]
        replaced = None
        with self.records.all_or_none():
            if job.checkpoint is not None:
                self.records.checkpoints.put(*job.checkpoint)
            if isinstance(job.command, SaveWeights) and job.saves_state_at is not None:
                replaced = self._note_state(job.command.model, job.saves_state_at)
            self.records.finish(
                [
                    (request.id, DONE, result)
                    for request, result in zip(requests, results, strict=False)
                ]
            )
        # Only now does no entry name the old folder.
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._job = None
        self._note_gradients(job.command)
        if job.is_internal:
            return
        self._in_work = []
        for request in requests:
            self._advance(request)
        self._save_if_due(job.command, requests)

    def _note_gradients(self, command: Command) -> None:
        if isinstance(command, ForwardBackward):
            self.models.note_gradients(command.model, has_gradients=True)
        elif isinstance(command, OptimStep | LoadWeights):
            self.models.note_gradients(command.model, has_gradients=False)

    def _note_state(self, model: str, seq: int) -> Path | None:
        """Record a model's saved state, which replaces the requests that led to it.

        Returns the folder of the last state.
        """
        entry = self.reader.model(model)
        before = entry.get("live", -1)
        self.records.models.put(model, entry | {"live": seq})
        self.records.forget_bodies(model, seq)
        self.models.note_saved(model)
        return self.weights.state_folder(model, before) if 0 <= before != seq else None

    def _save_if_due(self, command: Command, requests: Sequence[QueuedRequest]) -> None:
        """Save the model's state after a step, if it is time.

        It always is after load_weights, since the loaded files may be deleted.
        """
        if not isinstance(command, OptimStep | LoadWeights):
            return
        is_due = isinstance(command, LoadWeights) or self.models.note_step(command.model)
        if is_due:
            [request] = requests
            self._coming.append(self._saving_of_state(command.model, request.seq))

    def _saving_of_state(self, model: str, seq: int) -> Job:
        """The job that saves a model's state after the request of this number.

        The state has no gradients.
        """
        path = str(self.weights.state_folder(model, seq))
        command = SaveWeights(model, path, with_optimizer=True)
        return Job(command, is_internal=True, saves_state_at=seq)

    # --- failures ---

    def refuse(self, reason: str, lost: Iterable[str] = ()) -> None:
        """Record that the last command, and those that were to follow, cannot be executed.

        Args:
            lost: models that the ranks have lost by it.
        """
        job = self._job
        requests = self._in_work
        self._job = None
        self._in_work = []
        self._coming.clear()
        for model in {*lost, *self._uncertain(job, requests)}:
            self.models.remove(model)
            self._coming.append(Job(DropModel(model), is_internal=True))
        if job is not None and job.saves_state_at is not None:
            self._give_up_saving(job, reason)
        # One of several may be the cause: each is tried by itself.
        if len(requests) > 1:
            self.samples.alone |= {request.id for request in requests}
            for request in requests:
                self.queue.add(request)
            return
        for request in requests:
            self._fail(request, reason)

    def _give_up_saving(self, job: Job, reason: str) -> None:
        """Log that a model's state cannot be saved now."""
        command = job.command
        assert isinstance(command, SaveWeights)
        log.warning("Model %s: its state cannot be saved now. %s", command.model, reason)
        if self._state_number(command.model) != job.saves_state_at:
            shutil.rmtree(command.path, ignore_errors=True)
        # The next try comes when a save is due again.
        self.models.note_saved(command.model)

    def _uncertain(self, job: Job | None, requests: Sequence[QueuedRequest]) -> set[str]:
        """The models that may not be in memory, or whose weights may be half changed.

        The ranks have failed at this job. Each model's next request brings it back from what is
        recorded.
        """
        if job is None or isinstance(job.command, Sample):
            return set()
        saves_state = job.saves_state_at is not None
        # A save reads the model only.
        if isinstance(job.command, SaveWeights) and not saves_state:
            return set()
        # Jobs that bring a model back come before its request's own.
        models = {request.target for request in requests}
        if not saves_state or job.command.model not in self.models.in_memory():
            models.add(job.command.model)
        return models

    def _fail(self, request: QueuedRequest, reason: str) -> None:
        self.results.fail(request.id, reason)
        self._advance(request)

    def _advance(self, request: QueuedRequest) -> None:
        """Advance to the next request of this model."""
        self.samples.forget(request)
        self.parsed.take(request.id)
        self.queue.is_over(request)
        self.results.on_done(request.id)

    # --- jobs of a request ---

    def _jobs_of(self, request: QueuedRequest) -> list[Job]:
        """The job of a request, behind those that bring its model back and free memory."""
        if request.kind == "asample":
            return [self._sampling(request)]
        job = self.reader.read(request)
        model = request.target
        before = list[Job]()
        # Number 0 is the request that makes the model.
        if request.seq > 0 and model not in self.models.in_memory():
            before = self._restored(model)
            if not before:
                raise UserError("The model was not made: the request that makes it has failed.")
        while len(self.models.in_memory() - {model}) >= self.max_models:
            before += self._removed(self.models.least_recently_used(besides=model))
        self.models.note_use(model)
        return [*before, job]

    def _removed(self, model: str) -> list[Job]:
        """The jobs by which a model leaves memory."""
        # Its state is saved before, unless that would lose gradients of a pass without a step:
        # then its requests are repeated.
        seq = self.queue.number_of(model) - 1
        jobs = list[Job]()
        if not self.models.has_gradients(model) and self._state_number(model) != seq:
            jobs.append(self._saving_of_state(model, seq))
        self.models.remove(model)
        jobs.append(Job(DropModel(model), is_internal=True))
        return jobs

    def _restored(self, model: str) -> list[Job]:
        """The jobs by which a model that was in memory before comes back."""
        saved_at = self.reader.model(model).get("live", -1)
        jobs = list[Job]()
        if saved_at >= 0:
            path = str(self.weights.state_folder(model, saved_at))
            jobs.append(Job(LoadWeights(model, path, with_optimizer=True), is_internal=True))
        jobs += [
            self.reader.read_repeat(request)
            for request in self.records.done_after(model, saved_at)
            if request.kind not in _SAVES
        ]
        log.info("Model %s: brought back by %d pieces of work.", model, len(jobs))
        return jobs

    def _sampling(self, request: QueuedRequest) -> Job:
        """One job for a request and the others with the same weights and sampling settings."""
        wanted = self.samples.read(request)
        # Other answers by the same adapter may have shown it since.
        if request.id in self.samples.answers:
            self._refuse_if_ignored(wanted)
        command = self.reader.sampling(wanted)
        for other in self.samples.take_beside(request):
            self._in_work.append(other)
            self.records.begin(other.id)
        requests = tuple(self.samples.read(each).request for each in self._in_work)
        command = dataclasses.replace(command, requests=requests)
        # A server has answered the requests of all that are alike, or of none.
        if request.id in self.samples.answers:
            answers = [self.samples.answers[each.id] for each in self._in_work]
            checked = self._checked_model(wanted)
            command = dataclasses.replace(command, answers=answers, checked=checked)
        return Job(command)

    def _state_number(self, model: str) -> int:
        """The number of the request after which a model's own state was saved; -1 for none."""
        entry = self.records.models.get(model)
        return -1 if entry is None else entry.get("live", -1)

    def _first_number(self, model: str) -> int:
        return 1 + max(self._state_number(model), self.records.last_done(model))

    # --- now and then ---

    def _sweep(self) -> None:
        """Delete expired weights, old results, and requests that will never have their turn."""
        if time.monotonic() - self._swept_at < _SWEEP_SECONDS:
            return
        self._swept_at = time.monotonic()
        for late in self.queue.take_late():
            self._fail(late.request, late.reason)
        try:
            self.records.forget_old(_KEPT_RESULTS, _KEPT_BYTES)
            self.records.forget_direct_samplers(self.clock.now() - _DIRECT_SECONDS)
            self.weights.delete_expired()
            forgotten = self.sessions.forget_idle(keeping=self.models.in_memory())
        except sqlite3.Error as error:
            log.warning("The service's folder cannot be tidied up now (%s).", error)
            return
        for model in forgotten:
            self.models.forget(model)
        self.queue.forget_idle()


def _model_of(wanted: WantedSample) -> str | None:
    """The model whose weights a request samples from; None for a base."""
    path = wanted.sampler["path"]
    return None if path is None else names.parts_of(path)[0]
