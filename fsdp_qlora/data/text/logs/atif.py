"""Logs in the Agent Trajectory Interchange Format: steps of an agent become messages."""

import itertools
from collections.abc import Mapping
from typing import Any

from fsdp_qlora.data.content import FOLDER, BadRow, Chat, Row
from fsdp_qlora.data.text import chats

Step = Mapping[str, Any]
Turn = dict[str, Any]
ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_VERSION = "ATIF-v1"


def read_trajectory(row: Row) -> Chat:
    """The `steps` of an agent, with the tools that `agent` defines.

    Steps that are copied from another log, or that no model has written, are not learned. Raises
    BadRow.
    """
    if not is_trajectory(row):
        raise BadRow(f"schema_version is {str(row.get('schema_version'))[:40]!r}, not {_VERSION}.N")
    steps = chats.parsed(chats.parsed_text(row.get("steps"), "steps"))
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise BadRow("steps is not a list of objects")
    if not steps:
        raise BadRow("empty steps")
    _check_numbers(steps)
    turns = [
        turn
        for step_number, step in enumerate(steps, start=1)
        for turn in _turns(step, f"step {step_number}")
    ]
    agent = chats.parsed_text(row.get("agent"), "agent")
    tools = agent.get("tool_definitions") if isinstance(agent, Mapping) else None
    return chats.read_log({"tools": tools, FOLDER: row.get(FOLDER)}, turns)


def is_trajectory(row: Row) -> bool:
    version = row.get("schema_version")
    return isinstance(version, str) and version.startswith(f"{_VERSION}.")


def _check_numbers(steps: list[Step]) -> None:
    """Raise BadRow where a step is missing."""
    numbers = [step.get("step_id") for step in steps]
    for before, number in itertools.pairwise(numbers):
        if isinstance(before, int) and isinstance(number, int) and number != before + 1:
            raise BadRow(f"step_id {number} follows {before}: steps are missing or out of order")


def _turns(step: Step, where: str) -> list[Turn]:
    """The turns of a step: what is said, and the results of an agent's calls."""
    source = step.get("source")
    if not isinstance(source, str) or source not in ROLES:
        raise BadRow(f"{where}: unknown source {source!r}; known: {', '.join(ROLES)}")
    if step.get("message") is None:
        raise BadRow(f"{where}: its message is null")
    turn: Turn = {"role": ROLES[source], "content": _content(step["message"])}
    results = _results(step, where)
    if source != "agent":
        if step.get("tool_calls"):
            raise BadRow(f"{where}: {source} has tool_calls, which only an agent can have")
        if results:
            raise BadRow(
                f"{where}: {source} has an observation, such as a summary of the log; what the "
                "agent has read then is unknown"
            )
        return [turn]
    calls = _calls(step.get("tool_calls") or [], where)
    if calls:
        turn["tool_calls"] = calls
    if step.get("reasoning_content"):
        turn["reasoning_content"] = step["reasoning_content"]
    if step.get("is_copied_context") or step.get("llm_call_count") == 0:
        turn["weight"] = 0
    return [turn, *(_answer(result, calls, where, num=len(results)) for result in results)]


def _content(message: object) -> object:
    """Text, or parts of text and images, whose paths are in `source`."""
    if not isinstance(message, list):
        return message
    return [_part(part) for part in message]


def _part(part: object) -> object:
    if not isinstance(part, Mapping) or not isinstance(part.get("source"), Mapping):
        return part
    if part["source"].get("path") is None:
        return part
    return {"type": part.get("type"), "path": part["source"]["path"]}


def _results(step: Step, where: str) -> list[Mapping[str, Any]]:
    observation = step.get("observation")
    is_empty = isinstance(observation, Mapping) and not chats.filled(observation)
    if observation is None or is_empty:
        return []
    results = observation.get("results") if isinstance(observation, Mapping) else None
    if not isinstance(results, list) or not all(isinstance(each, Mapping) for each in results):
        raise BadRow(f"{where}: its observation has no list of results")
    return results


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRow(f"{where}: its tool_calls are not a list")
    return [_call(call, where) for call in calls]


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("tool_call_id"), str):
        raise BadRow(f"{where}: a call without a tool_call_id")
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    if not isinstance(function["arguments"], str | Mapping):
        raise BadRow(f"{where}: a call without arguments")
    return {"id": call["tool_call_id"], "function": function}


# How the names of fields end that refer to the log of another agent.
_ELSEWHERE = "trajectory_ref"


def _answer(
    result: Mapping[str, Any], calls: list[dict[str, Any]], where: str, *, num: int
) -> Turn:
    """A result as the answer of a tool, or as a user's turn where the agent has called none."""
    content = result.get("content")
    if content is None and any(result[name] for name in result if name.endswith(_ELSEWHERE)):
        raise BadRow(f"{where}: a result is in the log of another agent")
    content = "" if content is None else _content(content)
    call_id = result.get("source_call_id")
    if call_id is None and not calls:
        return {"role": "user", "content": content}
    if call_id is None and not len(calls) == num == 1:
        raise BadRow(
            f"{where}: a result without source_call_id, and {len(calls)} calls of which it may be"
        )
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": calls[0]["id"] if call_id is None else call_id,
    }
