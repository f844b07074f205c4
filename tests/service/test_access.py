"""Who is let in: a key by default, no web page without one, and connections that say nothing keep
nobody out.
"""

import asyncio
import json
import os
import select
import socket
import sqlite3
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from fsdp_qlora.service.access import Access
from fsdp_qlora.service.records import WAITING
from fsdp_qlora.service.waiting_clients import WaitingClients
from tests.helpers.models import Models
from tests.helpers.run import ROOT, flags
from tests.service.harness import KEY, Service, said

SESSION = b'{"tags": [], "user_metadata": {}, "sdk_version": "1"}'
JSON = {"Content-Type": "application/json"}


class Open(Service):
    """A service without a key in its environment."""

    key = ""

    def __init__(self, *args: Any, **options: object) -> None:
        self._without = {
            name: value for name, value in os.environ.items() if name != "TINKER_API_KEY"
        }
        super().__init__(*args, **options)

    def start(self) -> None:
        self.environment = self._without
        super().start()


def asked(
    service: Service, head: dict[str, str], body: bytes = SESSION, path: str = "create_session"
) -> int:
    """The status of a POST with this head alone."""
    request = urllib.request.Request(f"{service.url}/api/v1/{path}", data=body, headers=head)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def drawn(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that has drawn a key of its own."""
    running = Open(models(), tmp_path_factory.mktemp("open") / "folder", 1)
    yield running
    running.end()


@pytest.mark.slow
def test_a_key_is_drawn_kept_and_printed_and_none_keeps_web_pages_out(drawn: Service) -> None:
    kept = drawn.folder / "api_key"
    key = kept.read_text().strip()
    assert key.startswith("tml-") and len(key) > 30
    assert f"export TINKER_API_KEY={key}" in drawn.log.read_text()
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (drawn.folder, kept, drawn.folder / "service.db")
    }
    assert modes == {"folder": 0o700, "api_key": 0o600, "service.db": 0o600}
    assert asked(drawn, JSON) == 401 and asked(drawn, {**JSON, "X-API-Key": "tml-other"}) == 401
    assert asked(drawn, {**JSON, "X-API-Key": key}) == 200
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
    for head in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {**JSON, "Origin": "http://evil.example"},
        {**JSON, "Origin": "null"},
        {**JSON, "Host": "evil.example"},
        {**JSON, "Host": f"evil.example:{drawn.port}"},
        {**JSON, "Host": "localhost.evil.example"},
        {**JSON, "Host": ""},
    ):
        assert asked(drawn, head) in (400, 403, 415), head
    for host in (
        f"127.0.0.1:{drawn.port}",
        f"localhost:{drawn.port}",
        "localhost",
        f"[::1]:{drawn.port}",
    ):
        assert asked(drawn, {**JSON, "Host": host}) == 200, host
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
    models: Models,
    tmp_path: Path,
    options: dict[str, object],
    environment: dict[str, str],
    reason: str,
) -> None:
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


on_two_ranks = pytest.mark.parametrize("service", [2], ids=["two_ranks"], indirect=True)


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
def test_silent_connections_are_closed_and_clients_get_in(service: Service) -> None:
    silent = [connect(service, b"POST /api" if number % 2 else b"") for number in range(700)]
    began = time.monotonic()
    assert said(service, "/api/v1/create_session", json.loads(SESSION))[0] == 200
    assert time.monotonic() - began < 5  # not one of them is waited for
    time.sleep(1)
    assert sum(map(is_closed, silent)) >= 100  # the oldest
    for _ in range(30):
        if all(map(is_closed, silent)):
            break
        time.sleep(1)
    assert all(map(is_closed, silent))
    for connection in silent:
        connection.close()


@on_two_ranks
def test_bodies_are_counted_as_they_come(service: Service) -> None:
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
    assert said(service, "/api/v1/create_session", json.loads(SESSION))[0] == 200
    assert "Traceback" not in service.log.read_text()


@pytest.mark.quick
def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the body has not come")

    async def receive() -> Any:
        if len(sent) == 0:
            await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"x-api-key", KEY.encode()), (b"content-length", b"5")],
        "client": ("127.0.0.1", 1),
    }
    access = Access(inner, KEY, "127.0.0.1", on_allowed=lambda client: None, body_seconds=0.05)
    asyncio.run(access(scope, receive, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.quick
def test_what_fails_within_an_answer_is_a_line_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise RecursionError("of a kind that nobody thought of\nsecond line")

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/a\nb",
        "headers": [(b"host", b"localhost")],
        "client": None,
    }
    asyncio.run(
        Access(inner, None, "127.0.0.1", on_allowed=lambda client: None)(scope, receive, send)
    )
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
def test_no_event_stays_of_a_client_that_waited(ending: str) -> None:
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
