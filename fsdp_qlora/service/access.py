"""Checks who may send requests to a service, and how large they may be.

This is a layer around the web application.

With a key each request must have it. Without one the service listens on this machine alone, and a
web page in the user's browser must not pass for a client: it can reach the port, and by DNS
rebinding under a name of its own.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, staged_file
from fsdp_qlora.utils.text import shown

log = logging.getLogger("fsdp_qlora")

# Bytes of a request for a pass; the client sends 5 MB at a time.
MAX_BYTES = 2**25
# Bytes by endpoint; asample's are enough for a prompt of a million tokens.
_MAX_OF = {"forward_backward": MAX_BYTES, "asample": 2**24}
_MAX_OF_OTHERS = 2**20
# Bytes of all requests that are being read.
_MAX_AT_ONCE = 2**29
# Time for the body of a request to come.
BODY_SECONDS = 120.0
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
KEY_FILE = "api_key"
NO_KEY = "none"

ClientAddress = tuple[str, int] | None
"""Host and port of a client, as in the scope of ASGI."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request that is not let in."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Access:
    """An ASGI application that reads and checks each request before the inner one gets it.

    Args:
        api_key: that clients must send; None for no key.
        host: where the service listens.
        on_allowed: is told the address of each client whose request is let in.
        body_seconds: for a body to come.
    """

    def __init__(
        self,
        inner: Application,
        api_key: str | None,
        host: str,
        *,
        on_allowed: Callable[[ClientAddress], object],
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.inner = inner
        self.api_key = api_key
        self.on_allowed = on_allowed
        self.body_seconds = body_seconds
        self._reading = 0  # bytes of bodies that have begun to come
        self.hosts = {"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            headers = _headers(scope)
            self._check(scope["method"], headers)
            self.on_allowed(scope.get("client"))
            most = _MAX_OF.get(scope["path"].rpartition("/")[2], _MAX_OF_OTHERS)
            body = await self._read_body(headers, receive, most)
            if body is None:
                # The client has gone.
                return
            await self.inner(scope, _once(body, receive), answer.send)
        except Refused as refusal:
            await answer.refuse(refusal.status, str(refusal))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.warning("A request for %s failed. %s", shown(scope["path"]), shown(reason))
            await answer.refuse(
                500, "The service failed at this request; its log has a line about it."
            )

    def _check(self, method: str, headers: dict[str, str]) -> None:
        """Refuse a request by its head. Raises Refused."""
        if self.api_key is not None:
            given = headers.get("x-api-key", "")
            # In a time that does not tell how much of the key was right.
            if not hmac.compare_digest(given.encode(), self.api_key.encode()):
                raise Refused(401, "The key in X-API-Key is missing or wrong.")
            return
        # After DNS rebinding a browser sends the page's own host name.
        name = headers.get("host", "")
        if _without_port(name) not in self.hosts:
            raise Refused(
                403,
                f"The host {shown(name)} is not this service's. "
                "A service with an API key accepts any host.",
            )
        # Browsers send Origin with requests of other sites' pages; clients do not.
        if "origin" in headers:
            raise Refused(
                403,
                "Requests from web pages are refused. A service with an API key accepts them.",
            )
        # A page may send forms and plain text without asking before; these types it may not.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method not in ("GET", "HEAD") and kind not in (JSON, PROTOBUF, ""):
            raise Refused(415, f"The content type must be {JSON} or {PROTOBUF}.")
        if method == "POST" and not kind:
            raise Refused(415, f"The request has no content type; it must be {JSON} or {PROTOBUF}.")

    async def _read_body(
        self, headers: dict[str, str], receive: Receive, most: int
    ) -> bytes | None:
        """The body of a request; None if its client has gone.

        Raises Refused if it is too large or does not come.
        """
        # int() of a text of any length would take its time.
        size = headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 19 or int(size) > most:
            raise Refused(413, f"This request may have {most:,} bytes.")
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in _parts(receive):
                    if part is None:
                        return None
                    self._reading += len(part)
                    body += part
                    # With a body in chunks the head says nothing of its size.
                    if len(body) > most:
                        raise Refused(413, f"This request may have {most:,} bytes.")
                    if self._reading > _MAX_AT_ONCE:
                        raise Refused(503, "The service reads too much at this moment.")
        except TimeoutError as error:
            raise Refused(
                408, f"The request's body has not come within {self.body_seconds:g} s."
            ) from error
        finally:
            self._reading -= len(body)
        return bytes(body)


async def _parts(receive: Receive) -> AsyncIterator[bytes | None]:
    """The parts of a body as they come; None if the client has gone."""
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            yield None
            return
        yield message.get("body", b"")
        has_more = message.get("more_body", False)


class _Answer:
    """Sends answers, once for each request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False

    async def send(self, message: Message) -> None:
        self._has_begun = True
        await self._send(message)

    async def refuse(self, status: int, reason: str) -> None:
        """Answer with an error and close the connection: the rest of the request is not read."""
        # HTTP has no way to take back the head of an answer.
        if self._has_begun:
            return
        category = "user" if status < 500 else "server"
        body = json.dumps({"error": reason, "category": category}).encode()
        headers = [
            (b"content-type", JSON.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _headers(scope: Message) -> dict[str, str]:
    """The head's fields by their names in lower case.

    Raises Refused if one that decides is there twice.
    """
    # Of two fields with one name, this check and a library could read different ones.
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in headers and key in (
            "host",
            "origin",
            "content-type",
            "content-length",
            "x-api-key",
        ):
            raise Refused(400, f"The request has two fields {key}.")
        headers[key] = value.decode("latin-1")
    return headers


def _without_port(host: str) -> str:
    """`localhost` of `localhost:8000`, `[::1]` of `[::1]:8000`."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdigit() else host.lower()


def _once(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, and then what the client does."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


# --- the key ---


def is_of_this_machine(host: str) -> bool:
    """Whether only this machine reaches a service that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def kept_key(folder: Path) -> tuple[str, bool]:
    """The key of a service's folder, and whether it is new. It is drawn at the first start.

    Raises:
        UserError: the file cannot be read or written, or is not this user's alone.
    """
    path = folder / KEY_FILE
    try:
        if not path.exists():
            return _draw_key(path), True
        with open_named(path, most_bytes=1000, follow=False) as file:
            # The mode of the file that is open: the path may be another one by now.
            about = os.fstat(file.fileno())
            key = file.read().decode().strip()
    except (OSError, ValueError) as error:
        raise UserError(f"The key in {path} cannot be used: {error}.") from error
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise UserError(
            f"The key in {path} is not this user's alone. Run chmod 600, or delete it for a new "
            "one."
        )
    check_key(key, str(path))
    return key, False


def _draw_key(path: Path) -> str:
    """Write a new key to a file of its owner alone, as a whole or not at all."""
    key = f"tml-{secrets.token_urlsafe(32)}"
    with staged_file(path) as partial:
        # With its mode from the beginning: chmod() after writing would leave a moment.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{key}\n")
    return key


def check_key(key: str, where: str) -> None:
    """Raise UserError for a key that can be guessed, or that no header can have."""
    if len(key) < 8 or not _is_plain(key):
        raise UserError(
            f"The key of {where} must have 8 characters or more, of ASCII and without spaces."
        )


def _is_plain(text: Iterable[str]) -> bool:
    return all("!" <= character <= "~" for character in text)
