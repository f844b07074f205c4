"""Finds the assistant's turns in a rendered conversation, by rendering parts of it."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[..., tuple[str, Sequence[Span]]]
"""(messages, add_generation_prompt=False, **variables) -> the text, and what the template marks as generated."""

MARK = "\ue0ff"  # a private character: texts do not have it, and templates leave it as it is
THINKING, NO_THINKING = ({"enable_thinking": on, "thinking": on} for on in (True, False))  # as templates call it
BEGINS, ENDS = "<think>", "</think>"  # of reasoning within a content, which a template may leave out
REASONING = ("reasoning_content", "reasoning", "thinking")


class NotSplit(ValueError):
    """What is learned of a turn is unknown from the rendered text. The message is the reason."""


class Conversation:
    """A rendered conversation.

    Args:
        end_tokens: tokens after which a model stops; white space that the template writes after one is not learned.
    """

    def __init__(self, render: Render, messages: list[Message], end_tokens: Sequence[str]) -> None:
        self._render, self.messages = render, messages
        self._end_tokens = tuple(sorted(end_tokens, key=len, reverse=True))
        self.text, blocks = render(messages)
        speakers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        self._blocks = dict(zip(speakers, blocks, strict=True)) if len(blocks) == len(speakers) else {}

    def until(self, turn: int) -> "Conversation | None":
        """The conversation that ends with a turn; None if it is this one."""
        if turn + 1 == len(self.messages):
            return None
        return Conversation(self._render, self.messages[: turn + 1], self._end_tokens)

    def written(self, turn: int) -> tuple[str, Span | None, int]:
        """The text, a turn's place in it, and how much of what the turn says the text lacks."""
        span, pieces = self.span(turn), _pieces(self.messages[turn])
        text = _squeezed(self.text[slice(*span)]) if span else ""
        return self.text, span, sum(piece not in text for piece in pieces) if span else len(pieces) + 1

    def span(self, turn: int) -> Span | None:
        """Where the model writes the turn; None if that is unknown.

        A turn begins after the text of the messages before it with the generation prompt, and ends where the text of
        the messages up to it ends. If the template renders these differently here, the turn is searched for as it is in
        the conversation that ends with it.
        """
        if turn in self._blocks:
            first, last = self._blocks[turn]
            return first, last
        alone = self.until(turn)
        start = self._start(turn, alone)
        end = None if start is None else len(self.text) if alone is None else self._end(turn, start, alone)
        if start is None or end is None or end < start:
            return None
        body = self.text[start:end].rstrip()
        return start, start + len(body) if body.endswith(self._end_tokens) else end

    def _start(self, turn: int, alone: "Conversation | None") -> int | None:
        """Where a turn begins, in this conversation and in the one that ends with it."""
        prompts = self._prompts(self.messages[:turn])
        if (prompt := next(filter(self.text.startswith, prompts), None)) is not None:
            return len(prompt)
        content = self._place(turn)
        if content is None:
            return None
        if prompts and prompts[0].startswith(self.text[:content]):
            return content  # the prompt opens a block that this turn does not have
        # The messages before are rendered differently here. The text before the turn is as where the turn is the last,
        # or as a generation prompt follows a question.
        before = self.text[:content]
        start, place = (alone._start(turn, None), alone._place(turn)) if alone is not None else (None, None)
        if alone is not None and start is not None and place is not None:
            head = max((alone.text.rfind(token, 0, start) for token in self._end_tokens), default=-1)
            if head < place and before.endswith(alone.text[max(head, 0) : place]):
                return content - (place - start)
        openings = self._openings()
        opening = next(filter(before.endswith, openings), None)
        if opening is None:
            return None
        return content - (len(opening) - len(openings[0]) if opening.startswith(openings[0]) else 0)

    def _prompts(self, messages: list[Message]) -> list[str]:
        """The text of messages with a generation prompt, in the variants that a conversation may have."""
        ways: tuple[dict[str, bool], ...] = ({}, THINKING, NO_THINKING)
        found = [self._try(messages, add_generation_prompt=True, **variables) for variables in ways]
        prompts, asked = [prompt for prompt in found if prompt is not None], self._try(messages)
        if prompts and asked is not None and prompts[0].startswith(asked):
            # Without the tokens behind its first one: it may open a block for reasoning that the turn does not have.
            added = prompts[0][len(asked) :]
            places = {added.find(token, 1) for token in self._end_tokens if token in added[1:]}
            prompts += [asked + added[:place] for place in sorted(places, reverse=True)]
        return prompts

    def _openings(self) -> list[str]:
        """What generation prompts add to a question."""
        question = [{"role": "user", "content": "a"}]
        asked = self._try(question) or ""
        return [prompt.removeprefix(asked) for prompt in self._prompts(question) if prompt != asked]

    def _try(self, messages: list[Message], **options: bool) -> str | None:
        try:
            return self._render(messages, **options)[0]
        except Exception:  # a template can raise anything, and many do where there is no message
            return None

    def _end(self, turn: int, start: int, alone: "Conversation") -> int | None:
        """Where a turn that others follow ends: as where it is the last, perhaps without its reasoning."""
        if self.text.startswith(alone.text):
            return len(alone.text)
        there = alone._start(turn, None)
        if there is None:
            return None
        rest, body = self.text[start:], alone.text[there:]
        if shared := _shared(body, rest):
            return start + len(shared)
        while token := next(filter(body.rstrip().endswith, self._end_tokens), ""):  # the last turn ends with others
            body = body.rstrip().removesuffix(token)
        end = start + len(shared := _shared(body, rest))
        token = next(filter(rest[len(shared) :].lstrip().startswith, self._end_tokens), "")
        if not shared or not token:
            return end if shared else None
        behind = self.text.index(token, end) + len(token)
        following = self._place(turn + 1)  # the token is an end if the next turn has a beginning too
        opening = self.text[behind:following] if following is not None else ""
        return behind if any(token in opening for token in self._end_tokens) else end

    def _place(self, turn: int) -> int | None:
        """Where the content of a turn begins in the text, found by a mark in it; None if it is unknown."""
        content = str(self.messages[turn].get("content") or "")
        for begins in (0, content.rfind(ENDS) + len(ENDS)):
            inside = len(content) - len(content[begins:].lstrip())
            if content.strip() and (place := self._marked(turn, inside)) is not None:
                blank = content[begins:inside]
                return place - len(blank) if self.text[:place].endswith(blank) else place
        return None

    def _marked(self, turn: int, inside: int) -> int | None:
        """The place in the text of a place in a turn's content."""
        content = str(self.messages[turn]["content"])
        marked = {**self.messages[turn], "content": content[:inside] + MARK + content[inside:]}
        text = self._render([*self.messages[:turn], marked, *self.messages[turn + 1 :]])[0]
        return text.index(MARK) if MARK in text and text.replace(MARK, "") == self.text else None


