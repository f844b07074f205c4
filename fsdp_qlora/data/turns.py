"""Where the assistant's turns stand in a rendered conversation, told by rendering parts of it."""

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
    """What is learned of a turn cannot be told from the rendered text. The message is the reason."""


class Conversation:
    """A rendered conversation.

    Args:
        end_tokens: tokens after which a model stops; white space that the template writes behind one is not learned.
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
        """The text, where a turn stands in it, and how much of what the turn says is not written there."""
        span, pieces = self.span(turn), _pieces(self.messages[turn])
        text = _squeezed(self.text[slice(*span)]) if span else ""
        return self.text, span, sum(piece not in text for piece in pieces) if span else len(pieces) + 1

    def span(self, turn: int) -> Span | None:
        """Where the model writes the turn; None if that cannot be told.

        A turn begins behind the text of the messages before it with the prompt for a generation, and ends where the
        text of the messages up to it ends. Where the template writes these in another way than here, its content is
        looked for.
        """
        if turn in self._blocks:
            start, end = self._blocks[turn]
            return start, end
        begins = self._start(turn)
        ends = None if begins is None else self._end(turn, begins)
        if begins is None or ends is None or ends < begins:
            return None
        body = self.text[begins:ends].rstrip()
        return begins, begins + len(body) if body.endswith(self._end_tokens) else ends

    def _start(self, turn: int) -> int | None:
        before = self.messages[:turn]
        prompts = [self._prompt(before, **thinking) for thinking in ({}, THINKING, NO_THINKING)]
        for prompt in prompts:
            if prompt is not None and self.text.startswith(prompt):
                return len(prompt)
        content = self._place(turn, at_end=False)
        # The prompt may open a block for reasoning that this turn does not have: it begins where they part.
        if prompts[0] is not None and (parted := self._parted(prompts[0], before, content)) is not None:
            return parted
        # The messages before are written in another way here: what stands before the turn is as where it is the last,
        # or what a prompt adds to a question.
        if content is not None:
            for opening, is_written in [*self._opening_as_last(turn), *self._openings()]:
                if opening and self.text[:content].endswith(opening):
                    return content - is_written
        return None

    def _parted(self, prompt: str, before: list[Message], content: int | None) -> int | None:
        """Where a turn begins in which the prompt goes on in another way than the text."""
        place = _common(prompt, self.text)
        if content is not None:
            return content if place >= content else None
        # A call of a tool, without a text. The two part at a token, of which both may have the first letters.
        starts = [prompt.rfind(token, 0, place + len(token)) for token in self._end_tokens]
        starts = [at for at, token in zip(starts, self._end_tokens, strict=True) if at <= place < at + len(token)]
        head = self._prompt(before, add_generation_prompt=False)
        known = head is not None and self.text.startswith(head) and len(head) < min(starts, default=0)
        return min(starts) if known else None

    def _opening_as_last(self, turn: int) -> list[tuple[str, int]]:
        """What is before the content of a turn where the conversation ends with it, as from `_openings`."""
        alone = self.until(turn)
        start = alone._start(turn) if alone is not None else None
        content = alone._place(turn, at_end=False) if alone is not None else None
        if alone is None or start is None or content is None:
            return []
        head = max((alone.text.rfind(token, 0, start) for token in self._end_tokens), default=-1)
        return [(alone.text[max(head, 0) : content], content - start)]

    def _openings(self) -> list[tuple[str, int]]:
        """What the prompts for a generation add, and how many characters of it the model would write by default."""
        question = [{"role": "user", "content": "a"}]
        asked, thinking, direct = (
            self._prompt(question, add_generation_prompt=False),
            self._prompt(question),
            self._prompt(question, **NO_THINKING),
        )
        if asked is None or thinking is None or direct is None:
            return []
        own, other = (prompt[_common(asked, prompt) :] for prompt in (thinking, direct))
        tokens = [own.find(token, 1) for token in self._end_tokens]  # one of them may open a block for reasoning
        shorter = [(own[:place], 0) for place in tokens if place > 0]
        return [(other, len(other) - len(own) if other.startswith(own) else 0), (own, 0), *shorter]

    def _end(self, turn: int, start: int) -> int | None:
        if turn + 1 == len(self.messages):
            return len(self.text)
        text = self._render(self.messages[: turn + 1])[0]
        if self.text.startswith(text):
            return len(text)
        # As the last turn it has a block for reasoning, say, that it does not have here: the rest is the same.
        rest = _shared(text[start:], self.text[start:]) if text.startswith(self.text[:start]) else ""
        if rest.rstrip().endswith(self._end_tokens):
            return start + len(rest)
        content = self._place(turn)
        if content is not None and content <= start + len(rest):
            return start + len(rest)
        if content is None or self.messages[turn].get("tool_calls"):
            return None
        return self._behind_end_token(turn, content)

    def _behind_end_token(self, turn: int, place: int) -> int:
        """The end of a turn whose content ends at `place`: behind the token that ends it, if there is one."""
        rest = self.text[place:].lstrip()
        token = next((token for token in self._end_tokens if rest.startswith(token)), "")
        if not token:
            return place
        behind = self.text.index(token, place) + len(token)
        alone = self.until(turn) or self
        content = alone._place(turn)
        if content is not None and alone.text[content:].lstrip().startswith(token):
            return behind
        # The last turn of a conversation ends in another way. Here it is an end if the next turn has a beginning too.
        following = self._place(turn + 1, at_end=False)
        opening = self.text[behind:following] if following is not None else ""
        return behind if any(other in opening for other in self._end_tokens) else place

    def _place(self, turn: int, *, at_end: bool = True) -> int | None:
        """Where the content of a turn begins or ends in the text, found by a mark in it; None if it cannot be told."""
        content = str(self.messages[turn].get("content") or "")
        if not content.strip():
            return None
        if at_end:
            return self._marked(turn, len(content.rstrip()))
        for begins in (0, content.rfind(ENDS) + len(ENDS)):
            inside = len(content) - len(content[begins:].lstrip())
            if (place := self._marked(turn, inside)) is not None:
                blank = content[begins:inside]
                return place - len(blank) if self.text[:place].endswith(blank) else place
        return None

    def _marked(self, turn: int, inside: int) -> int | None:
        """The place in the text of a place in a turn's content."""
        content = str(self.messages[turn]["content"])
        marked = {**self.messages[turn], "content": content[:inside] + MARK + content[inside:]}
        text = self._render([*self.messages[:turn], marked, *self.messages[turn + 1 :]])[0]
        return text.index(MARK) if MARK in text and text.replace(MARK, "") == self.text else None

    def _prompt(self, messages: list[Message], *, add_generation_prompt: bool = True, **variables: bool) -> str | None:
        try:
            return self._render(messages, add_generation_prompt=add_generation_prompt, **variables)[0]
        except Exception:  # a template can raise anything, and many do where there is no message
            return None


def _shared(first: str, second: str) -> str:
    """The longest end of one text, of a few characters at least, with which the other begins."""
    longest, last = "", first[-4:]
    place = second.find(last) if first else -1
    while 0 <= place <= len(first) - len(last):
        if first.endswith(beginning := second[: place + len(last)]):
            longest = beginning
        place = second.find(last, place + 1)
    return longest


def _common(first: str, second: str) -> int:
    """The length of what both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


def learned_rows(
    whole: Conversation, turns: Sequence[int], *, apart: bool
) -> tuple[list[tuple[str, list[Span]]], int, bool]:
    """The conversation with the spans of these turns, and turns that are rows of their own.

    A turn is in a row of its own, which ends with it, where the template writes it in another way when others follow:
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
                f"turn {turn + 1}: the chat template writes this turn in another way than its prompt begins it, so "
                "what is learned cannot be told. Use another with --prompt_template, or --learn all"
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
