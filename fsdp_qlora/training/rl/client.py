"""The client of a server with OpenAI's completions API: it asks, and waits while the server does not answer."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from fsdp_qlora.distributed.supervision.clock import awake
from fsdp_qlora.utils.errors import RankError, RolloutError

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")

_START_SECONDS = 240.0  # for a server that starts together with the run, as TRL waits
_LOAD_SECONDS = 60.0  # for an adapter that the server refuses: a network disk may show it late
_PAUSE_SECONDS = (0.5, 10.0)  # between two tries, the first and the longest
_HEADERS = {"Content-Type": "application/json"}
_MAY_PASS = (408, 429, 500, 502, 503, 504)


class RequestFailed(Exception):
    """A request has failed. status: of HTTP, 0 without an answer. seconds: to wait, if it is not the usual time."""

    def __init__(self, reason: str, status: int = 0, seconds: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {reason}" if status else reason)
        self.status, self.seconds = status, seconds


class Server:
    """Asks a server, and waits for one that does not answer now.

    Args:
        bases: names of the base model, of which the server must know one. patience: seconds to wait for any answer.
    """

    def __init__(self, url: str, bases: Sequence[str | None], patience: float) -> None:
        self.url, self._patience = url.rstrip("/").removesuffix("/v1"), patience
        self._bases = [base for base in bases if base]
        self._open = build_opener(ProxyHandler({})).open  # a proxy in the environment is for the world outside
        self._answered_at, self._away_since, self._said = awake(), 0.0, ""
        self._noting, self._loading = threading.Lock(), threading.Lock()
        self.is_closed = False  # threads that still ask end, where the process goes on, as in a notebook

    def ask(self, path: str, body: object = None) -> bytes:
        """Send one request, a POST if it has a body. Raises RequestFailed."""
        request = Request(f"{self.url}{path}", None if body is None else json.dumps(body).encode(), _HEADERS)
        try:
            with self._open(request, timeout=self._patience) as response:
                return bytes(response.read())
        except HTTPError as error:
            with error, contextlib.suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
                raise RequestFailed(json.loads(error.read())["error"]["message"], error.code) from error
            raise RequestFailed(error.reason, error.code) from error
        except (OSError, HTTPException) as error:
            raise RequestFailed(str(getattr(error, "reason", error)) or type(error).__name__) from error

    def patiently(self, ask: Callable[[], T]) -> T:
        """Call `ask`, in any thread, until it returns; a line says what is waited for.

        Raises:
            RolloutError: the server refuses the request, or has answered no other one for too long.
        """
        began, (pause, longest) = awake(), _PAUSE_SECONDS
        while True:
            try:
                if self.is_closed:
                    raise RolloutError("The run has ended.")
                found = ask()
            except RequestFailed as error:
                if error.status and error.status not in _MAY_PASS:
                    raise RolloutError(f"The server {self.url} refuses a request: {error}.") from error
                limit = min(error.seconds or self._patience, self._patience)
                self._note(str(error), limit)
                if awake() - max(began, self._answered_at) + pause > limit:
                    raise RolloutError(f"The server {self.url} was waited for, {limit:.3g} s: {error}.") from error
            else:
                self._note("")
                return found
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _note(self, reason: str, limit: float = 0.0) -> None:
        """Say why the server does not answer, or, without a reason, that it answers again."""
        with self._noting:
            if reason and reason != self._said:
                log.warning("Waiting for the server %s, %.3g s at most: %s.", self.url, limit, reason)
                self._away_since = self._away_since if self._said else awake()
            elif self._said and not reason:
                log.info("The server %s answers again after %.0f s.", self.url, awake() - self._away_since)
            self._said, self._answered_at = reason, self._answered_at if reason else awake()

    def names(self) -> list[str]:
        """The names of its base model and adapters. Raises RolloutError if it has another base, and RequestFailed."""
        try:
            cards = json.loads(self.ask("/v1/models"))["data"]
            [base, *_] = [card for card in cards if not card.get("parent")]
            names = [str(card["id"]) for card in cards]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(f"{self.url} has no list of models, as OpenAI's API has: {error!r}.") from error
        if not {Path(str(base.get(key))).name for key in ("id", "root")} & {Path(name).name for name in self._bases}:
            raise RolloutError(
                f"The server {self.url} has the model {base['id']}, and the run trains {self._bases[0]}. If they are "
                f"the same weights, say so to the server: --served-model-name {self._bases[0]}."
            )
        return names

    def load(self, name: str, folder: Path) -> None:
        """Have this adapter loaded, and no other one of its run. Raises RequestFailed or RolloutError."""
        with self._loading:
            known, run = self.names(), name.partition("-v")[0]
            for other in known:
                if other != name and other.startswith(f"{run}-v"):
                    with contextlib.suppress(RequestFailed):
                        self.ask("/v1/unload_lora_adapter", {"lora_name": other})
            try:
                if name not in known:
                    self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.absolute())})
            except RequestFailed as error:
                raise RequestFailed(
                    f"it does not load the adapter in {folder} ({error})", seconds=_LOAD_SECONDS
                ) from error


def check_server(url: str, bases: Sequence[str | None]) -> None:
    """For rank 0: raise RankError if the server does not answer, has another base or takes no adapters at run time."""
    server = Server(url, bases, _START_SECONDS)
    try:
        server.patiently(server.names)
        server.ask("/v1/load_lora_adapter", {})
    except RolloutError as error:
        raise RankError(f"--rollout_url: {error}") from error
    except RequestFailed as error:
        if error.status in (404, 405, 501):  # others find the request wrong, as it is
            raise RankError(
                f"--rollout_url: the server {server.url} takes no adapters at run time. Start vLLM with --enable-lora, "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment."
            ) from error