def _shared(first: str, second: str) -> str:
    """The longest end of one text, of a few characters at least, with which the other begins."""
    longest, last = "", first[-4:]
    place = second.find(last) if first else -1
    while 0 <= place <= len(first) - len(last):
        if first.endswith(beginning := second[: place + len(last)]):
            longest = beginning
        place = second.find(last, place + 1)
    return longest


def learned_rows(
    whole: Conversation, turns: Sequence[int], *, apart: bool
) -> tuple[list[tuple[str, list[Span]]], int, bool]:
    """The conversation with the spans of these turns, and turns that are rows of their own.

    A turn is in a row of its own, which ends with it, if the template renders it differently when others follow:
    without its reasoning, as a rule. So it is learned as the model writes it.

    Args:
        apart: whether turns may become rows of their own.
    Returns:
        (text, spans) of each row, how many of the turns the template does not write whole, and whether turns are apart.
    Raises:
        NotSplit: a turn cannot be found, or the template does not write it.
    """
    rows: list[tuple[str, list[Span]]] = []
    spans: list[Span] = []
    num_cut = 0
    for turn in turns:
        text, span, missing = whole.written(turn)
        if missing and apart and (alone := whole.until(turn)) is not None:
            own = alone.written(turn)
            if own[2] < missing:
                text, span, missing = own
        if span is None:
            raise NotSplit(
                f"turn {turn + 1}: the rendered turn does not start with the generation prompt, so what is learned "
                "of it is unknown. Use another chat template with --prompt_template, or --learn all"
            )
        _check_written(turn, whole.messages[turn], text[slice(*span)])
        num_cut += missing > 0
        if text is whole.text:
            spans.append(span)
        else:
            rows.append((text, [span]))
    is_apart = bool(rows)
    return rows + ([(whole.text, spans)] if spans or not rows else []), num_cut, is_apart


def _pieces(message: Message) -> list[str]:
    """What a template should write of a turn."""
    content = str(message.get("content") or "").lstrip().removeprefix(BEGINS)  # that may be in the prompt
    texts = [content, *(str(message.get(name) or "") for name in REASONING)]
    calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
    return [_squeezed(text) for text in (*texts, *calls) if text.strip()]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _check_written(turn: int, message: Message, written: str) -> None:
    """Raise NotSplit where a template writes nothing of what is to be learned."""
    words = str(message.get("content") or "").rpartition(ENDS)[2].split()
    if words and words[-1] not in written:
        raise NotSplit(f"turn {turn + 1}: the chat template does not write the text of this turn")
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in written:
            raise NotSplit(f"turn {turn + 1}: the chat template does not write tool calls, so it cannot be learned")


def left_out(messages: list[Message], tools: list[dict[str, Any]] | None, text: str) -> list[str]:
    """What of a conversation a template leaves out, besides the assistant's turns: roles, and "tools"."""
    written = _squeezed(text)
    roles = dict.fromkeys(
        message["role"]
        for message in messages
        if message["role"] in ("system", "developer", "user")
        and _squeezed(str(message.get("content") or "")) not in written
    )
    names = [tool.get("function", tool) for tool in tools or []]
    named = [tool["name"] for tool in names if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    return [*roles, *(["tools"] if named and not any(name in text for name in named) else [])]


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of tool calls as JSON."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
