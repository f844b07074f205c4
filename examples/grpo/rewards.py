"""A reward function: plain words. `--rewards examples/grpo/rewards.py:short_words`"""

import re
from typing import Any


def short_words(completions: list[str], **others: Any) -> list[float]:
    """The share of each completion's words that have at most four letters; 0 if it has fewer than
    three words.
    """
    words = [
        re.findall(r"[A-Za-z]+", text if isinstance(text, str) else text[-1]["content"])
        for text in completions
    ]
    return [
        sum(len(word) <= 4 for word in found) / len(found) if len(found) > 2 else 0.0
        for found in words
    ]
