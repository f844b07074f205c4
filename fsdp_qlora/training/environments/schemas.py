"""The methods of an environment that are tools, and their schemas."""

import inspect
from collections.abc import Callable
from typing import Any

from fsdp_qlora.utils.errors import UserError

NOT_TOOLS = {"reset", "get_reward", "reward", "message", "done", "close"}
"""Public methods that the run calls."""


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Name -> method of each tool: the public methods that the run does not call itself."""
    return {
        name: method
        for name, method in inspect.getmembers(environment, predicate=inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def schemas_of(environment: object) -> list[dict[str, Any]]:
    """The tools as chat templates take them.

    Raises:
        UserError: a method lacks type hints or a docstring.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for name, method in tools_of(environment).items():
        try:
            schemas.append(get_json_schema(method))
        except Exception as error:
            code = getattr(inspect.unwrap(method), "__code__", None)
            place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            problem = " ".join(str(error).split()).partition(". ")[0].rstrip(".!")
            raise UserError(
                f"the method {name}{place} is a tool, as its name begins with no underscore, and "
                f"cannot be described to the model: {problem}."
            ) from error
    return schemas
