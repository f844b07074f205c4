"""The engines of a run's rollouts, its own model or a server, and how ranks wait for answers.

A server has OpenAI's completions API and takes LoRA adapters at run time, as vLLM. Before each
generation the adapter is written to a folder that both see, and loaded under a name of its own: the
run, the version and a hash of its weights. Requests ask for that name, and an answer under another
one ends the run. So nothing is learned from other weights, whichever process dies in between.
"""

import contextlib
import json
import logging
import shutil
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.taught import target_numbers
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
)
from fsdp_qlora.distributed.ranks import Ranks, derive_seed
from fsdp_qlora.distributed.supervision.clock import awake, begun
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.training.generation.generate import Completion, SamplingOptions, Stops
from fsdp_qlora.training.rl.replies import Reply, Unusable
from fsdp_qlora.utils.errors import RankError, RolloutError, RunStopped, TrainingError
from fsdp_qlora.utils.files import record_of
from fsdp_qlora.utils.text import printable

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")

# ranks may wait for minutes, in which NCCL's kernels would keep GPU and core busy
_BY_GLOO = torch.device("cpu")
_PULSE_SECONDS = 0.5  # between two signs of life
_START_SECONDS = 240.0  # for a server that starts together with the run, as TRL waits
_LOAD_SECONDS = 60.0  # for an adapter that the server refuses: a network disk may show it late
_PAUSE_SECONDS = (0.5, 10.0)  # between two tries, the first and the longest
_MODELS = "/v1/models"
_COMPLETIONS = "/v1/completions"
_HEADERS = {"Content-Type": "application/json"}
_MAY_PASS = (408, 429, 500, 502, 503, 504)
_LINE_SECONDS = 60.0  # until a line says how many answers there are, then twice as long
_IN_FLIGHT = 128  # requests at a time, which the server batches
_MOST_BYTES = 2**20  # of an answer, and of one to a prompt besides
_BYTES_PER_TOKEN = 512
# vLLM takes what a request leaves out from the model's generation_config.json.
_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


# (prompts, generation, version) -> completions: answers each prompt with the weights that the run
# has now; one is there as often as it has answers. Called on every rank with all, and returns all.
# prompts: token ids. generation: its number in the run; an answer's seed follows from the run's,
# this number and its place. version: optimizer steps that the weights have had.
Engine = Callable[[Sequence[Sequence[int]], int, int], list[Completion]]


def check_stop(control: Control, ranks: Ranks, step: int, *, is_done: bool = False) -> bool:
    """Show that this rank lives, and stop all ranks if one is asked to. Returns whether rank 0
    `is_done`.

    Raises:
        RunStopped: on every rank.
    """
    numbers = gather_numbers([is_done, *control.flags(step)], _BY_GLOO)
    control.heartbeat.beat(step, "rows")
    control.agree(numbers[:, 1:])
    if control.stop:
        state, reason = control.stop
        raise RunStopped(state, f"Stopped while step {step + 1} waited for answers ({reason}).")
    return bool(numbers[0, 0])


def run_on_rank_0(work: Callable[[], str], control: Control, ranks: Ranks, step: int) -> str:
    """Run `work` in a thread of rank 0, and return its text on every rank; meanwhile all ranks
    `check_stop`.

    Raises:
        RunStopped: on every rank. RolloutError: of `work`; the same on every rank.
    """
    text = ""
    task = begun(work) if ranks.is_rank_0 else None
    while not check_stop(control, ranks, step, is_done=task is not None and task.done()):
        wait([task] if task else [], _PULSE_SECONDS)
    with raise_on_all_ranks(RolloutError, _BY_GLOO):
        if task:
            text = task.result()
    return all_gather_strings(text, _BY_GLOO)[0]


