"""Finds the assistant's turns in a rendered conversation by rendering parts of it.

Runs in the worker of chat templates. Most templates do not say where a turn begins. What a model
gets when it is used is known: the generation prompt, and then its own words up to the end token.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fsdp_qlora.data.content import num_common, texts_of

T = TypeVar("T")
Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]
Render = Callable[..., tuple[str, Sequence[Span]]]
"""(messages, add_generation_prompt=False) -> the text, and what the template marks as generated."""

# How chat templates begin and end reasoning. The first is also how contents have it, which a
# template may leave out.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
BEGINS, ENDS = THOUGHTS[0]
REASONING = ("reasoning_content", "reasoning", "thinking")


class Prompt(NamedTuple):
    """The text before a turn."""

    asked: str
    """The text that the model gets, perhaps without the block for reasoning that it opens and the
    turn has not.
    """
    written: str
    """How a conversation with the turn begins, if its template writes the turns before as it does
    in the prompt.
    """
    opening: str
    """The end of `written` that belongs to the turn, such as <|im_start|>assistant."""


class Own(NamedTuple):
    """A turn behind its own prompt.

    Its row is the prompt, and the conversation that ends with it from `place` on.
    """

    text: str
    start: int
    """Where the turn begins in the text."""
    place: int
    """Where it begins in the conversation that ends with it."""


class Bounds(NamedTuple):
    """Where the last turn of a text, or its opening, can begin; nowhere if `words` precedes
    `earliest`.
    """

    earliest: int
    """Behind the words of the message before."""
    words: int
    """Where the turn's own words are."""
    end: int
    """Where the text is no longer as one that ends with the message before."""


