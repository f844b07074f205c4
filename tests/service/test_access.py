"""Who is let in: a key by default, no web page without one, and connections that say nothing keep
nobody out.
"""

import asyncio
import os
import select
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import tinker

from fsdp_qlora.service.access import Access
from fsdp_qlora.service.records import WAITING
from fsdp_qlora.service.waiting_clients import WaitingClients
from tests.chaos.harness import wait_for
from tests.helpers.models import Models
from tests.helpers.run import ROOT, flags
from tests.service.harness import KEY, SESSION, Service, on_two_ranks


class Open(Service):
    """A service without a key in its environment."""

    def __init__(self, *args: Any, **options: object) -> None:
        self._without = {**os.environ}
        self._without.pop("TINKER_API_KEY", None)
        super().__init__(*args, **options)

    def start(self) -> None:
        self.environment = self._without
        super().start()


OF_WEB_PAGES = [
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/x-www-form-urlencoded"),
    ("Content-Type", "multipart/form-data; boundary=x"),
    ("Origin", "http://evil.example"),
    ("Origin", "null"),
    ("Host", "evil.example"),
    ("Host", "evil.example:{port}"),
    ("Host", "localhost.evil.example"),
    ("Host", ""),
]


def entered(service: Service, **head: str | None) -> int:
    """The status of a new session that is asked for with this head."""
    return service.ask("create_session", SESSION, **head)[0]


@pytest.fixture(scope="module")
def drawn(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that has drawn a key of its own."""
    running = Open(models(), tmp_path_factory.mktemp("open") / "folder", 1)
    yield running
    running.end()


@pytest.mark.slow
def test_a_key_is_drawn_kept_and_printed_and_none_keeps_web_pages_out(drawn):
    kept = drawn.folder / "api_key"
    key = kept.read_text().strip()
    assert key.startswith("tml-") and len(key) > 30
    assert f"export TINKER_API_KEY={key}" in drawn.log.read_text()
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (drawn.folder, kept, drawn.folder / "service.db")
    }
    assert modes == {"folder": 0o700, "api_key": 0o600, "service.db": 0o600}
    for given, status in ((None, 401), ("tml-other", 401), (key, 200)):
        assert entered(drawn, **{"X-API-Key": given}) == status
    drawn.kill()
    drawn.log.write_text("")
    drawn.start()
    assert (
        kept.read_text().strip() == key
        and "api_key" in drawn.log.read_text()
        and key not in drawn.log.read_text()
    )
    drawn.kill()
    drawn._command += ["--api_key", "none"]
    drawn.start()
    for name, value in OF_WEB_PAGES:
        head = {name: value.format(port=drawn.port), "X-API-Key": None}
        assert entered(drawn, **head) in (400, 403, 415), head
    for host in ("127.0.0.1:{port}", "localhost:{port}", "localhost", "[::1]:{port}"):
        assert entered(drawn, **{"Host": host.format(port=drawn.port), "X-API-Key": None}) == 200
    with tinker.ServiceClient(base_url=drawn.url, api_key="tml-any") as client:
        assert client.create_lora_training_client(drawn.model, rank=2).result().model_id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        ({"host": "0.0.0.0", "api_key": "none"}, {}, "accepts other machines"),
        ({"host": "::", "api_key": "none"}, {}, "accepts other machines"),
        ({}, {"TINKER_API_KEY": "short"}, "8 characters"),
    ],
    ids=["all_hosts", "all_hosts_of_ipv6", "short_key"],
)
def test_doors_that_are_open_to_all_are_refused_before_loading(
    models, tmp_path, options, environment, reason
):
    words = flags(model_name=models(), folder=tmp_path / "folder", train_type="lora", **options)
    run = subprocess.run(
        [sys.executable, "-m", "fsdp_qlora", "serve", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2 and reason in run.stderr and "Traceback" not in run.stderr
    assert "Model:" not in run.stdout


def connect(service: Service, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, which has nothing to read."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@on_two_ranks
def test_silent_connections_are_closed_and_clients_get_in(service):
    silent = [connect(service, b"POST /api" if number % 2 else b"") for number in range(700)]
    began = time.monotonic()
    assert service.create_session()[0] == 200
    assert time.monotonic() - began < 5  # not one of them is waited for
    time.sleep(1)
    assert sum(map(is_closed, silent)) >= 100  # the oldest
    wait_for(lambda: all(map(is_closed, silent)), 30)
    for connection in silent:
        connection.close()


@on_two_ranks
def test_bodies_are_counted_as_they_come(service):
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n"
    for more in (
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
    ):
        connection = connect(service, f"{head}{more}\r\n".encode())
        sent = 0
        try:
            while sent < 2**28 and not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
                sent += 2**20
        except OSError:
            pass
        assert sent < 2**27, more
        connection.close()
    for size in ("-1", "1e3", "9" * 30, "+5", "67108865"):
        connection = connect(service, f"{head}Content-Length: {size}\r\n\r\n".encode())
        assert b" 4" in connection.recv(20), size
        connection.close()
    twice = connect(service, f"{head}X-API-Key: x\r\nContent-Length: 0\r\n\r\n".encode())
    assert b" 400 " in twice.recv(20)
    twice.close()
    for stops in (b"", b"Content-Length: 99\r\n\r\nabc"):  # clients that hang up
        connect(service, head.encode() + stops).close()
    assert service.create_session()[0] == 200
    assert "Traceback" not in service.log.read_text()


def answers(
    error: Exception,
    receive: Callable[[], Awaitable[Any]],
    method: str,
    head: list[tuple[bytes, bytes]],
    key: str | None = None,
) -> list[Any]:
    """What is sent when the program behind the door raises this error."""
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/a\nb", "headers": head, "client": None}
    access = Access(inner, key, "127.0.0.1", on_allowed=lambda client: None, body_seconds=0.05)
    asyncio.run(access(scope, receive, send))
    return sent


@pytest.mark.quick
def test_a_body_that_does_not_come_is_given_up():
    async def never() -> Any:
        await asyncio.sleep(3600)

    head = [(b"x-api-key", KEY.encode()), (b"content-length", b"5")]
    sent = answers(AssertionError("the body has not come"), never, "POST", head, KEY)
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.quick
def test_what_fails_within_an_answer_is_a_line_and_no_traceback(caplog):
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    error = RecursionError("of a kind that nobody thought of\nsecond line")
    sent = answers(error, receive, "GET", [(b"host", b"localhost")])
    assert sent[0]["status"] == 500
    [line] = [record.getMessage() for record in caplog.records]
    assert "RecursionError" in line and "\n" not in line


class _Results:
    """A request without a result, or a failure."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def get(self, name: str) -> tuple[str, bytes]:
        if self.failure:
            raise self.failure
        return WAITING, b""


@pytest.mark.parametrize("ending", ["the client has gone", "the records cannot be read"])
def test_no_event_stays_of_a_client_that_waited(ending):
    failure = sqlite3.OperationalError("disk I/O error") if "records" in ending else None
    clients = WaitingClients(_Results(failure))  # type: ignore[arg-type]

    async def wait_and_leave() -> None:
        waiting = asyncio.create_task(clients.wait_for("1"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, sqlite3.OperationalError)):
            await waiting

    asyncio.run(wait_and_leave())
    assert clients._events == {}
