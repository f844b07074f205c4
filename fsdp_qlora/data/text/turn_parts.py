"""Finds the parts of an assistant's turn in its text: the reasoning and the calls of tools.

Runs in the worker of chat templates. Reasoning is found by the marks around it, calls by the form
that reads the message's own calls back. White space that a template writes around a part belongs to
the part.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.config.learn import EMPTY_REASONING, REASONING, TOOL_CALLS
from fsdp_qlora.data.content import BadRow, texts_of
from fsdp_qlora.data.text.call_readers import BadCall, NoCall, Types
from fsdp_qlora.data.text.conversation import REASONING as FIELDS
from fsdp_qlora.data.text.conversation import THOUGHTS, Conversation, Message, Span, squeezed
from fsdp_qlora.data.text.harmony import harmony_spans
from fsdp_qlora.data.text.loose_values import BadValue, skip_space
from fsdp_qlora.data.text.tool_calls import BARE, FORMS, Form

MARKS = (*THOUGHTS, ("◁think▷", "◁/think▷"))
_BEGINS_REASONING = re.compile("(?:" + "|".join(re.escape(mark) for mark, _ in MARKS) + r")\s*\S")
# Tokens behind a turn with calls that readers of calls pass over. They are none of the calls.
_BEHIND_CALLS = ("<|eot_id|>", "<|eom_id|>", "<|tool_response>")
_NO_TYPES = Types()
_UNKNOWN = (
    "turn {}: where its {} begins and ends in what the chat template writes is unknown, so "
    "--learn -{} cannot leave it out"
)

_MORE = (
    "turn {}: it has marks of reasoning that are not of blocks where it begins, so --learn -{} "
    "cannot leave its reasoning out"
)
_UNREAD = "a tool call in its text cannot be read{}, so --learn -{} cannot leave it out"
# An object of JSON without marks is an answer.
_MARKED = [form for form in FORMS if form.read and form.name != BARE]
_BEGINS_CALL = re.compile("|".join(f"(?:{form.begins.pattern})" for form in _MARKED))


class ReadOnly(NamedTuple):
    """The parts of a turn that are only read."""

    spans: list[Span]
    """Their places in the text, in order."""
    has_empty: bool = False
    """Whether an empty block for reasoning is among them."""


class Turn(NamedTuple):
    """A turn of the assistant, and its place in a text that the template has written."""

    number: int
    """The place among the messages."""
    message: Message
    text: str
    span: Span

    @property
    def body(self) -> str:
        """The turn's own text."""
        return self.text[slice(*self.span)]


def find_read_only(whole: Conversation, turn: Turn, parts: Collection[str]) -> ReadOnly:
    """The places of these parts of a turn.

    Args:
        parts: of `Learn.read_only`.
    Raises:
        BadRow: the template has written a part whose place is unknown.
    """
    spans: list[Span] = []
    has_empty = False
    if REASONING in parts or EMPTY_REASONING in parts:
        blocks = _reasoning(whole, turn)
        has_empty = EMPTY_REASONING in parts and not all(block.words for block in blocks)
        left_out = [block for block in blocks if REASONING in parts or not block.words]
        spans += [(block.start, block.end) for block in left_out]
        if REASONING in parts and _misses_reasoning(whole, turn, blocks):
            raise BadRow(_UNKNOWN.format(turn.number + 1, "reasoning", REASONING))
    if TOOL_CALLS in parts:
        is_apart = turn.message.get("tool_calls")
        spans += _calls(whole, turn) if is_apart else _calls_among_words(whole, turn)
    if REASONING in parts and has_reasoning(_without(turn.body, spans)):
        raise BadRow(_MORE.format(turn.number + 1, REASONING))
    start = turn.span[0]
    return ReadOnly([(first + start, end + start) for first, end in sorted(spans)], has_empty)


def _without(text: str, spans: Sequence[Span]) -> str:
    """A text without its parts."""
    pieces = []
    place = 0
    for first, last in sorted(spans):
        pieces.append(text[place:first])
        place = max(place, last)
    return "\n".join([*pieces, text[place:]])


# --- reasoning ---


def leading_block(text: str, before: str) -> tuple[int, str] | None:
    """The block of reasoning with which a text begins that is no chat; None if it has none.

    Args:
        before: the text in front of it, which may open the block.
    Returns:
        Where the block ends, with white space behind it, and its words.
    """
    for marks in MARKS:
        block = _block(text, "", marks, is_opened=before.rstrip().endswith(marks[0]))
        if block:
            return skip_space(text, block.end), block.words
    return None


def has_end_of_reasoning(text: str) -> bool:
    """Whether a text has a mark that ends reasoning."""
    return any(ends in text for _, ends in MARKS)


def has_reasoning(text: str) -> bool:
    """Whether a text has a mark that ends reasoning, or one that begins it and words behind."""
    return has_end_of_reasoning(text) or _BEGINS_REASONING.search(text) is not None


class _Block(NamedTuple):
    """A block of reasoning: its place in a turn's own text, and the words between its marks."""

    start: int
    end: int
    words: str


