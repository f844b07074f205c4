"""Logs of the library verifiers: an episode's graph of messages becomes a chat."""

from collections.abc import Mapping
from typing import Any

from fsdp_qlora.data.content import BadRow, Chat, Row
from fsdp_qlora.data.text import chats


def read_episode(row: Row) -> Chat:
    """The one agent of an episode in `traces`, with its tools.

    Turns are learned that the model has written in this episode. Raises BadRow.
    """
    _refuse_failed(row)
    traces = [trace for trace in _objects(row.get("traces"), "traces") if _is_trained(trace)]
    if len(traces) != 1:
        raise BadRow(f"the episode has {len(traces)} traces of agents that are trained, not one")
    trace = traces[0]
    if trace.get("is_completed") is False:
        raise BadRow("the episode is not completed")
    for call in _objects(trace.get("calls") or [], "calls"):
        if call.get("finish_reason") == "length":
            raise BadRow("an answer ends with 'length', so it is not whole")
    return chats.read_log({"tools": trace.get("tools")}, _turns(trace.get("nodes")))


def is_episode(row: Row) -> bool:
    try:
        traces = chats.parsed(chats.parsed_text(row.get("traces"), "traces"))
    except BadRow:
        return False
    return (
        isinstance(traces, list)
        and bool(traces)
        and all(isinstance(trace, Mapping) and "nodes" in trace for trace in traces)
    )


def _objects(value: object, name: str) -> list[Mapping[str, Any]]:
    values = chats.parsed(chats.parsed_text(value, name))
    if not isinstance(values, list) or not all(isinstance(each, Mapping) for each in values):
        raise BadRow(f"{name} is not a list of objects")
    return values


def _is_trained(trace: Mapping[str, Any]) -> bool:
    agent = trace.get("agent")
    return not isinstance(agent, Mapping) or agent.get("trainable") is not False


def _refuse_failed(row: Row) -> None:
    """Raise BadRow where the episode has failed."""
    errors = row.get("errors")
    if row.get("ok") is True or not (errors or row.get("ok") is False):
        return
    error = errors[-1] if isinstance(errors, list) and errors else None
    kind = error.get("type") if isinstance(error, Mapping) else error
    raise BadRow(f"the episode has failed ({str(kind)[:60]})")


def _turns(nodes: object) -> list[dict[str, Any]]:
    """The messages of nodes, each of which follows the one before. Raises BadRow."""
    if not isinstance(nodes, list) or not nodes:
        raise BadRow("a trace without nodes")
    turns: list[dict[str, Any]] = []
    for place, node in enumerate(nodes):
        message = node.get("message") if isinstance(node, Mapping) else None
        if not isinstance(message, Mapping):
            raise BadRow(f"node {place + 1} has no message")
        if node.get("parent") != (place - 1 if place else None):
            raise BadRow(f"node {place + 1}: the conversation has several branches")
        turn = {name: value for name, value in message.items() if name != "provider_state"}
        turns.append(turn if node.get("sampled") else (turn | {"weight": 0}))
    return turns
