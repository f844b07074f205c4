"""Shows the tokens of an episode before a run: what is learned, and what its environment writes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.rows import TokenizedRows, join_completions
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.text.call_readers import ToolCall
from fsdp_qlora.training.environments.pool import Environments
from fsdp_qlora.training.generation.tool_turns import ToolTurns

_VALUES: Mapping[str, Any] = {
    "string": "...",
    "integer": 1,
    "number": 1,
    "boolean": True,
    "array": [],
    "object": {},
}


def example_episode(
    environments: Environments, tool_turns: ToolTurns, prompt: Prompt
) -> TokenizedRows:
    """The tokens of an episode whose first turn calls the first tool.

    The environment begins the episode, so that the prompt is the one of a run. The call has made-up
    arguments and is not executed, and its result is a text that says so.

    Returns:
        One row, in which the model's turns are learned.
    Raises:
        EpisodeFailed: the environment cannot begin.
        BadRow: the chat template refuses its messages.
    """
    assert prompt.chat is not None
    row = dict(prompt.for_rewards) | {"prompt": prompt.content}
    with environments.open(prompt.environment or None, row) as episode:
        request = episode.next(None)
    messages = request.messages if request else prompt.chat.messages
    tools = request.tools if request else []
    ids = tool_turns.prompt_ids(messages, tools, prompt.chat.template_kwargs)
    calls = [made_up_call(tool) for tool in tools[:1]]
    first = tool_turns.turn_ids(calls)
    if calls:
        result = f"(what {calls[0].name} returns)"
        following = tool_turns.result_ids([(calls[0].name, result)], first)
    else:
        following = tool_turns.user_ids("(what the environment answers)", first)
    return _joined(ids, [first, tool_turns.turn_ids([])], following, prompt.row_number)


def made_up_call(tool: Mapping[str, Any]) -> ToolCall:
    """A call of a tool with arguments of the types of its schema."""
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = {}
    for name, schema in properties.items():
        kind = schema.get("type")
        choices = schema.get("enum")
        arguments[name] = choices[0] if choices else _VALUES.get(str(kind), "...")
    return ToolCall(function["name"], arguments)


def _joined(
    prompt: Sequence[int], turns: Sequence[Sequence[int]], following: Sequence[int], number: int
) -> TokenizedRows:
    """The row of two turns with the environment's tokens between them."""
    first, last = turns
    table = join_completions([prompt], [[*first, *following, *last]], [number])
    learned = table.learned[:].copy()
    start = len(prompt) + len(first)
    learned[start : start + len(following)] = np.zeros(len(following), np.bool_)
    return TokenizedRows(table.input_ids, learned, table.offsets, table.row_numbers)