def _reasoning(whole: Conversation, turn: Turn) -> list[_Block]:
    """The blocks of reasoning in a turn."""
    body = turn.body
    messages = harmony_spans(body)
    if messages:
        analyses = [message for message in messages if message.is_reasoning]
        return [_Block(*message.span, message.words(body)) for message in analyses]
    thought = _thought_of(turn.message)
    before = turn.text[: turn.span[0]].rstrip()
    blocks: list[_Block] = []
    for marks in MARKS:
        block = _block(body, thought, marks, is_opened=before.endswith(marks[0]))
        while block:
            blocks.append(block._replace(end=_behind_space(whole, turn, block.end)))
            end = blocks[-1].end
            # A template may write a block in front of one that the message's content has.
            is_other = not block.words and thought
            is_next = is_other or body.startswith(marks[0], skip_space(body, end))
            block = _block(body, thought, marks, end) if is_next else None
        if blocks:
            break
    return blocks


def _thought_of(message: Message) -> str:
    """The words of a message's reasoning; "" if it has none."""
    for name in FIELDS:
        if message.get(name):
            return str(message[name]).strip()
    content = message.get("content") or []
    if not isinstance(content, str):
        return "".join(str(part["thinking"]) for part in content if "thinking" in part).strip()
    for begins, ends in MARKS:
        head, found, _ = content.partition(ends)
        # Without the first mark it is the answer that speaks of the last one.
        if found and head.lstrip().startswith(begins):
            return head.strip().removeprefix(begins).strip()
    return ""


def _block(
    body: str, thought: str, marks: tuple[str, str], start: int = 0, *, is_opened: bool = False
) -> _Block | None:
    """The block of reasoning in a turn's text from a place on.

    is_opened: whether the text in front of the turn has its first mark.
    """
    begins, ends = marks
    first = skip_space(body, start)
    begins_within = is_opened or body.startswith(ends, first)
    begins_within = begins_within or bool(thought and body.startswith(thought, first))
    if body.startswith(begins, first):
        inner = first + len(begins)
    elif start == 0 and begins_within:
        # The first mark is in the prompt, or the text has none.
        inner = 0
    else:
        # Behind something else: by the words that it has.
        known = re.compile(re.escape(begins) + r"\s*" + re.escape(thought))
        found = known.search(body, start) if thought else None
        if not found:
            return None
        start = found.start()
        inner = start + len(begins)
    # The words may have the last mark among them.
    words_begin = skip_space(body, inner)
    skipped = len(thought) if body.startswith(thought, words_begin) else 0
    last = body.find(ends, words_begin + skipped)
    if last < 0:
        return None
    return _Block(start, last + len(ends), body[inner:last].strip())


def _behind_space(whole: Conversation, turn: Turn, place: int) -> int:
    """The place behind the white space that the template writes after a block."""
    texts = texts_of(turn.message)
    space = turn.body[place : skip_space(turn.body, place)]
    if not space or has_end_of_reasoning("".join(texts)):
        return place + len(space)
    # White space with which the answer itself begins is the answer's, if the template keeps it.
    first = texts[0] if texts else ""
    own = first[: len(first) - len(first.lstrip())]
    if own and not _is_kept(whole, turn, first):
        own = ""
    return place + len(space.removesuffix(own))


def _is_kept(whole: Conversation, turn: Turn, text: str) -> bool:
    """Whether the template writes the white space with which a text of the turn begins."""
    content = _replaced(turn.message["content"], text, text.lstrip())
    return whole.is_changed(turn.text, turn.number, turn.message | {"content": content})


def _misses_reasoning(whole: Conversation, turn: Turn, blocks: Sequence[_Block]) -> bool:
    """Whether the text has the reasoning of the message, but in none of the blocks.

    It has it if it changes when the reasoning has other words.
    """
    thought = _thought_of(turn.message)
    if not thought or any(squeezed(thought) in squeezed(block.words) for block in blocks):
        return False
    other = _replaced(turn.message, thought, f"{thought} {thought}")
    return whole.is_changed(turn.text, turn.number, other)


def _replaced(value: Any, old: str, new: str) -> Any:
    """A value with another text in the first place that each of its texts has it."""
    if isinstance(value, str):
        return value.replace(old, new, 1)
    if isinstance(value, dict):
        return {
            name: inner if name == "tool_calls" else _replaced(inner, old, new)
            for name, inner in value.items()
        }
    return [_replaced(inner, old, new) for inner in value] if isinstance(value, list) else value


# --- calls of tools ---


def _calls(whole: Conversation, turn: Turn) -> list[Span]:
    """The places of the message's calls in the turn's own text. Raises BadRow."""
    calls = turn.message["tool_calls"]
    names = [call["function"]["name"] for call in calls]
    body = turn.body
    messages = [message for message in harmony_spans(body) if message.function]
    if messages and [message.function for message in messages] == names:
        return [message.span for message in messages]
    # Kimi's templates write the ids of calls, which are made of their names as a rule.
    ids = [str(call.get("id")).removeprefix("functions.").partition(":")[0] for call in calls]
    found = _read_calls(whole, turn, (names, ids)) or _by_difference(whole, turn, names)
    if found is None:
        raise BadRow(_UNKNOWN.format(turn.number + 1, "tool calls", TOOL_CALLS))
    return [_with_space(whole, turn, found)]


