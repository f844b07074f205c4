"""Descriptions of tools as several APIs have them become those of OpenAI's chats."""

from collections.abc import Mapping, Sequence
from typing import Any

LEFT_OUT = "tools that the provider of an API runs itself are left out"
# Of a tool that takes text in any form, as OpenAI has them.
INPUT = "input"
_ANY_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}

_SCHEMAS = ("input_schema", "inputSchema", "parametersJsonSchema")
# Gemini has several functions in a tool.
_DECLARATIONS = ("functionDeclarations", "function_declarations")


def in_chat_form(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool as OpenAI's chats have it; None for one that the provider runs itself.

    Anthropic has the schema in `input_schema`, the Model Context Protocol in `inputSchema`, and
    OpenAI's responses have all fields side by side.
    """
    if isinstance(tool.get("function"), Mapping):
        return dict(tool)
    kind = tool.get("type")
    schemas = [tool[name] for name in _SCHEMAS if tool.get(name) is not None]
    if schemas:
        schema = schemas[0]
    elif kind == "custom":
        tool = tool.get("custom") or tool
        schema = _ANY_TEXT
    elif kind in ("function", None) and tool.get("name"):
        schema = tool.get("parameters")
    else:
        return None
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    if schema is not None:
        function["parameters"] = schema
    if kind == "function" and tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of Anthropic's API as OpenAI's chats have it; others as they are."""
    return (in_chat_form(tool) or tool) if "input_schema" in tool else tool


def all_in_chat_form(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools that a model calls by itself, and notes on others."""
    known = [in_chat_form(each) for tool in tools for each in _declared(tool)]
    notes = [LEFT_OUT] if None in known else []
    return [tool for tool in known if tool is not None], notes


def _declared(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions of a tool of Gemini's API; another tool as it is."""
    for name in _DECLARATIONS:
        functions = tool.get(name)
        if isinstance(functions, list) and all(isinstance(each, Mapping) for each in functions):
            return functions
    return [tool]
