"""A reward: the colour of the square. `--rewards examples/images/rewards.py:names_color`"""

from typing import Any


def names_color(
    completions: list[list[dict[str, str]]], color: list[str], **others: Any
) -> list[float]:
    """1 for each completion that is the colour in its row's column, else 0."""
    said = [messages[-1]["content"].strip() for messages in completions]
    return [float(text == right) for text, right in zip(said, color, strict=True)]
