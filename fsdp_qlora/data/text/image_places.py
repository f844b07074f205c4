"""Prompts with one token in the place of each image, as they were before a processor wrote on."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class _Written(NamedTuple):
    """The text that a processor writes for an image.

    tokens: from its first added token to its last, which no tokenizer merges with text beside them.
    before, after: the text around these, which it may merge.
    """

    before: str
    tokens: list[int]
    after: str


def with_placeholders(
    ids: Sequence[int], written: Sequence[str], placeholder: str, tokenizer: Any
) -> list[int]:
    """The tokens of a prompt with a placeholder for each image.

    Args:
        ids: with all tokens of the images.
        written: the text that the processor writes in place of each placeholder.
    Raises:
        ValueError: the tokens do not show these images.
    """
    token_ids = tokenizer(placeholder, add_special_tokens=False)["input_ids"]
    placed: list[int] = []
    rest = [*ids]
    after = ""
    for text in written:
        image = _tokenized(text, tokenizer)
        start = _find(rest, image.tokens)
        placed += _without(rest[:start], after, image.before, tokenizer) + token_ids
        rest = rest[start + len(image.tokens) :]
        after = image.after
    return placed + _without(rest, after, "", tokenizer)


def _tokenized(text: str, tokenizer: Any) -> _Written:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # A tokenizer makes this mapping anew each time.
    added_tokens = tokenizer.added_tokens_decoder
    added = [place for place, token in enumerate(ids) if token in added_tokens]
    if not added:
        return _Written("", ids, "")
    first = added[0]
    end = added[-1] + 1
    return _Written(_text(ids[:first], tokenizer), ids[first:end], _text(ids[end:], tokenizer))


def _find(ids: Sequence[int], tokens: Sequence[int]) -> int:
    """The index at which these tokens begin. Raises ValueError."""
    for start, token in enumerate(ids):
        if token == tokens[0] and ids[start : start + len(tokens)] == tokens:
            return start
    raise ValueError("the tokens of an image are not in its prompt")


def _without(ids: list[int], before: str, after: str, tokenizer: Any) -> list[int]:
    """The tokens of a piece of a prompt without the text that belongs to the images beside it.

    Raises ValueError: it does not begin and end with this text.
    """
    if not before and not after:
        return ids
    text = _text(ids, tokenizer)
    piece = text.removeprefix(before).removesuffix(after)
    if f"{before}{piece}{after}" != text:
        raise ValueError("the text beside an image is not in its prompt")
    return list(tokenizer(piece, add_special_tokens=False)["input_ids"])


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
