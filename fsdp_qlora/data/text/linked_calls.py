"""Links results of tools with their calls by id."""

import itertools
from collections.abc import Sequence
from typing import Any

from fsdp_qlora.data.content import BadRow

Message = dict[str, Any]

OTHER_ORDER = "results of tools are in another order than their calls"


ABANDONED = "calls have no result before others speak, as where a user interrupts"


def check(messages: Sequence[Message], *, is_log: bool = False) -> list[str]:
    """Check that each result is of a call before it.

    The calls at the end may have no results. Messages whose calls or results have no ids are not
    checked.

    Args:
        is_log: whether each call must be answered before others speak.
    Returns:
        Notes.
    Raises:
        BadRow: a result is of no call or a second one, two calls of a turn have the same id, or a
            call has no result.
    """
    if not _have_ids(messages):
        return []
    notes: list[str] = []
    waiting: dict[str, str] = {}
    abandoned: dict[str, str] = {}
    answered: set[str] = set()
    for turn_number, message in enumerate(messages, start=1):
        where = f"turn {turn_number}"
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id in answered:
                raise BadRow(f"{where}: a second result of the call {call_id!r}")
            if call_id not in {**waiting, **abandoned}:
                raise BadRow(f"{where}: its tool_call_id {call_id!r} is of no call before it")
            if call_id in waiting and call_id != next(iter(waiting)):
                notes.append(OTHER_ORDER)
            (waiting if call_id in waiting else abandoned).pop(call_id)
            answered.add(call_id)
        elif message["role"] in ("user", "assistant"):
            for call_id, name in waiting.items():
                if is_log:
                    raise BadRow(f"{where}: the call {call_id!r} of {name} has no result before it")
                notes.append(ABANDONED)
            abandoned |= waiting
            waiting = _calls_by_id(message, where)
            answered = set()
    return list(dict.fromkeys(notes))


def _have_ids(messages: Sequence[Message]) -> bool:
    """Whether there are results, and all of them and all calls have ids."""
    results = [message for message in messages if message["role"] == "tool"]
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return (
        bool(results)
        and all(call.get("id") for call in calls)
        and all(result.get("tool_call_id") for result in results)
    )


def _calls_by_id(message: Message, where: str) -> dict[str, str]:
    """The id of each call -> the name of its function, in the order of the calls."""
    calls: dict[str, str] = {}
    for call in message.get("tool_calls") or []:
        if call["id"] in calls:
            raise BadRow(f"{where}: two calls have the id {call['id']!r}")
        calls[call["id"]] = call["function"]["name"]
    return calls


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Messages that `check` accepts, with results in the order of their calls.

    Most chat templates write no ids, so that the order alone tells of which call a result is.
    """
    if not _have_ids(messages):
        return [*messages]
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        some = [*group]
        if is_result:
            some.sort(key=lambda result: places[result["tool_call_id"]])
        else:
            calls = [call["id"] for message in some for call in message.get("tool_calls") or []]
            places = {call_id: place for place, call_id in enumerate(calls)} or places
        ordered += some
    return ordered


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each result has the name of its call's function.

    Results without ids have the names of the calls before them, in their order, where there are as
    many of both.
    """
    named: list[Message] = []
    names: dict[str, str] = {}
    calls: list[Message] = []
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        some = [*group]
        if not is_result:
            calls = some[-1].get("tool_calls") or []
            for message in some:
                for call in message.get("tool_calls") or []:
                    names[call.get("id", "")] = call["function"]["name"]
            named += some
            continue
        places = [call["function"]["name"] for call in calls] if len(calls) == len(some) else []
        for place, result in enumerate(some):
            call_id = result.get("tool_call_id")
            name = names.get(call_id) if call_id else None
            if name is None and places and not call_id:
                name = places[place]
            named.append(result if name is None else {"name": name} | result)
    return named
