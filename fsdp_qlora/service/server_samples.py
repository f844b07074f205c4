"""Requests for samples that a server answers, beside what the ranks do."""

import threading
from collections.abc import Callable
from functools import partial

from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.service.commands import Sample
from fsdp_qlora.service.reasons import reason_of
from fsdp_qlora.service.records import QueuedRequest
from fsdp_qlora.service.request_queue import RequestQueue
from fsdp_qlora.service.sample_server import SampleServer
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.utils.errors import RolloutError

# Samples at a time, which the server batches.
_IN_FLIGHT = 128
_PAUSE_SECONDS = 1.0


class ServerSamples:
    """Takes requests out of a queue, and has a server answer them in threads.

    A request that is not answered yet when the service ends is asked again by the next one.

    Args:
        queue: of requests for samples alone.
        read: gives a request's command; None if it is not for the server after all. Raises
            UserError or others.
        done: is called with a request and its answers, in a thread.
        fail: is called with a request and the reason, in a thread.
    """

    def __init__(
        self,
        server: SampleServer,
        queue: RequestQueue,
        *,
        read: Callable[[QueuedRequest], Sample | None],
        done: Callable[[QueuedRequest, list[Completion]], object],
        fail: Callable[[QueuedRequest, str], object],
    ) -> None:
        self.queue = queue
        self._server = server
        self._read = read
        self._done = done
        self._fail = fail
        self._room = threading.Semaphore(_IN_FLIGHT)

    def start(self) -> None:
        """Take requests in a thread that lives as long as the process."""
        begun(self._take_all)

    def _take_all(self) -> None:
        while True:
            request = self.queue.take(_PAUSE_SECONDS)
            if request is not None:
                self._begin(request)

    def _begin(self, request: QueuedRequest) -> None:
        try:
            command = self._read(request)
        except Exception as error:
            self._fail(request, reason_of(error, "read"))
            return
        if command is None:
            return
        [wanted] = command.requests
        answers: list[Completion | None] = [None] * wanted.num_samples
        pending = _Pending(self, request, answers)
        for sample in range(wanted.num_samples):
            # One request with a thousand samples does not take all threads at once, and sessions
            # take turns by the queue.
            self._room.acquire()
            if pending.has_failed:
                self._room.release()
                return
            begun(partial(self._answer, pending, command, sample))

    def _answer(self, pending: "_Pending", command: Sample, sample: int) -> None:
        try:
            answer = self._server.answer(command, sample)
        except Exception as error:
            is_plain = isinstance(error, RolloutError)
            pending.fail(str(error) if is_plain else reason_of(error, "answered"))
        else:
            pending.put(sample, answer)
        finally:
            self._room.release()


class _Pending:
    """A request whose samples are being answered. Its methods may be called in any thread."""

    def __init__(
        self, owner: ServerSamples, request: QueuedRequest, answers: list[Completion | None]
    ) -> None:
        self.has_failed = False
        self._owner = owner
        self._request = request
        self._answers = answers
        self._lock = threading.Lock()

    def put(self, sample: int, answer: Completion) -> None:
        """Add an answer; the last one ends the request."""
        with self._lock:
            self._answers[sample] = answer
            complete = [each for each in self._answers if each is not None]
            if len(complete) < len(self._answers):
                return
        self._owner._done(self._request, complete)

    def fail(self, reason: str) -> None:
        """Fail the request, once."""
        with self._lock:
            is_first = not self.has_failed
            self.has_failed = True
        if is_first:
            self._owner._fail(self._request, reason)
