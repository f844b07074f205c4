"""An episode of an environment, as the run sees it."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fsdp_qlora.distributed.supervision.clock import awake
from fsdp_qlora.training.environments.channel import Channel
from fsdp_qlora.training.environments.turns import (
    Message,
    Turn,
    add_observation,
    answer_messages,
    first_messages,
)
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.text import cut, printable

CLOSED = 118
"""The exit status of an episode's process that has lost its connection to the run."""
# A keeper needs them to kill and to report, however busy the machine is.
_SECONDS_TO_END = 30


class EpisodeFailed(Exception):
    """An episode cannot go on: its process has hung, ended, or given no usable answer.

    The message is the reason in words. The process and those that it has started are gone.
    """


class ToolResult(NamedTuple):
    """The result of a tool, as the model gets it."""

    text: str
    is_error: bool


class Limits(NamedTuple):
    """Seconds that an environment may take."""

    call: float
    """For each reset, tool and reward."""
    episode: float
    """For all of them together; the model's own time does not count."""


class Episode:
    """One episode in a process of its own. Each method raises `EpisodeFailed`.

    Args:
        channel: to the process.
        lifeline: to its keeper, which kills the process when it closes.
        described: the environment, for messages.
        tools: for `next`; None for an environment that asks for answers itself.
        limits: of time.
        on_end: called once, when the process is gone.
        row: of the dataset.
    Attributes:
        num_failed_calls: calls of tools whose results are errors, by now.
    """

    def __init__(
        self,
        channel: socket.socket,
        lifeline: socket.socket,
        *,
        described: str,
        tools: list[dict[str, Any]] | None,
        limits: Limits,
        on_end: Callable[[], None],
        row: Mapping[str, Any],
    ) -> None:
        self._channel = Channel(channel)
        self._lifeline = Channel(lifeline)
        self._described = described
        self._tools = tools or []
        self._asks = tools is None
        self._messages: list[Message] = []
        self._limits = limits
        self._left = limits.episode
        self._on_end = on_end
        self._row = row
        self._failure: str | None = None
        self._is_running = True
        self._lock = threading.Lock()
        self._is_over = False
        self.num_failed_calls = 0

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended the episode, as its last reply has said."""
        return self._is_over

    def reset(self) -> str | list[Any] | None:
        """Begin. Returns what belongs to the prompt besides the row's own one.

        A text or a list of blocks is appended to the last message, as TRL does.
        """
        observation: str | list[Any] | None = self._ask({"do": "reset", "row": self._row}, "reset")[
            "observation"
        ]
        return observation

    def call(self, tool: str, arguments: Any) -> ToolResult:
        """Call a tool. Its exceptions, an unknown tool and wrong arguments are results, too.

        arguments: of JSON, as the model has written them; not a mapping, if the model is wrong.
        """
        reply = self._ask({"do": "call", "tool": tool, "arguments": arguments}, str(tool))
        self.num_failed_calls += bool(reply["is_error"])
        return ToolResult(str(reply["text"]), bool(reply["is_error"]))

    def message(self, text: str) -> str | list[Any] | None:
        """The environment's answer to an answer without calls; None if it has none."""
        request = {"do": "message", "text": text}
        observation: str | list[Any] | None = self._ask(request, "message")["observation"]
        return observation

    def next(self, answer: Message | None) -> Turn | None:
        """Give the model's answer, and get the next request; None at the end of the episode.

        The first call begins the episode. In an environment with tools it calls those that the
        answer calls, or `message` for an answer without calls.

        Args:
            answer: an assistant's message, its tool_calls with arguments as objects; None at first.
        """
        if answer is None:
            observation = self.reset()
            self._messages = add_observation(first_messages(self._row), observation)
        if self._asks:
            turn = self._ask({"do": "next", "answer": answer}, "the environment")["turn"]
            return None if turn is None else Turn(turn["messages"], turn["tools"])
        if answer is not None:
            replies = self._replies(answer)
            self._messages = [*self._messages, answer, *replies]
            if not replies or self._is_over:
                return None
        return Turn(self._messages, self._tools)

    def _replies(self, answer: Message) -> list[Message]:
        """The messages that follow an answer."""
        calls = answer.get("tool_calls")
        if not calls:
            return answer_messages(self.message(str(answer.get("content") or "")))
        messages = []
        for call in calls:
            name = call["function"]["name"]
            result = self.call(name, call["function"]["arguments"])
            messages.append({"role": "tool", "name": name, "content": result.text})
        return messages

    def reward(self, messages: list[Any]) -> float | None:
        """The episode's reward, which is finite; None if the environment gives none."""
        value = self._ask({"do": "reward", "messages": messages}, "the reward")["reward"]
        return None if value is None else float(value)

    def facts(self) -> dict[str, Any]:
        """The environment's tools and methods; see `EnvironmentFacts`."""
        # With the time of a file: describing tools imports transformers.
        request = {"do": "facts"}
        found: dict[str, Any] = self._ask(request, "__init__", self._limits.episode)["facts"]
        return found

    def rows(self) -> list[dict[str, Any]] | None:
        """The environment's own rows; None if it needs a dataset."""
        rows: list[dict[str, Any]] = []
        while True:
            # A part at a time: a reply has a limit.
            part = self._ask({"do": "rows", "start": len(rows)}, "rows")["rows"]
            if not part:
                return None if part is None else rows
            rows += part

    def close(self) -> None:
        """Call the environment's own `close`, and end its process."""
        if not self._is_running:
            return
        with contextlib.suppress(EpisodeFailed):
            self._ask({"do": "close"}, "close")
        self.kill()

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        with self._lock:
            if not self._is_running:
                return
            self._is_running = False
        self._lifeline.end()
        self._status()
        self._lifeline.close()
        self._channel.close()
        self._on_end()

    def _ask(
        self, request: Mapping[str, Any], name: str, call_seconds: float | None = None
    ) -> dict[str, Any]:
        """The reply to a request; name: of what is called, for messages."""
        if self._failure:
            raise EpisodeFailed(self._failure)
        if not self._is_running:
            raise EpisodeFailed(f"{self._described}: the episode is closed")
        seconds = min(call_seconds or self._limits.call, self._left)
        began = awake()
        try:
            self._channel.send(request, seconds)
            reply = self._channel.receive(seconds)
        except TimeoutError:
            raise self._failed(self._late(name, seconds)) from None
        except OSError:
            raise self._failed(f"{name}: {self._ending()}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise self._failed(f"{name}: the reply cannot be read: {error}") from error
        self._left -= awake() - began
        if "failed" in reply:
            raise self._failed(str(reply["failed"]))
        if "over" not in reply:
            raise self._failed(f"{name}: something else has written into the reply")
        self._is_over = bool(reply["over"])
        return reply

    def _late(self, name: str, seconds: float) -> str:
        if seconds < self._limits.call:
            return f"{name}: the episode's calls took more than {self._limits.episode:g} s in all"
        return f"{name} did not return within {seconds:g} s"

    def _failed(self, reason: str) -> EpisodeFailed:
        """End the process. Returns the error to raise."""
        self.kill()
        self._failure = f"{self._described}: {cut(redact(printable(reason)))}"
        return EpisodeFailed(self._failure)

    def _ending(self) -> str:
        """How the process has ended that has closed its connection."""
        status = self._status()
        if status is None or status == CLOSED:
            return "the process has closed its connection to the run"
        if status < 0:
            # The kernel says so, and not why.
            memory = " (is there too little memory?)" if status == -signal.SIGKILL else ""
            return f"the process was killed by signal {-status}{memory}"
        return f"the process has ended (status {status})"

    def _status(self) -> int | None:
        """The exit status, which the keeper reports when all is gone; None if it does not."""
        try:
            return int(self._lifeline.receive(_SECONDS_TO_END)["status"])
        except (OSError, ValueError, KeyError):
            return None