class Conversation:
    """A rendered conversation.

    Args:
        end_tokens: tokens after which a model stops; white space that the template writes after one
            is not learned.
    """

    def __init__(self, render: Render, messages: list[Message], end_tokens: Sequence[str]) -> None:
        self._render = render
        self.messages = messages
        self._end_tokens = tuple(sorted(end_tokens, key=len, reverse=True))
        self.text, blocks = render(messages)
        speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        self._blocks = (
            dict(zip(speakers, blocks, strict=True)) if len(blocks) == len(speakers) else {}
        )

    def places(self, turn: int) -> list[tuple[str, Span]]:
        """The texts that have a turn as the model writes it, and its place in each.

        A turn begins after the generation prompt, and ends where the conversation that ends with it
        ends. The last of the texts is its prompt and the turn. This conversation precedes it if it
        begins with the same prompt and continues with the turn, perhaps without the reasoning or
        the tokens that only a last turn has.
        """
        is_last = turn + 1 == len(self.messages)
        alone = (
            self
            if is_last
            else Conversation(self._render, self.messages[: turn + 1], self._end_tokens)
        )
        prompts = self._prompts(turn)
        own = alone._behind(prompts)
        if turn in self._blocks and turn in alone._blocks:
            return self._marked(turn, alone, own)
        if own is None:
            return []
        body = own.text[own.start :]
        bodies = {own.text: (own.start, body)}
        here = None
        for prompt in prompts:
            if self.text.startswith(prompt.asked) and prompt.asked == prompt.written:
                here = len(prompt.asked)
                break
        if here is not None and not is_last:
            # The whole conversation comes first: of equal texts the caller takes the first, and
            # turns that are in it need no row of their own.
            bodies = {self.text: (here, self._in_full_chat(body, here))} | bodies
        places = []
        for text, (start, body) in bodies.items():
            # White space that the template writes behind the end token is none of the model's.
            learned = body.rstrip() if self.without_end(body) else body
            if body:
                places.append((text, (start, start + len(learned))))
        return places

    def is_changed(self, text: str, turn: int, message: Message) -> bool:
        """Whether a text of `places` is another one with this message in place of its turn."""
        shown = self.messages if text == self.text else self.messages[: turn + 1]
        others = [*shown[:turn], message, *shown[turn + 1 :]]
        return self._try(others) != self._try(shown)

    def text_of_calls(self, turn: int) -> str:
        """The text that a turn without its calls lacks; "" if the template refuses such a turn."""
        *before, message = self.messages[: turn + 1]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        with_calls = self._try([*before, message]) or ""
        without = self._try([*before, {"content": ""} | plain])
        if without is None:
            return ""
        first = self._num_same(with_calls, without)
        same_end = _common_end(with_calls[first:], without[first:])
        return with_calls[first : len(with_calls) - len(same_end)]

    def _marked(self, turn: int, alone: "Conversation", own: Own | None) -> list[tuple[str, Span]]:
        """The places of a turn that the template marks itself.

        What its prompt has is not learned.
        """
        start, end = alone._blocks[turn]
        first, last = self._blocks[turn]
        if own is None:
            return [(self.text, (first, last)), (alone.text, (start, end))]
        # Characters of the block that the generation prompt has already, such as <think>.
        num_asked = max(0, own.place - start)
        shift = own.start - own.place
        start = start + num_asked
        first = first + num_asked
        places = [(own.text, (start + shift, end + shift))]
        # Only behind the text that the model gets is a turn learned as it is written.
        if self.text[:first] == own.text[: start + shift]:
            places.insert(0, (self.text, (first, last)))
        return places

    def _prompts(self, turn: int) -> list[Prompt]:
        """The generation prompts of a turn with which a text that has the turn may begin."""
        before = self.messages[:turn]
        prompt = self._try(before, add_generation_prompt=True)
        history = self._try(before) or ""
        if prompt is None and not any(
            message["role"] in ("user", "assistant") for message in before
        ):
            # The assistant begins, and the template wants a question: its prompt is as after one.
            question = [{"role": "user", "content": "a"}]
            history = self._try(question) or ""
            opening = (
                (self._try(question, add_generation_prompt=True) or "")
                .removeprefix(history)
                .partition(BEGINS)[0]
            )
            start, separator, _ = self.text.partition(opening) if opening else ("", "", "")
            if not separator:
                return []
            asked = start + separator
            return [Prompt(asked, asked, separator)]
        if prompt is None:
            return []
        own = self._num_same(prompt, history)
        prompts = [Prompt(prompt, prompt, prompt[own:])]
        for begins, ends in THOUGHTS:
            opened = prompt.find(begins, own)
            if opened < 0:
                continue
            if ends in prompt[opened:]:
                # The block is closed again, so that the model answers at once, unless the turn has
                # reasoning.
                asked = prompt[:opened] if _thinks(self.messages[turn], ends) else prompt
                prompts.append(Prompt(asked, prompt[:opened], prompt[own:opened]))
                continue
            block = opened + len(begins)  # the turn may have an empty one, with other white space
            prompts.append(Prompt(prompt, prompt[:block], prompt[own:block]))
            prompts.append(Prompt(prompt[:opened], prompt[:opened], prompt[own:opened]))
        return prompts

    def _behind(self, prompts: Sequence[Prompt]) -> Own | None:
        """The last turn behind the first of its prompts that fits; None if none is known."""
        bounds = None
        for prompt in prompts:
            if self.text.startswith(prompt.written):
                return self._own(prompt, len(prompt.written))
            # The template writes the turns before otherwise when this one follows, as without their
            # reasoning.
            bounds = bounds or self._bounds()
            place = self.text.rfind(
                prompt.opening, bounds.earliest, bounds.words + len(prompt.opening)
            )
            if not prompt.opening:
                place = min(bounds.words, bounds.end)
            if bounds.earliest <= place:
                return self._own(prompt, place + len(prompt.opening))
        if (
            bounds
            and bounds.earliest <= bounds.words
            and prompts[0].asked.startswith(self.text[: bounds.words])
        ):
            # the prompt ends with something that no turn has
            return self._own(prompts[0], bounds.words)
        return None

    def _own(self, prompt: Prompt, place: int) -> Own:
        return Own(prompt.asked + self.text[place:], len(prompt.asked), place)

    def _bounds(self) -> Bounds:
        """Where the last turn can begin.

        Found by texts with other words in it, and in the message before.
        """
        *before, last = self.messages
        # Where the text first differs from one with other words: the turn's own words are there.
        word_places = [
            self._num_same(self.text, self._try([*before, message])) for message in _others(last)
        ]
        if not before:
            return Bounds(0, min(word_places), 0)
        # With other words in the message before, all from its end on is the same.
        others = [*before[:-1], next(_others(before[-1]))]
        earliest = len(self.text) - len(_common_end(self.text, self._try([*others, last])))
        words = min((place for place in word_places if place >= earliest), default=-1)
        history = _common_end(self._try(before) or "", self._try(others))
        end = earliest + self._num_same(self.text[earliest:], history)
        return Bounds(earliest, words, end) if earliest else Bounds(0, -1, -1)

    def _try(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._render(messages, add_generation_prompt)[0]
        except Exception:  # a template can raise anything, and many do where there is no message
            return None

    def _num_same(self, text: str, other: str | None) -> int:
        """The number of characters with which both begin, without a part of a token."""
        num = num_common(text, other or "")
        # Both may begin a token alike, such as <|im_ of <|im_start|> and <|im_end|>: back to its
        # start.
        longest = len(self._end_tokens[0]) if self._end_tokens else 0
        near = text[max(0, num - longest) : num + longest]
        tokens = [token for token in self._end_tokens if token in near]
        cut = 0
        for token in tokens:
            for inside in range(1, len(token)):
                if text.startswith(token, num - inside):
                    cut = max(cut, inside)
        return num - cut

    def _in_full_chat(self, body: str, start: int) -> str:
        """A turn as it is in this text from a place on, where others follow it; "" if it is
        another.
        """
        # Templates leave out the reasoning of earlier turns, and tokens that only a last one has.
        while True:
            answer = body.rpartition(ENDS)[2]
            for written in (body, answer, answer.lstrip()):
                if self.text.startswith(written, start):
                    return written
            body = self.without_end(body)
            if not self.without_end(body):
                return ""

    def without_end(self, body: str) -> str:
        """A text without the end token, and white space, at its end; "" if there is none."""
        # The longest first: a token may end with another one.
        stripped = body.rstrip()
        for token in self._end_tokens:
            if token and stripped.endswith(token):
                return stripped.removesuffix(token)
        return ""


def _thinks(message: Message, ends: str) -> bool:
    """Whether a message has reasoning. ends: what ends it in a content."""
    return any(message.get(name) for name in REASONING) or any(
        ends in text for text in texts_of(message)
    )


def _common_end(text: str, other: str | None) -> str:
    """The text with which both end."""
    num = num_common(text[::-1], (other or "")[::-1])
    return text[len(text) - num :]


def _others(message: Message) -> Iterator[Message]:
    """A message with other words throughout; and the same without its reasoning."""
    other = copy.deepcopy(message)
    for name in REASONING:
        if isinstance(message.get(name), str):
            other[name] = _other_word(message[name])
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        # Reasoning stays reasoning, or the template would write the turn in another way.
        thought, ends, answer = content.rpartition(ENDS)
        word = _other_word(thought, answer, content)
        other["content"] = f"{BEGINS}{word}{ENDS}{word}" if ends else word
    if isinstance(content, list):
        for part in other["content"]:
            for name in ("text", "thinking"):
                if isinstance(part.get(name), str):
                    part[name] = _other_word(part[name])
    for call in other.get("tool_calls") or []:
        word = _other_word(call["function"]["name"])
        is_text = isinstance(call["function"]["arguments"], str)
        call["function"] = {
            "name": word,
            "arguments": json.dumps({word: word}) if is_text else {word: word},
        }
    yield other
    plain = {name: value for name, value in other.items() if name not in REASONING}
    if isinstance(plain.get("content"), str):
        plain["content"] = plain["content"].rpartition(ENDS)[2]
    yield plain


def _other_word(*texts: str) -> str:
    """A letter with which none of the texts begins or ends.

    So the first and the last different character of two texts are at the bounds of the words.
    """
    stripped = [text.strip() for text in texts if text.strip()]
    edges = {text[0] for text in stripped} | {text[-1] for text in stripped}
    return next(letter for letter in "abcdefgh" if letter not in edges)


def squeezed(text: str) -> str:
    return "".join(text.split())
