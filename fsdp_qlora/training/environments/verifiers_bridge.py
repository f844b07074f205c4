"""Environments of the library verifiers (0.4 or newer), which ask the model themselves.

Such an environment plays an episode on its own, and asks an OpenAI-compatible server for each
answer. Here the server is in the episode's process, and hands each request to the run.
"""

import asyncio
import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import islice
from typing import Any

from fsdp_qlora.training.environments.actor import Environment, Failed
from fsdp_qlora.training.environments.words import EnvironmentWord
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.user_files import reason

MOST_TASKS = 10_000
"""Tasks that are taken from an environment which makes them without end."""
_KEY = "FSDP_QLORA_NO_KEY"


def load_verifiers(word: EnvironmentWord) -> tuple[Callable[[], Environment], str]:
    """Load an environment with its tasks. Returns a function that makes it, and its description.

    Raises:
        UserError: verifiers or uv is not installed, or the environment cannot be loaded.
    """
    name = word.member
    # uv runs the programs that hold the conversation; it may be beside this Python.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    os.environ[_KEY] = "-"  # verifiers wants a key for every server
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"verifiers cannot be imported ({error}). pip install 'fsdp_qlora[environments]'"
        ) from error
    if not shutil.which("uv"):
        raise UserError("verifiers needs the program uv. pip install uv")
    try:
        environment = _load(name)
        most = None if environment.taskset.bounded else MOST_TASKS
        tasks = list(islice(environment.taskset, most))
    except BaseException as error:
        problem = " ".join(reason(error).split())
        raise UserError(f"{name} cannot be loaded: {problem}") from error
    described = f"verifiers:{name} (verifiers {version('verifiers')})"
    return lambda: VerifiersEnvironment(name, environment, tasks), described


def _load(name: str) -> Any:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        load_environment,
        resolve_env_config,
    )

    config: dict[str, Any] = {"taskset": {"id": name}}
    roles = list(agent_config_fields(resolve_env_config(config)))
    if len(roles) != 1:
        raise UserError(f"it has {len(roles)} agents ({', '.join(roles)}), and one can be trained")
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    # Its default one gives the model a shell on this machine.
    if default_harness_id(name) == "bash":
        agent["harness"] = {"id": "null"}
    return load_environment(resolve_env_config(config | {roles[0]: agent}))


class VerifiersEnvironment(Environment):
    """An episode that asks for answers; see `next`."""

    def __init__(self, name: str, environment: Any, tasks: list[Any]) -> None:
        self._name = name
        self._environment = environment
        self._tasks = tasks
        self._task = 0
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._server: ThreadingHTTPServer | None = None
        self._end: Any = None

    def facts(self) -> dict[str, Any]:
        return {
            "tools": [],
            "has_reward": True,
            "has_message": False,
            "class_name": self._name,
            "asks": True,
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each task: its number and its prompt, if it has one."""
        return [
            {"task": number, "prompt": _prompt_of(task.data)}
            for number, task in enumerate(self._tasks)
        ]

    def reset(self, row: Mapping[str, Any]) -> None:
        number = row.get("task")
        if not isinstance(number, int) or not 0 <= number < len(self._tasks):
            raise Failed(f"the row's task is {number!r}, and there are {len(self._tasks)}")
        self._task = number

    def next(self, answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Give the answer to the request before. Returns the next request; None at the end.

        A request has all messages and the tools of the conversation.
        """
        if self._server is None:
            self._start()
        elif self._end is None and answer is not None:
            self._answers.put(answer)
        if self._end is None:
            kind, value = self._events.get()
            if kind == "request":
                return {"messages": value["messages"], "tools": value.get("tools") or []}
            self._end = value
        if isinstance(self._end, BaseException):
            raise Failed(f"the episode raised {reason(self._end)}")
        return None

    def call(self, tool: str, arguments: Any) -> tuple[str, bool]:
        raise Failed("verifiers calls its tools itself")

    def message(self, text: str) -> None:
        return None

    def is_over(self) -> bool:
        return self._end is not None

    def reward(self, messages: list[Any]) -> float | None:
        if self._end is None:
            raise Failed("the episode has no reward before its end")
        errors = [*self._end.errors, *(error for t in self._end.traces for error in t.errors)]
        if errors:
            raise Failed(f"the episode failed: {errors[0].type}: {errors[0].message}")
        return float(sum(trace.reward for trace in self._end.traces))

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()

    def _start(self) -> None:
        handler = type("Handler", (_Handler,), {"ask": staticmethod(self._ask)})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._play, args=(url,), daemon=True).start()

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._events.put(("request", request))
        return self._answers.get()

    def _play(self, url: str) -> None:
        try:
            self._events.put(("end", asyncio.run(self._episode(url))))
        except BaseException as error:
            self._events.put(("end", error))

    async def _episode(self, url: str) -> Any:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=url, api_key_var=_KEY)
        context = vf.ModelContext(model="model", client=client)
        async with self._environment.serving():
            return await self._environment.run_episode(self._tasks[self._task], context)


def _prompt_of(data: Any) -> Any:
    """The messages of a task that has some."""
    if data.prompt is None or isinstance(data.prompt, str):
        return [{"role": "user", "content": data.prompt or ""}]
    return [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]


class _Handler(BaseHTTPRequestHandler):
    """Answers requests for chat completions, as a stream if that is asked for."""

    ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = _wire_message(self.ask(request))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {
            "id": "answer",
            "created": 0,
            "model": "model",
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }
        if request.get("stream"):
            for number, call in enumerate(message.get("tool_calls", [])):
                call["index"] = number
            choice = {"index": 0, "delta": message, "finish_reason": finish}
            chunk = reply | {"object": "chat.completion.chunk", "choices": [choice]}
            self._write("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
        else:
            choice = {"index": 0, "message": message, "finish_reason": finish}
            whole = reply | {"object": "chat.completion", "choices": [choice]}
            self._write("application/json", json.dumps(whole))

    def _write(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


def _wire_message(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message, the arguments of its calls as texts."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.get("content") or ""}
    calls = []
    for number, call in enumerate(answer.get("tool_calls") or []):
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {})
        name = call.get("id") or f"call_{number}"
        calls.append({"id": name, "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message
