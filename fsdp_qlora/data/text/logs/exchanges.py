"""Logs of requests to a model and its responses, as APIs of OpenAI and Anthropic have them."""

from collections.abc import Mapping
from typing import Any

from fsdp_qlora.data.content import FOLDER, BadRow, Chat, Row, text_of
from fsdp_qlora.data.text import chats
from fsdp_qlora.data.text.conversation import REASONING
from fsdp_qlora.data.text.logs.responses import are_items, read_response

Body = Mapping[str, Any]
_ANSWER = ("content", "tool_calls", "function_call", "refusal", *REASONING)
# Why an answer ended, of those that are whole.
_WHOLE = (None, "", "stop", "tool_calls", "function_call", "end_turn", "stop_sequence", "tool_use")


def read_exchange(row: Row) -> Chat:
    """A `request` and its `response`, of which only the response is learned.

    Raises BadRow.
    """
    request = _body(row.get("request"), "request")
    response = _response(row.get("response"))
    _refuse_errors(response)
    if "messages" not in request:
        body = chats.filled(response) if isinstance(response, Mapping) else {"output": response}
        others = {"output": body.get("output"), FOLDER: row.get(FOLDER)}
        return read_response(body | dict(request) | others)
    asked = chats.only_read(chats.turns(request["messages"], "messages"))
    beside = {name: request.get(name) for name in ("system", "tools")}
    return chats.read_log(beside | {FOLDER: row.get(FOLDER)}, [*asked, _answer(response)])


def is_exchange(row: Row) -> bool:
    try:
        request = _body(row.get("request"), "request")
    except BadRow:
        return False
    return isinstance(request.get("messages"), list) or "input" in request


def _response(value: object) -> object:
    """A response, also in a text of JSON; a text of anything else is the answer itself."""
    try:
        body = chats.parsed_text(value, "response")
    except BadRow:
        return value
    is_body = are_items(body) or (isinstance(body, Mapping) and _is_known(body))
    return body if is_body or not isinstance(value, str) else value


def _is_known(body: Body) -> bool:
    return (
        isinstance(body.get("choices"), list)
        or body.get("role") == "assistant"
        or are_items(body.get("output"))
        or (body.get("type") == "error" and "error" in body)
    )


def _body(value: object, column: str) -> Body:
    body = chats.parsed_text(value, column)
    if not isinstance(body, Mapping):
        raise BadRow(f"{column} is not an object")
    return chats.filled(body)


def _refuse_errors(response: object) -> None:
    """Raise BadRow where the response is an error."""
    error = response.get("error") if isinstance(response, Mapping) else None
    if error:
        kind = error.get("type") or error.get("code") if isinstance(error, Mapping) else error
        raise BadRow(f"the response is an error ({str(kind)[:60]})")


def _answer(response: object) -> dict[str, Any]:
    """The assistant's turn in a response. Raises BadRow if it is not whole."""
    if isinstance(response, str):
        return {"role": "assistant", "content": text_of({"response": response}, "response")}
    if not isinstance(response, Mapping):
        raise BadRow("response is neither an object nor text")
    message: Any = response
    reason = response.get("stop_reason") or response.get("finish_reason")
    if response.get("choices") is not None:
        choices = response["choices"]
        if (
            not isinstance(choices, list)
            or len(choices) != 1
            or not isinstance(choices[0], Mapping)
        ):
            raise BadRow("the response has not one choice, of which the answer would be known")
        message = choices[0].get("message")
        reason = choices[0].get("finish_reason")
    if reason not in _WHOLE:
        raise BadRow(f"the response ends with {reason!r}, so it is not whole")
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        raise BadRow("the response has no message of the assistant")
    if message.get("audio"):
        raise BadRow("the response is sound: only text can be trained on")
    return {"role": "assistant"} | {
        name: message[name] for name in _ANSWER if message.get(name) is not None
    }
