"""A client of a server with OpenAI's completions API, such as vLLM's.

A server may start later than the run, be restarted in the middle of it, or be busy: requests are
repeated until it has not answered for too long. Only a refusal ends the run at once.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import awake, begun
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.replies import Reply, Unusable
from fsdp_qlora.training.rl.waiting import result_of_rank_0
from fsdp_qlora.utils.errors import RankError, RolloutError, RunStopped
from fsdp_qlora.utils.text import printable

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
"""vLLM's API of token ids, which takes images beside them."""
# Prompt and answer without their tokens fit in a MiB. A token with its text, its log-probability
# and the JSON around them is far shorter than 512 bytes.
MOST_BYTES = 2**20
BYTES_PER_TOKEN = 512
# For a server that starts together with the run, as TRL waits.
_START_SECONDS = 240.0
# For an adapter that the server refuses: a network disk may show it late.
_LOAD_SECONDS = 60.0
_MODELS = "/v1/models"
_HEADERS = {"Content-Type": "application/json"}
# HTTP statuses after which the same request may succeed: timeouts, rate limits, a restart.
_MAY_PASS = (408, 429, 500, 502, 503, 504)
# Until a line says how many answers there are, and then twice as long each time.
_LINE_SECONDS = 60.0
# Requests at a time, which the server batches.
_IN_FLIGHT = 128


