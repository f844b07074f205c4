"""A class of a user's file as an environment."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.training.environments.actor import Environment, Failed
from fsdp_qlora.training.environments.schemas import schemas_of, tools_of
from fsdp_qlora.training.environments.words import EnvironmentWord
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.user_files import line_in, reason, run_file

MOST_CHARACTERS = 64 * 2**10
"""Characters of a tool's result that the model gets."""


def load_class(word: EnvironmentWord) -> tuple[Callable[[], Environment], str]:
    """Run a file. Returns a function that makes an environment, and its description.

    Raises:
        UserError: the file cannot be run, or has no such class.
    """
    path = word.path
    assert path is not None
    module, number = run_file(path)
    made = getattr(module, word.member, None)
    if not callable(made):
        members = vars(module)
        names = [name for name, value in members.items() if inspect.isclass(value)]
        raise UserError(f"{path} has no class {word.member!r}. It has: {', '.join(names)}.")
    # Without the folder, which may be another one on the next machine.
    return lambda: UserClass(path, made), f"{path.name}:{word.member} {number}"


class UserClass(Environment):
    """An object of a user's class, whose methods may be coroutines.

    Args:
        path: of the file, for messages.
        make: the class, or a function that makes an object.
    """

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self._path = path
        # One loop for all calls: a client of a server belongs to the loop that has opened it.
        self._runner = asyncio.Runner()
        self._object = self._call("__init__", make)
        if not callable(getattr(self._object, "reset", None)):
            raise Failed(f"{path}: {type(self._object).__name__} has no method reset")
        self._tools = tools_of(self._object)

    def facts(self) -> dict[str, Any]:
        """The tools' schemas, and which methods there are."""
        try:
            tools = schemas_of(self._object)
        except UserError as error:
            raise Failed(str(error)) from error
        return {
            "tools": tools,
            "has_reward": self._reward() is not None,
            "has_message": callable(getattr(self._object, "message", None)),
            "class_name": type(self._object).__name__,
            "asks": False,
        }

    def reset(self, row: Mapping[str, Any]) -> Any:
        return self._call("reset", self._object.reset, **row)

    def call(self, tool: str, arguments: Any) -> tuple[str, bool]:
        try:
            if tool not in self._tools:
                raise ValueError(f"Tool {tool} not found.")
            result = self._tools[tool](**arguments)
            if inspect.isawaitable(result):
                result = self._runner.run(_waited(result))
            return _cut(str(result)), False
        except MemoryError as error:
            raise Failed(f"{tool} raised {reason(error)}") from error
        # In TRL's words, and with its exceptions.
        except Exception as error:
            return _cut(str({"error": _text_of(error)})), True
        except BaseException as error:
            raise self._failed(tool, error) from error

    def message(self, text: str) -> Any:
        if not callable(getattr(self._object, "message", None)):
            return None
        return self._call("message", self._object.message, text)

    def is_over(self) -> bool:
        done = self._call("done", lambda: getattr(self._object, "done", False))
        return bool(self._call("done", done) if callable(done) else done)

    def reward(self, messages: list[Any]) -> float | None:
        method = self._reward()
        if method is None:
            return None
        arguments = () if method.__name__ == "get_reward" else (messages,)
        value = self._call(method.__name__, method, *arguments)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except Exception:
            number = math.nan
        if not math.isfinite(number):
            raise Failed(f"{method.__name__} returned {value!r:.100}, which is no finite number")
        return number

    def close(self) -> None:
        method = getattr(self._object, "close", None)
        if callable(method):
            self._call("close", method)

    def _reward(self) -> Any:
        for name in ("get_reward", "reward"):
            method = getattr(self._object, name, None)
            if callable(method):
                return method
        return None

    def _call(self, name: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Call a function of the environment, whose errors end the episode."""
        try:
            result = function(*values, **named)
            return self._runner.run(_waited(result)) if inspect.isawaitable(result) else result
        except BaseException as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: BaseException) -> Failed:
        line = line_in(self._path, error)
        place = f" ({self._path.name}:{line})" if line else ""
        kind = type(error).__name__
        said = reason(error) if isinstance(error, MemoryError) else f"{kind}: {_text_of(error)}"
        return Failed(f"{name} raised {said}{place}")


async def _waited(result: Any) -> Any:
    return await result


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[The result is cut here: it has {len(text):,} characters.]"