class RequestFailed(Exception):
    """A request has failed. status: of HTTP, 0 without an answer. seconds: to wait, if it is not
    the usual time.
    """

    def __init__(self, reason: str, status: int = 0, seconds: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {reason}" if status else reason)
        self.status = status
        self.seconds = seconds


class Server:
    """Asks a server, and waits for one that does not answer now.

    Args:
        bases: names of the base model, of which the server must know one. patience: seconds to wait
        for any answer.
    """

    def __init__(self, url: str, bases: Sequence[str | None], patience: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        self._bases = [base for base in bases if base]
        self._answered_at = awake()
        self._away_since = 0.0
        self._said = ""
        self._noting = threading.Lock()
        self._loading = threading.Lock()
        # threads that still ask end, where the process goes on, as in a notebook
        self.is_closed = False

    def ask(self, path: str, body: object = None, most_bytes: int = _MOST_BYTES) -> bytes:
        """Send one request, a POST if it has a body. No redirect is followed, and no proxy of the
        environment used.

        Raises:
            RequestFailed: it is refused, or not answered in full within the patience.
            RolloutError: the answer is longer than `most_bytes`.
        """
        url = urlsplit(f"{self.url}{path}")
        began = awake()
        method, sent = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        with contextlib.ExitStack() as ended:
            try:
                connection = ended.enter_context(
                    contextlib.closing(kind(url.netloc, timeout=self._patience))
                )
                connection.connect()
                # its own timeout is that of each byte
                late = threading.Timer(self._patience, _end, [connection.sock])
                ended.callback(late.cancel)
                late.start()
                connection.request(method, url.path, sent, _HEADERS)
                response = connection.getresponse()
                answer = response.read(most_bytes + 1)
                reason = response.getheader("Location") or response.reason
                if awake() - began >= self._patience or (
                    response.length and len(answer) <= most_bytes
                ):
                    raise IncompleteRead(answer)
            except (OSError, HTTPException, ValueError) as error:
                is_late = awake() - began >= self._patience
                raise RequestFailed(
                    "timed out" if is_late else str(error) or type(error).__name__
                ) from error
        if response.status >= 300:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                reason = json.loads(answer)["error"]["message"]
            raise RequestFailed(_cut(reason), response.status)
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
        (pause, longest) = _PAUSE_SECONDS
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
                if awake() - max(began, self._answered_at) + pause > limit:
                    raise RolloutError(
                        f"The server {self.url} was waited for, {limit:.3g} s: {error}."
                    ) from error
            else:
                self._note("")
                return answer
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def all_answers(self, count: int, ask: Callable[[int], T]) -> list[T]:
        """Call `ask` `patiently` for each of so many requests, in threads. Raises RolloutError as
        that does.
        """
        places = range(count)
        answers = dict[int, T]()

        def some(first: int) -> None:
            for place in places[first::_IN_FLIGHT]:
                answers[place] = self.patiently(partial(ask, place))

        left = {begun(partial(some, first)) for first in places[:_IN_FLIGHT]}
        seconds = _LINE_SECONDS
        while left:
            done, left = wait(left, seconds, FIRST_EXCEPTION)
            for task in done:
                task.result()
            if left:
                log.info("The server has given %d of %d answers.", len(answers), len(places))
                seconds *= 2
        return [answers[place] for place in places]

    def answer_of(self, work: Callable[[], str], control: Control, ranks: Ranks, step: int) -> str:
        """`run_on_rank_0` of work that asks this server; after an error no thread of it asks on."""
        try:
            return run_on_rank_0(work, control, ranks, step)
        except (RolloutError, RunStopped):
            self.is_closed = True
            raise

    def _note(self, reason: str, limit: float = 0.0) -> None:
        """Say why the server does not answer, or, without a reason, that it answers again."""
        with self._noting:
            if reason and reason != self._said:
                log.warning(
                    "Waiting for the server %s, %.3g s at most: %s.", self.url, limit, reason
                )
                self._away_since = self._away_since if self._said else awake()
            elif self._said and not reason:
                log.info(
                    "The server %s answers again after %.0f s.",
                    self.url,
                    awake() - self._away_since,
                )
            self._said, self._answered_at = reason, self._answered_at if reason else awake()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Raise RolloutError if the block finds an answer unusable."""
        try:
            yield
        except Unusable as error:
            raise RolloutError(f"The server {self.url} {error}.") from error

    def names(self) -> list[str]:
        """The names of its base model and adapters. Raises RolloutError if it has another base, and
        RequestFailed.
        """
        with self.reading():
            reply = Reply(_MODELS, self.ask(_MODELS))
            cards = reply.get("data", kind=list)
            names: list[str] = [
                reply.get("data", place, "id", kind=str) for place in range(len(cards))
            ]
            base = next((card for card in cards if not card.get("parent")), None)
            if base is None:
                raise Unusable(f"answers {_MODELS} without a base model")
        if not {Path(str(base.get(key))).name for key in ("id", "root")} & {
            Path(name).name for name in self._bases
        }:
            raise RolloutError(
                f"The server {self.url} has the model {_cut(base['id'])}, and the run trains "
                f"{self._bases[0]}. If they "
                f"are the same weights, say so to the server: --served-model-name {self._bases[0]}."
            )
        return names

    def load(self, name: str, folder: Path) -> None:
        """Have this adapter loaded, and no other one of its run. Raises RequestFailed or
        RolloutError.
        """
        with self._loading:
            loaded = self.names()
            run = name.partition("-v")[0]
            for other in loaded:
                if other != name and other.startswith(f"{run}-v"):
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


def _cut(value: object) -> str:
    """Cut a server's text to fit a message."""
    return printable(str(value)[:500])[:500]


def _end(connection: socket.socket) -> None:
    """End a connection at which another thread waits."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def check_server(url: str, bases: Sequence[str | None], option: str = "rollout_url") -> None:
    """For rank 0: raise RankError if it does not answer, has another base, or takes no adapters for
    rollouts.
    """
    server = Server(url, bases, _START_SECONDS)
    try:
        server.patiently(server.names)
        if option == "rollout_url":
            server.ask("/v1/load_lora_adapter", {})
    except RolloutError as error:
        raise RankError(f"--{option}: {error}") from error
    except RequestFailed as error:
        if error.status in (404, 405, 501):  # others find the request wrong, as it is
            raise RankError(
                f"--rollout_url: the server {server.url} takes no adapters at run time. Start vLLM "
                "with --enable-lora, "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment."
            ) from error


@dataclass(eq=False)
class ServerEngine:
    """Has a server answer prompts, as `Engine` says.

    save: the adapter into a folder, on every rank. prefix: of these folders, with the run's name.
    """

    server: Server
    save: Callable[[Path], object]
    prefix: Path
    ranks: Ranks
    control: Control
    stops: Stops
    options: SamplingOptions
    vocab_size: int

    def complete(
        self, prompts: Sequence[Sequence[int]], generation: int, version: int
    ) -> list[Completion]:
        folder = self.prefix.with_name(f"{self.prefix.name}-v{version}")
        with raise_on_all_ranks(TrainingError, self.ranks.device):
            if self.ranks.is_rank_0:  # the newest one may still be read
                for path in sorted(folder.parent.glob("*"), key=lambda path: path.stat().st_mtime)[
                    :-1
                ]:
                    shutil.rmtree(path, ignore_errors=True)
            self.save(folder)
        answers = partial(self._answers, folder, prompts, generation)
        text = self.server.answer_of(answers, self.control, self.ranks, version)
        return [Completion(*values) for values in json.loads(text)]

    def _answers(self, folder: Path, prompts: Sequence[Sequence[int]], generation: int) -> str:
        """All answers as JSON, each as the values of a Completion."""
        name = f"{folder.name}-{record_of(folder / WEIGHTS).sha256[:12]}"
        load = partial(self.server.load, name, folder)
        self.server.patiently(load)

        def answer(place: int) -> Completion:
            seed = derive_seed("rollouts", self.options.seed, generation, place)
            return self._answer(self._request(name, prompts[place], seed), load)

        return json.dumps(self.server.all_answers(len(prompts), answer))

    def _request(self, name: str, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        return (
            {
                "model": name,
                "prompt": list(prompt),
                "max_tokens": self.options.max_new_tokens,
                "seed": seed % 2**31,
                "temperature": self.options.temperature,
            }
            | _WHOLE_DISTRIBUTION
            | {
                "stop_token_ids": sorted(self.stops.tokens),
                "stop": [self.stops.text] if self.stops.text else [],
                "return_token_ids": True,
                "logprobs": 0,
            }
        )

    def _answer(self, request: dict[str, Any], load: Callable[[], None]) -> Completion:
        """Ask for one answer.

        Raises RequestFailed, or RolloutError if it cannot be learned from.
        """
        try:
            longest = _MOST_BYTES + _BYTES_PER_TOKEN * self.options.max_new_tokens
            content = self.server.ask(_COMPLETIONS, request, longest)
        except RequestFailed as error:
            if error.status != 404:
                raise
            load()
            raise RequestFailed("it had lost the adapter, which is loaded again") from error
        with self.server.reading():
            reply = Reply(_COMPLETIONS, content)
            finish: str = reply.get("choices", 0, "finish_reason", kind=str)
            if finish not in ("stop", "length"):  # vLLM's abort, when it ends
                raise RequestFailed(f"an answer ended with {_cut(finish)!r}")
            model: str = reply.get("model", kind=str)
            if model != request["model"]:
                raise Unusable(
                    f"answers as {_cut(model)} where {request['model']} is asked, and nothing is "
                    "learned from other weights"
                )
            tokens = reply.get("choices", 0, kind=dict).get("token_ids")
            problem = self._problem(tokens, is_done=finish == "stop")
            if problem:
                raise Unusable(problem)
            return Completion(tokens, finish == "stop", reply.token_logps(len(tokens)))

    def _problem(self, tokens: Any, *, is_done: bool) -> str | None:
        """Why an answer's tokens cannot be learned from; None if they can."""
        if not isinstance(tokens, list) or not tokens:
            return "returns text alone, without the token ids that vLLM gives for return_token_ids"
        outside = [
            token for token in tokens if not (type(token) is int and 0 <= token < self.vocab_size)
        ]
        if outside:
            return (
                f"returns the token {outside[0]!r:.100}, and the model's vocabulary has "
                f"{self.vocab_size}"
            )
        most = self.options.max_new_tokens
        if len(tokens) > most or not (is_done or len(tokens) == most):
            return f"returns {len(tokens):,} tokens, cut, where {most:,} are asked"
        if not self.stops.tokens.isdisjoint(tokens[:-1]):
            return "goes on behind the token that ends an answer"
        if is_done and not self.stops.ends(tokens):
            return "leaves out the token that ends an answer"
        return None


@dataclass(eq=False)
class ServerTeacher:
    """Has a server give the k likeliest tokens of a teacher for each token, of the student's
    vocabulary.
    """

    server: Server
    k: int
    vocab_size: int
    ranks: Ranks
    control: Control

    def __post_init__(self) -> None:
        # of the last completions' tokens, as `divergence.likeliest`
        self._told = torch.zeros(1, 2 * self.k + 1)

    def __call__(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """As `TaughtRows.of_targets`, for the completions that were asked about last; others get
        any values.
        """
        numbers = target_numbers(table, rows)["table_indices"] % len(self._told)
        ids, logps = self._told[numbers].tensor_split([self.k], dim=1)
        return {"teacher_ids": ids.long(), "teacher_logps": logps}

    def ask(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], version: int
    ) -> None:
        """Ask about the tokens of completions. Called on every rank, with all of them.

        Raises:
            RunStopped: on every rank. RolloutError: the server fails; the same on every rank.
        """

        def ask() -> str:
            name = self.server.patiently(self.server.names)[0]
            found = self.server.all_answers(
                len(prompts), lambda i: self._answer(name, prompts[i], completions[i])
            )
            return b64encode(np.concatenate(found).tobytes()).decode()

        content = b64decode(self.server.answer_of(ask, self.control, self.ranks, version))
        self._told = torch.frombuffer(bytearray(content), dtype=torch.float32).view(
            -1, 2 * self.k + 1
        )

    def _answer(self, name: str, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
        """Ask about one completion. Raises RequestFailed, or RolloutError if it cannot be learned
        from.
        """
        ids = [*prompt, *completion]
        request = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.k}
        longest = _MOST_BYTES + _BYTES_PER_TOKEN * (self.k + 1) * len(ids)
        with self.server.reading():
            reply = Reply(_COMPLETIONS, self.server.ask(_COMPLETIONS, request, longest))
            return np.array(
                reply.likeliest(len(prompt), len(ids), self.k, self.vocab_size), np.float32
            )