class RequestFailed(Exception):
    """A request has failed, and may be repeated.

    status: of HTTP, 0 without an answer. seconds: how long to wait, if not the usual time.
    """

    def __init__(self, reason: str, status: int = 0, seconds: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {reason}" if status else reason)
        self.status = status
        self.seconds = seconds


class Server:
    """Asks a server, and waits for one that does not answer now.

    Args:
        bases: names of the base model, of which the server must know one.
        patience: seconds to wait for any answer.
        pause_seconds: between two tries, the first and the longest.
    """

    def __init__(
        self,
        url: str,
        bases: Sequence[str | None],
        patience: float,
        pause_seconds: tuple[float, float] = (0.5, 10.0),
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._pause_seconds = pause_seconds
        self._bases = [base for base in bases if base]
        self._answered_at = awake()
        self._away_since = 0.0
        # The reason that was logged last, so that the threads log it once; empty after an answer.
        self._logged_reason = ""
        self._noting = threading.Lock()
        self._loading = threading.Lock()
        # Threads that still ask end by this, where the process goes on, as in a notebook.
        self.is_closed = False

    def ask(self, path: str, body: object = None, most_bytes: int = MOST_BYTES) -> bytes:
        """Send one request, a POST if it has a body.

        No redirect is followed, and no proxy of the environment is used.

        Raises:
            RequestFailed: it is refused, or not answered in full within the patience.
            RolloutError: the answer is longer than `most_bytes`.
        """
        url = urlsplit(f"{self.url}{path}")
        began = awake()
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(
                    contextlib.closing(kind(url.netloc, timeout=self._patience))
                )
                connection.connect()
                # The connection's own timeout begins again with each byte: a server that sends one
                # now and then would never be too late. The timer ends the whole request.
                late = threading.Timer(self._patience, _end, [connection.sock])
                stack.callback(late.cancel)
                late.start()
                connection.request(method, url.path, content, _HEADERS)
                response = connection.getresponse()
                # One byte more than allowed shows that there are too many, whatever headers say.
                answer = response.read(most_bytes + 1)
                reason = response.getheader("Location") or response.reason
                # A connection that is cut in the middle ends a read without an error.
                is_cut = bool(response.length) and len(answer) <= most_bytes
                if is_cut or awake() - began >= self._patience:
                    raise IncompleteRead(answer)
            except (OSError, HTTPException, ValueError) as error:
                is_late = awake() - began >= self._patience
                described = "timed out" if is_late else str(error) or type(error).__name__
                raise RequestFailed(described) from error
        if response.status >= 300:
            # OpenAI's form of an error; other servers have their own, or HTML.
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                reason = json.loads(answer)["error"]["message"]
            raise RequestFailed(shortened(reason), response.status)
        if len(answer) > most_bytes:
            raise RolloutError(
                f"The server {self.url} answers {path} with more than {most_bytes:,} bytes."
            )
        return answer

    def patiently(self, ask: Callable[[], T]) -> T:
        """Call `ask`, in any thread, until it returns; a line says what is waited for.

        Raises:
            RolloutError: the server refuses the request, or has answered no other one for too long.
        """
        began = awake()
        pause, longest = self._pause_seconds
        while True:
            try:
                if self.is_closed:
                    raise RolloutError("The run has ended.")
                answer = ask()
            except RequestFailed as error:
                if error.status and error.status not in _MAY_PASS:
                    raise RolloutError(
                        f"The server {self.url} refuses a request: {error}."
                    ) from error
                limit = min(error.seconds or self._patience, self._patience)
                self._note(str(error), limit)
                # Measured from the last answer to any thread: a server that answers others is busy
                # and not lost.
                if awake() - max(began, self._answered_at) + pause > limit:
                    raise RolloutError(
                        f"The server {self.url} did not answer within {limit:.3g} s: {error}."
                    ) from error
            else:
                self._note("")
                return answer
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def all_answers(self, count: int, ask: Callable[[int], T]) -> list[T]:
        """Call `ask` `patiently` for each of `count` requests, in threads.

        Raises:
            RolloutError: as `patiently`.
        """
        places = range(count)
        answers = dict[int, T]()

        def ask_every(first: int) -> None:
            # Each thread has its own places, and assigning to a dict is atomic: no lock is needed.
            for place in places[first::_IN_FLIGHT]:
                answers[place] = self.patiently(partial(ask, place))

        tasks = {begun(partial(ask_every, first)) for first in places[:_IN_FLIGHT]}
        seconds = _LINE_SECONDS
        while tasks:
            done, tasks = wait(tasks, seconds, FIRST_EXCEPTION)
            # Raises the error of a thread.
            for task in done:
                task.result()
            if tasks:
                log.info("The server has given %d of %d answers.", len(answers), len(places))
                seconds *= 2
        return [answers[place] for place in places]

    def answer_of(self, work: Callable[[], str], control: Control, ranks: Ranks, step: int) -> str:
        """Run work that asks this server by `run_on_rank_0`.

        After an error none of its threads asks on.
        """
        task = begun(work) if ranks.is_rank_0 else None
        return self.result_of(task, control, ranks, step)

    def result_of(self, task: Future[str] | None, control: Control, ranks: Ranks, step: int) -> str:
        """Wait for work that asks this server, and has begun, by `result_of_rank_0`.

        As `answer_of`.
        """
        try:
            return result_of_rank_0(task, control, ranks, step)
        except (RolloutError, RunStopped):
            self.is_closed = True
            raise

    def _note(self, reason: str, limit: float = 0.0) -> None:
        """Say why the server does not answer, or, without a reason, that it answers again."""
        with self._noting:
            if reason and reason != self._logged_reason:
                log.warning(
                    "Waiting for the server %s, at most %.3g s: %s.", self.url, limit, reason
                )
                # With another reason it is still away since the first one.
                if not self._logged_reason:
                    self._away_since = awake()
            elif self._logged_reason and not reason:
                log.info(
                    "The server %s answers again after %.0f s.",
                    self.url,
                    awake() - self._away_since,
                )
            self._logged_reason = reason
            if not reason:
                self._answered_at = awake()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise RolloutError if the block finds an answer unusable."""
        try:
            yield
        except Unusable as error:
            raise RolloutError(f"The server {self.url} {error}.") from error

    def names(self) -> list[str]:
        """The names of its base model, which is the first, and of its adapters.

        Raises:
            RolloutError: it has another base. RequestFailed.
        """
        with self.reading():
            reply = Reply(_MODELS, self.ask(_MODELS))
            cards = reply.get("data", kind=list)
            names: list[str] = [
                reply.get("data", place, "id", kind=str) for place in range(len(cards))
            ]
            # vLLM gives an adapter its base as the parent.
            bases = [card for card in cards if not card.get("parent")]
            if not bases:
                raise Unusable(f"answers {_MODELS} without a base model")
        base = bases[0]
        # Folders may be mounted elsewhere on the server: the last part of a path must be the same.
        served_names = {Path(str(base.get(key))).name for key in ("id", "root")}
        if served_names.isdisjoint(Path(name).name for name in self._bases):
            raise RolloutError(
                f"The server {self.url} has the model {shortened(base['id'])}, and the run trains "
                f"{self._bases[0]}. If they are the same weights, say so to the server: "
                f"--served-model-name {self._bases[0]}."
            )
        return [base["id"], *(name for name in names if name != base["id"])]

    def load_newest(self, name: str, folder: Path) -> None:
        """Have this adapter loaded, and no other one of its run.

        Raises:
            RequestFailed or RolloutError.
        """
        # Names are RUN-vVERSION-HASH.
        run = name.partition("-v")[0]
        self.load(name, folder, lambda other: other.startswith(f"{run}-v"))

    def load(self, name: str, folder: Path, is_old: Callable[[str], bool]) -> None:
        """Have this adapter loaded, and no old one of another name.

        Args:
            is_old: whether an adapter is not needed any more.
        Raises:
            RequestFailed or RolloutError.
        """
        # Many threads notice at once that a restarted server has lost the adapter.
        with self._loading:
            loaded = self.names()
            # Old ones go first: a server may have one place only.
            for other in loaded:
                if other != name and is_old(other):
                    with contextlib.suppress(RequestFailed):
                        self.ask("/v1/unload_lora_adapter", {"lora_name": other})
            try:
                if name not in loaded:
                    self.ask(
                        "/v1/load_lora_adapter",
                        {"lora_name": name, "lora_path": str(folder.absolute())},
                    )
            except RequestFailed as error:
                raise RequestFailed(
                    f"it does not load the adapter in {folder} ({error})", seconds=_LOAD_SECONDS
                ) from error


def shortened(value: object) -> str:
    """Cut a server's text to fit a message."""
    return printable(str(value)[:500])[:500]


def _end(connection: socket.socket) -> None:
    """End a connection at which another thread waits."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def check_server(
    url: str,
    bases: Sequence[str | None],
    option: str = "rollout_url",
    start_seconds: float = _START_SECONDS,
) -> None:
    """Ask a server before the run begins. Called on rank 0.

    start_seconds: how long it may take until it answers.

    Raises:
        RankError: it does not answer, has another base, or takes no adapters for rollouts.
    """
    server = Server(url, bases, start_seconds)
    try:
        server.patiently(server.names)
        # A request without a name and a path loads nothing, and shows whether the route exists.
        if option == "rollout_url":
            server.ask("/v1/load_lora_adapter", {})
    except RolloutError as error:
        raise RankError(f"--{option}: {error}") from error
    except RequestFailed as error:
        # Another status says that the request is wrong, as it is.
        if error.status in (404, 405, 501):
            raise RankError(
                f"--rollout_url: the server {server.url} takes no adapters at run time. Start vLLM "
                "with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment."
            ) from error


def check_takes_images(url: str, bases: Sequence[str | None]) -> None:
    """Ask a server, which answers, whether it has the API that takes images. Called on rank 0.

    Raises RankError: it has not.
    """
    # A request without tokens is answered with what is wrong with it.
    try:
        Server(url, bases, _START_SECONDS).ask(GENERATE, {})
    except RequestFailed as error:
        if error.status in (403, 404, 405, 501):
            raise RankError(
                f"--rollout_url: some prompts have images, and the server {url} does not take them "
                f"at {GENERATE} ({error}). Start vLLM with --enable-scale-out."
            ) from error
