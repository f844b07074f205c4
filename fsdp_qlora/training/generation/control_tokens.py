"""Keeps text that others write from becoming control tokens.

A tool's result or a row's question can have the text <|im_end|>. A tokenizer reads it as the token
that ends a turn, wherever it stands. Here such a text stands in for itself as a character of
Unicode's private use while the chat template is filled, and is tokenized letter by letter
afterwards if need be.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import Rendered, Segment
from fsdp_qlora.data.text.conversation import THOUGHTS

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
# A template finds reasoning in what the assistant says by them.
_MARKS_OF_REASONING = frozenset(itertools.chain.from_iterable(THOUGHTS))


class ControlTokens:
    """The tokens of a tokenizer that no text of others may become.

    They are its special tokens and all others that were added to its vocabulary, except for those
    of white space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        self.texts = {id_: text for id_, text in added.items() if text.replace("▁", " ").strip()}
        """Token id -> its text."""
        self._tokens = set(self.texts.values())
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)
        # Models have thousands of them: an alternative for each would try all at each bracket.
        firsts = "".join(sorted({token[0] for token in self._tokens}))
        self._starts = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def begins(self, text: str) -> str:
        """The control token that a text begins with, behind white space; "" if there is none."""
        shortened = text.lstrip()
        return self._at(shortened, 0)

    def ends(self, text: str) -> str:
        """The control token that a text ends with, but for white space; "" if there is none."""
        shortened = text.rstrip()
        fits = [token for token in self._tokens if shortened.endswith(token)]
        return max(fits, key=len, default="")

    def hidden_in(self, *values: Any) -> "HiddenTexts":
        """Find the texts of control tokens in values of JSON."""
        return HiddenTexts(self, [*_texts_in(values)])

    def find(self, text: str) -> set[str]:
        """The pieces of a text that are, or may become, control tokens."""
        found = set()
        rest = []
        place = 0
        for start in self._starts.finditer(text):
            token = self._at(text, start.start()) if start.start() >= place else ""
            if token:
                found.add(token)
                rest.append(text[place : start.start()])
                place = start.start() + len(token)
        rest.append(text[place:])
        # A tokenizer may normalize before it looks for its tokens.
        return found | {piece for piece in rest if self._has_control(self.encode(piece))}

    def _at(self, text: str, place: int) -> str:
        """The longest control token at a place; "" if there is none."""
        for length in self._lengths:
            piece = text[place : place + length]
            if piece in self._tokens:
                return piece
        return ""

    def plain(self, text: str) -> list[int]:
        """The ids of a text without control tokens."""
        ids: list[int] = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        # Only special tokens are split, and not in each tokenizer.
        if len(text) > 1 and self._has_control(ids):
            half = len(text) // 2
            return self.plain(text[:half]) + self.plain(text[half:])
        return ids

    def encode(self, text: str) -> list[int]:
        """The ids of a text as of a filled template, with control tokens."""
        segment = Segment(text, learned=False)
        return encode_prompt(Rendered([segment], "chat"), self._tokenizer) if text else []

    def _has_control(self, ids: Sequence[int]) -> bool:
        return not self.texts.keys().isdisjoint(ids)


class HiddenTexts:
    """Texts of control tokens, and the character that stands for each.

    Args:
        texts: all texts that go into a chat template.
    """

    def __init__(self, control: ControlTokens, texts: Sequence[str]) -> None:
        self._control = control
        found = sorted(set().union(*map(control.find, texts)), key=len, reverse=True)
        taken = set().union(*texts) if found else set()
        free = _free_characters(taken)
        self._stands_for = {text: next(free) for text in found}
        self._original = {character: text for text, character in self._stands_for.items()}
        self._pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
        characters = "".join(self._original)
        self._split = re.compile(f"([{characters}])" if characters else r"((?!))")

    def hide(self, value: Any, *, keep: frozenset[str] = frozenset()) -> Any:
        """The same value of JSON with the characters in its texts.

        keep: texts of control tokens that stay as they are.
        """
        if isinstance(value, str):
            return self._pattern.sub(
                lambda found: found[0] if found[0] in keep else self._stands_for[found[0]],
                sound(value),
            )
        if isinstance(value, Mapping):
            return {
                self.hide(key, keep=keep): self.hide(inner, keep=keep)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(inner, keep=keep) for inner in value]
        return value

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with the characters; marks of reasoning stay in what the assistant says."""
        hidden = []
        for message in messages:
            is_own = message.get("role") == "assistant"
            keep = _MARKS_OF_REASONING if is_own else frozenset()
            hidden.append(self.hide(message, keep=keep))
        return hidden

    def encode(self, text: str) -> list[int]:
        """The ids of a filled template."""
        pieces = self._split.split(text) if self._original else [text]
        ids = []
        for piece in pieces:
            if piece in self._original:
                ids += self._control.plain(self._original[piece])
            else:
                ids += self._control.encode(piece)
        return ids


def sound(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield sound(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts_in(key)
            yield from _texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner)


def _free_characters(taken: set[str]) -> Iterator[str]:
    """Characters of private use that are not taken."""
    for code in itertools.chain(*_PRIVATE):
        if chr(code) not in taken:
            yield chr(code)
