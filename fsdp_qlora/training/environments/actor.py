"""The process of an episode: it answers requests about one environment."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_qlora.training.environments.channel import Channel

_ROWS_AT_A_TIME = 256


class Failed(Exception):
    """The episode cannot go on; the reason in words."""


class Environment(ABC):
    """One environment for one episode. Each method raises `Failed`."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """See `EnvironmentFacts`."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin the episode of a row of the dataset. Returns what is added to the prompt."""

    @abstractmethod
    def call(self, tool: str, arguments: Any) -> tuple[str, bool]:
        """Call a tool. Returns its result, and whether that is an error."""

    @abstractmethod
    def message(self, text: str) -> Any:
        """The environment's own answer to an answer without calls; None if it has none."""

    def rows(self) -> list[dict[str, Any]] | None:
        """The rows of an environment that has its own; None for one that needs a dataset."""
        return None

    def next(self, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """For an environment that asks for answers itself: its next request; None at the end."""
        raise Failed("this environment asks for no answers itself")

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the environment has ended the episode."""

    @abstractmethod
    def reward(self, messages: list[Any]) -> float | None:
        """The reward of the episode; None if the environment gives none."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the environment holds."""


def act(channel: Channel, make: Callable[[], Environment]) -> None:
    """Answer requests until the run closes the channel.

    Raises:
        OSError: the environment has closed the channel.
        ValueError: it has read from it.
    """
    environment: Environment | None = None
    while True:
        try:
            request = channel.receive()
        except ConnectionResetError:
            return
        try:
            environment = environment or make()
            reply = _answer(environment, request)
        except Failed as failure:
            reply = {"failed": str(failure)}
        _send(channel, reply, request["do"])


def _answer(environment: Environment, request: Mapping[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "facts":
            return {"facts": environment.facts(), "over": False}
        case "rows":
            rows = environment.rows()
            start = request["start"]
            part = None if rows is None else rows[start : start + _ROWS_AT_A_TIME]
            return {"rows": part, "over": False}
        case "reset":
            reply = {"observation": environment.reset(request["row"])}
        case "call":
            text, is_error = environment.call(request["tool"], request["arguments"])
            reply = {"text": text, "is_error": is_error}
        case "next":
            reply = {"turn": environment.next(request["answer"])}
        case "message":
            reply = {"observation": environment.message(request["text"])}
        case "reward":
            reply = {"reward": environment.reward(request["messages"])}
        case "close":
            environment.close()
            reply = {}
        case other:
            raise AssertionError(other)
    _check(request["do"], reply.get("observation"))
    _check(request["do"], (reply.get("turn") or {}).get("messages"))
    reply["over"] = environment.is_over()
    return reply


def _check(name: str, said: Any) -> None:
    """Raise `Failed` if an environment says something else than text, or messages of text."""
    if said is None or isinstance(said, str):
        return
    if not isinstance(said, list):
        raise Failed(f"{name} returned a {type(said).__name__}, not None, a text or a list")
    if not (all(map(_is_block, said)) or all(map(_is_message, said))):
        raise Failed(f"{name} returned a list of something else than messages or blocks of text")


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    is_list = isinstance(content, list)
    return content is None or isinstance(content, str) or (is_list and all(map(_is_block, content)))


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)


def _send(channel: Channel, reply: Mapping[str, Any], name: str) -> None:
    try:
        channel.send(reply)
    # An observation may contain itself, or be too large for the memory.
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        channel.send({"failed": f"{name} returned what is no JSON: {error}"})
