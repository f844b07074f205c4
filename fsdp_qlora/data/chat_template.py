"""Chats become text through the tokenizer's chat template, which a process of its own fills.

A template comes with the model, from strangers. transformers renders it in jinja2's sandbox, which keeps
it from reading and writing, but bounds neither its time nor its memory: the kernel does, in the worker. It is no
`ProcessPoolExecutor`: that one imports the main module again (a script without a guard would train in each worker) and
modules of the current folder, and does not end a call that takes too long.
"""

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_qlora.data.rows import BadRow, Chat, Segment
from fsdp_qlora.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[..., tuple[str, Sequence[Span]]]
"""(messages, add_generation_prompt=False, **variables) -> the text, and what the template marks as generated."""

SECONDS_PER_CHAT = 10
MEMORY_BYTES = 2 * 2**30  # besides what the process has when it is ready
_MOST_KILLS = 3  # in a row: then the template is at fault, not a chat
_ROOT = str(Path(__file__).resolve().parents[2])
# Not -m, and without "" on the path: both would import modules of the current folder.
_COMMAND = f"import sys; sys.path[:] = [{_ROOT!r}, *filter(None, sys.path)]; from {__name__} import work; work()"
_CURE = (
    "Give another with --prompt_template: chatml, user_assistant, or the path of a .jinja file; or use a model whose "
    "tokenizer has one, such as an instruct model."
)


class TemplateWorker:
    """A process that fills chat templates. It starts with the first chat, and again after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._kills = 0  # in a row

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What `answer` returns for a request.

        Raises:
            BadRow: it ended the process, or is no JSON.
                UserError: several one after the other did.
        """
        try:
            line = json.dumps({**request, "seconds": SECONDS_PER_CHAT})
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(f"tools or messages contain values that JSON cannot represent ({error})") from error
        if self._process is None:
            command = [sys.executable, "-c", _COMMAND]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process, reply = self._process, ""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        if reply:
            self._kills = 0
            return dict(json.loads(reply))
        self.close()
        self._kills += 1
        reason = f"did not end within {SECONDS_PER_CHAT} s for it (its process ended with {process.returncode})"
        if self._kills == _MOST_KILLS:
            raise UserError(f"The chat template {reason}, as for {_MOST_KILLS - 1} chats before. {_CURE}")
        raise BadRow(f"the chat template {reason}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


class ChatTemplate:
    """The chat template of a tokenizer, or one that replaces it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._end_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def fill(self, chat: Chat, worker: TemplateWorker, *, learn: str) -> tuple[list[list[Segment]], tuple[str, ...]]:
        """The text of a chat, and what of it is learned: mostly as one row. And notes on it.

        Turns that the template renders differently when others follow are rows of their own, which end with them.

        Args:
            learn: "assistant" for the assistant's turns, "last" for the last of them, "all" for all text; without
                those of weight 0.
        Raises:
            BadRow: the template refuses the chat or takes too long or too much memory, or what is learned is
                unknown.
            UserError: there is no template, or it is not valid.
        """
        turns = chat.learned_turns(learn)
        if learn == "all":  # then the turns are those that are not learned
            turns = sorted(set(chat.learned_turns("assistant")) ^ set(Chat(chat.messages).learned_turns("assistant")))
        elif not turns:
            raise BadRow("no assistant turn has a weight above 0, so nothing to learn")
        try:
            template = self._template or self._tokenizer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise UserError(f"The model's tokenizer has no chat template. {_CURE}") from error
        request = {"template": template, "messages": chat.messages, "tools": chat.tools, "turns": turns}
        request |= {"apart": learn != "all", "variables": self._variables, "end_tokens": self._end_tokens}
        reply = worker.ask(request)
        if "error" in reply:
            raise BadRow(reply["error"])
        if "fatal" in reply:
            raise UserError(f"The chat template cannot be used: {reply['fatal']}. {_CURE}")
        rows = [_split(text, spans, inside=learn != "all") for text, spans in reply["rows"]]
        return rows, tuple(reply["notes"])


def _split(text: str, spans: list[list[int]], *, inside: bool) -> list[Segment]:
    """The text in segments: what is within the spans is learned, or what is not."""
    segments, position = [], 0
    for start, end in sorted(spans):
        segments += [Segment(text[position:start], not inside), Segment(text[start:end], inside)]
        position = end
    segments.append(Segment(text[position:], not inside))
    return [segment for segment in segments if segment.text]


# --- in the worker ---

# Notes on rows that are used.
APART = "turns that are rows of their own: the chat template renders them differently when other turns follow"
CUT = "the chat template leaves out a part of what the assistant says, such as its reasoning"
LEFT_OUT = "the chat template leaves out what the row has for: {}"

# Llama 3 writes the day into its system prompt. Tokens must be the same tomorrow, or the run could not be resumed.
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"rows": [(text, spans)], "notes"}, or {"error"}, or {"fatal"} for what every row would meet."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages = request["template"], request["messages"]
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    has_blocks = bool(_GENERATION.search(template))
    fill = partial(render_jinja_template, tools=request["tools"], chat_template=template, **request["variables"])

    def render(part: list[Message], *, add_generation_prompt: bool = False, **options: Any) -> tuple[str, list[Span]]:
        texts, blocks = fill(
            [part], add_generation_prompt=add_generation_prompt, return_assistant_tokens_mask=has_blocks, **options
        )
        return texts[0], blocks[0] if has_blocks else []

    try:
        try:
            whole = Conversation(render, messages, request["end_tokens"])
        except TypeError:  # some templates take the arguments of tool calls as text
            messages = with_arguments_as_text(messages)
            whole = Conversation(render, messages, request["end_tokens"])
        rows, num_cut, is_apart = learned_rows(whole, request["turns"], apart=request["apart"])
        notes = [LEFT_OUT.format(what) for what in left_out(messages, request["tools"], whole.text)]
        return {"rows": rows, "notes": [*notes, *[CUT] * bool(num_cut), *[APART] * is_apart]}
    except NotSplit as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"fatal": f"it is not valid (line {error.lineno}: {error.message})"}
    except MemoryError:
        return {"error": f"the chat template takes more than {MEMORY_BYTES >> 30} GiB of memory for it"}
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return {"error": f"the chat template refuses it: {reason} (--prompt_template takes another)"}


def _limit_memory() -> None:
    """Let the process grow by MEMORY_BYTES at most."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    except (OSError, ValueError):  # not Linux, or less is allowed already
        pass


def work() -> None:
    """Answer requests: each line of stdin is one, each line of stdout its answer, both JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401  before the limits

    # The default action of the alarm ends the process, also within one endless operation.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


# --- the assistant's turns in a rendered conversation, found by rendering parts of it ---

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