def _calls_among_words(whole: Conversation, turn: Turn) -> list[Span]:
    """The places of calls that a message has as text, between marks. Raises BadRow."""
    blocks = _reasoning(whole, turn)
    try:
        return calls_in_text(turn.body, blocks[-1].end if blocks else 0)
    except BadRow as error:
        raise BadRow(f"turn {turn.number + 1}: {error}") from None


def calls_in_text(text: str, start: int = 0) -> list[Span]:
    """The places of calls that a text has between marks, from a place on.

    Raises:
        BadRow: the marks of a call are there, but what they begin cannot be read.
    """
    messages = [message.span for message in harmony_spans(text) if message.function]
    if messages:
        return messages
    spans: list[Span] = []
    place = start
    begins = _BEGINS_CALL.search(text, place)
    while begins:
        place = _end_of_call(text, begins.start())
        is_next = spans and not text[spans[-1][1] : begins.start()].strip()
        # White space between two calls belongs to them.
        first = spans.pop()[0] if is_next else begins.start()
        spans.append((first, place))
        begins = _BEGINS_CALL.search(text, place)
    return [(first, _end_of_calls(text, last)) for first, last in spans]


def _end_of_call(text: str, place: int) -> int:
    """Where the call ends that begins at a place, in the first form that reads it.

    Raises:
        BadRow: none does.
    """
    reasons: list[str] = []
    for form in _MARKED:
        if not form.begins.match(text, place):
            continue
        assert form.read is not None
        try:
            return form.read(text, place, _NO_TYPES)[1]
        except (BadCall, BadValue) as error:
            reasons.append(f" ({error})")
    raise BadRow(_UNREAD.format("".join(reasons[:1]), TOOL_CALLS))


def _end_of_calls(text: str, end: int) -> int:
    """The place behind calls without what readers pass over."""
    calls = text[:end].rstrip()
    for token in _BEHIND_CALLS:
        calls = calls.removesuffix(token)
    return len(calls)


def _read_calls(whole: Conversation, turn: Turn, all_names: Collection[list[str]]) -> Span | None:
    """The place of calls with one of these lists of names, by the form that reads them."""
    body = turn.body
    blocks = _reasoning(whole, turn)
    start = blocks[-1].end if blocks else 0
    # A form may want to end where the turn does, before its end token.
    within = whole.without_end(body)
    end_token = squeezed(body[len(within) :]) if within else ""
    # Some templates write the words of a turn behind its calls.
    words = squeezed("".join(texts_of(turn.message)))
    rests = ("", end_token, words, words + end_token)
    for text in (body[start:], within[start:]):
        for form in FORMS:
            span = _span_of_calls(text, form, all_names, rests)
            if span:
                first, last = span
                return first + start, last + start
    return None


def _span_of_calls(
    text: str, form: Form, all_names: Collection[list[str]], rests: Collection[str]
) -> Span | None:
    """The place of the first calls with one of these rests of the text behind them."""
    # Words before the calls, and arguments, may have some as an example.
    for begins in form.begins.finditer(text) if form.read else ():
        try:
            found, end = _read_from(text, begins.start(), form)
        except (BadCall, BadValue, NoCall):
            continue
        if found in all_names and squeezed(text[end:]) in rests:
            return begins.start(), _end_of_calls(text, end)
    return None


def _read_from(text: str, place: int, form: Form) -> tuple[list[str], int]:
    """The names of the calls from a place on, and where they end."""
    assert form.read is not None
    names: list[str] = []
    while True:
        calls, end = form.read(text, place, _NO_TYPES)
        names += [call.name for call in calls]
        place = skip_space(text, end)
        if not form.begins.match(text, place):
            return names, end


def _by_difference(whole: Conversation, turn: Turn, names: Sequence[str]) -> Span | None:
    """The place of calls in a form that is not known: the turn without them lacks it."""
    calls = whole.text_of_calls(turn.number)
    if not calls or turn.body.count(calls) != 1 or any(name not in calls for name in names):
        return None
    first = turn.body.index(calls)
    last = first + len(calls)
    # A template may write words and reasoning in another way, too, where there are no calls.
    others = [*texts_of(turn.message), _thought_of(turn.message)]
    rest = squeezed(turn.body[:first] + turn.body[last:])
    said = [squeezed(text) for text in others if squeezed(text) in squeezed(turn.body)]
    return (first, last) if all(text in rest for text in said) else None


def _with_space(whole: Conversation, turn: Turn, calls: Span) -> Span:
    """The place with the white space that the template writes around the calls."""
    body = turn.body
    content = "".join(texts_of(turn.message))
    first, last = calls
    before = body[:first]
    space = before[len(before.rstrip()) :]
    # White space with which the words themselves end is theirs.
    first -= len(space.removeprefix(content[len(content.rstrip()) :]))
    behind = whole.without_end(body)[last:]
    if behind.isspace():
        last += len(behind)
    return first, last
