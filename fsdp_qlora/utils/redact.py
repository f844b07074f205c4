"""Removes secrets from all that a run prints or writes: tokens, keys, passwords in URLs."""

import contextlib
import errno
import functools
import netrc
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from huggingface_hub import constants

T = TypeVar("T")

HIDDEN = "[secret]"
_SHORTEST = 8  # shorter values are not keys, and occur in ordinary words
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS$|API_?KEY|ACCESS_?KEY|CREDENTIAL|^RCLONE_CONFIG_\w+_KEY$",
    re.IGNORECASE,
)
_PATTERNS = {
    # Tokens of Hugging Face, AWS and GitHub.
    re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bAKIA[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{16,}"): HIDDEN,
    # The user:password@ of a URL, also with one slash, as it has after pathlib has parsed it.
    re.compile(r"(:/{1,2})[^\s/@]+@"): rf"\1{HIDDEN}@",
    # Values of name=value in a URL's query or in an rclone remote.
    re.compile(
        r"((?:(?:secret|passw(?:or)?d|passphrase|credential|(?:api|access|private|account|customer)[_-]?key)[\w-]*"
        r"|(?<![a-z])(?:token|pass|pwd|sig|signature)|(?<=,)key)=)(?:\"[^\"]*\"|'[^']*'|[^\s,:;&'\"]+)",
        re.IGNORECASE,
    ): rf"\1{HIDDEN}",
}


def redact(text: str) -> str:
    """The text without this machine's and user's secrets, or anything that looks like one."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    for pattern, hidden in _PATTERNS.items():
        text = pattern.sub(hidden, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def redact_values(values: T) -> T:
    """Nested dicts and lists with all strings redacted."""
    if isinstance(values, str):
        return redact(values)  # type: ignore[return-value]
    if isinstance(values, Mapping):
        return {key: redact_values(value) for key, value in values.items()}  # type: ignore[return-value]
    if isinstance(values, Sequence):
        return type(values)(map(redact_values, values))  # type: ignore[call-arg]
    return values


def guard_output() -> None:
    """Remove secrets from this process's stdout and stderr, tracebacks included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _RedactedStream):
            setattr(sys, name, _RedactedStream(stream))


def lost_output() -> OSError | None:
    """The first error with which output of this process was lost; None if nothing was lost."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, _RedactedStream)]
    return next(filter(None, (stream.lost for stream in streams)), None)


class _RedactedStream:
    """A text stream that redacts each write, and ignores errors of the underlying stream.

    A dead log collector, a closed terminal or a full disk must not end a run.

    Attributes:
        lost: the first such error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        with self._dropped_if_lost():
            self._stream.write(redact(text))
        return len(text)

    def flush(self) -> None:
        with self._dropped_if_lost():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropped_if_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or error
            # The reader is gone. Libraries write to the descriptor too, and would fail there.
            if error.errno in (errno.EPIPE, errno.EIO):
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@functools.cache
def _secrets() -> tuple[str, ...]:
    """The values of secret variables, the login of the hub, and the passwords of ~/.netrc."""
    secrets = {value for name, value in os.environ.items() if is_secret_name(name)}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        secrets.add(
            Path(os.environ.get("HF_TOKEN_PATH") or constants.HF_TOKEN_PATH).read_text().strip()
        )
    with contextlib.suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
        secrets.update(password for _, _, password in netrc.netrc().hosts.values() if password)
    # A variable such as HF_TOKEN_PATH names a file, which may be shown.
    usable = (value for value in secrets if len(value) >= _SHORTEST and not os.path.exists(value))
    # The longest first: one secret may be the beginning of another one.
    return tuple(sorted(usable, key=len, reverse=True))
