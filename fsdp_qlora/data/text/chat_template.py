"""Chats become text through the tokenizer's chat template, which a process of its own fills.

A template comes with the model, from strangers. transformers renders it in jinja2's sandbox, which keeps it from
reading and writing, but bounds neither its time nor its memory: the kernel does, in the worker. Its time is that of the
processor, so a pause or a busy machine costs no chat.
"""

import contextlib
import copy
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp_qlora.data.content import ENDED_WORKERS, BadRow, Chat, Segment, texts_of
from fsdp_qlora.distributed.supervision.clock import Worker, limit_memory
from fsdp_qlora.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
Render = Callable[..., tuple[str, Sequence[Span]]]
"""(messages, add_generation_prompt=False) -> the text, and what the template marks as generated."""

SECONDS_PER_CHAT = 10  # of the processor
MEMORY_BYTES = 2 * 2**30  # besides what the process has when it is ready
_ANSWER_SECONDS = 120.0  # also for the start of a process on a busy machine; one that is stopped never answers
_MOST_KILLS = 3  # in a row: then the template is at fault, not a chat
_CURE = (
    "Give another with --prompt_template: chatml, user_assistant, or the path of a .jinja file; or use a model whose "
    "tokenizer has one, such as an instruct model."
)


class TemplateWorker(Worker):
    """A process that fills chat templates. It starts with the first chat, and again when it has ended."""

    def __init__(self) -> None:
        super().__init__(__name__, _ANSWER_SECONDS)
        self._kills = 0  # in a row

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Let the process `answer` a request.

        Raises:
            BadRow: it is no JSON, takes too long, or has ended two processes.
            UserError: several one after the other take too long.
        """
        try:
            line = f"{SECONDS_PER_CHAT} {json.dumps(request)}"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(f"tools or messages contain values that JSON cannot represent ({error})") from error
        for _ in range(2):  # the kernel, or a person, may have ended the first process
            reply, status = self._exchange(line)
            if reply:
                self._kills = 0
                return dict(json.loads(reply))
            if status == -signal.SIGPROF:
                break
        else:
            raise BadRow(f"{ENDED_WORKERS}, the last by signal {-status}")
        self._kills += 1
        reason = f"did not end within {SECONDS_PER_CHAT} s for it"
        if self._kills == _MOST_KILLS:
            raise UserError(f"The chat template {reason}, as for {_MOST_KILLS - 1} chats before. {_CURE}")
        raise BadRow(f"the chat template {reason}")


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
        weights = chat.weights or (None,) * len(chat.messages)
        if learn == "all":  # then the turns are those of other weights
            turns = [turn for turn in Chat(chat.messages).learned_turns("assistant") if weights[turn] not in (None, 1)]
        elif not turns:
            raise BadRow("no assistant turn has a weight above 0, so nothing to learn")
        reply = self._ask(worker, chat, turns=turns, apart=learn != "all")
        rows = [_split(text, spans, weights, outside=learn == "all") for text, spans in reply["rows"]]
        return rows, tuple(reply["notes"])

    def text(self, chat: Chat, worker: TemplateWorker, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises as `fill` does."""
        return str(self._ask(worker, chat, add_generation_prompt=add_generation_prompt)["text"])

    def _ask(self, worker: TemplateWorker, chat: Chat, **request: object) -> dict[str, Any]:
        try:
            template = self._template or self._tokenizer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise UserError(f"The model's tokenizer has no chat template. {_CURE}") from error
        request |= {"template": template, "messages": chat.messages, "tools": chat.tools}
        reply = worker.ask({**request, "variables": self._variables, "end_tokens": self._end_tokens})
        if "error" in reply:
            raise BadRow(reply["error"])
        if "fatal" in reply:
            raise UserError(f"The chat template cannot be used: {reply['fatal']}. {_CURE}")
        return reply


def _split(text: str, spans: list[list[int]], weights: Sequence[float | None], *, outside: bool) -> list[Segment]:
    """The text in segments. spans: (start, end, turn). outside: whether other text is learned."""
    segments, position = [], 0
    for start, end, turn in sorted(spans):
        inside = weight if isinstance(weight := weights[turn], float) else weight != 0
        segments += [Segment(text[position:start], outside), Segment(text[start:end], inside)]
        position = end
    segments.append(Segment(text[position:], outside))
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
    """{"rows": [(text, spans)], "notes"} or {"text"}; or {"error"}, or {"fatal"} for what every row would meet."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages = request["template"], request["messages"]
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    has_blocks = bool(_GENERATION.search(template))
    fill = partial(render_jinja_template, tools=request["tools"], chat_template=template, **request["variables"])

    def render(part: list[Message], add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        texts, blocks = fill(
            [part], add_generation_prompt=add_generation_prompt, return_assistant_tokens_mask=has_blocks
        )
        return texts[0], blocks[0] if has_blocks else []

    try:
        if "turns" not in request:
            return {"text": render(messages, request["add_generation_prompt"])[0]}
        whole = _write(render, messages, request["end_tokens"])
        rows, notes = learned_rows(whole, request["turns"], apart=request["apart"])
        return {"rows": rows, "notes": [*left_out(whole.messages, request["tools"], whole.text), *notes]}
    except BadRow as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"fatal": f"it is not valid (line {error.lineno}: {error.message})"}
    except RecursionError:
        return {"error": "nested too deeply for a chat template"}
    except MemoryError:
        return {"error": f"the chat template takes more than {MEMORY_BYTES >> 30} GiB of memory for it"}
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return {"error": f"the chat template refuses it: {reason} (--prompt_template takes another)"}


def work() -> None:
    """Answer requests: each line of stdin is one, each line of stdout its answer, both JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401  before the limits

    # The signal's default action ends the process, also within one endless operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin:
        seconds, _, request = line.partition(" ")
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        try:
            reply = answer(json.loads(request))
        except (RecursionError, MemoryError):
            reply = {"error": "too large or nested too deeply for a chat template"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


# --- the assistant's turns in a rendered conversation, found by rendering parts of it ---

BEGINS, ENDS = "<think>", "</think>"  # of reasoning within a content, which a template may leave out
REASONING = ("reasoning_content", "reasoning", "thinking")


class Conversation:
    """A rendered conversation.

    Args:
        end_tokens: tokens after which a model stops; white space that the template writes after one is not learned.
    """

    def __init__(self, render: Render, messages: list[Message], end_tokens: Sequence[str]) -> None:
        self._render, self.messages = render, messages
        self._end_tokens = tuple(sorted(end_tokens, key=len, reverse=True))
        self.text, blocks = render(messages)
        speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        self._blocks = dict(zip(speakers, blocks, strict=True)) if len(blocks) == len(speakers) else {}

    def places(self, turn: int) -> list[tuple[str, Span]]:
        """The texts that have a turn as the model writes it, and its place in each.

        A turn begins after the generation prompt, and ends where the conversation that ends with it ends. That
        conversation is the last of the texts. This one precedes it if it begins with the prompt and continues with
        the turn, perhaps without the reasoning or the tokens that only a last turn has.
        """
        is_last = turn + 1 == len(self.messages)
        alone = self if is_last else Conversation(self._render, self.messages[: turn + 1], self._end_tokens)
        if turn in self._blocks:
            both = dict.fromkeys((self, alone))
            return [(chat.text, chat._blocks[turn]) for chat in both if turn in chat._blocks]
        prompts = self._prompts(turn)
        here, there = (
            next((len(prompt) for prompt in prompts if chat.text.startswith(prompt)), None) for chat in (self, alone)
        )
        if there is None:
            return []
        bodies = {} if is_last or here is None else {self.text: (here, self._in_full_chat(alone.text[there:], here))}
        bodies[alone.text] = there, alone.text[there:]
        return [
            (text, (start, start + len(body.rstrip() if self._without_end(body) else body)))
            for text, (start, body) in bodies.items()
            if body
        ]

    def _prompts(self, turn: int) -> list[str]:
        """The text before a turn, which ends with the generation prompt, also without the reasoning that it opens."""
        before = self.messages[:turn]
        prompt, history = self._try(before, add_generation_prompt=True), self._try(before) or ""
        if prompt is None and not any(message["role"] in ("user", "assistant") for message in before):
            # The assistant begins, and the template wants a question: its prompt is as after one.
            question = [{"role": "user", "content": "a"}]
            history = self._try(question) or ""
            opening = (self._try(question, add_generation_prompt=True) or "").removeprefix(history).partition(BEGINS)[0]
            start, separator, _ = self.text.partition(opening) if opening else ("", "", "")
            return [start + separator] * bool(separator)
        if prompt is None:
            return []
        opened = prompt.find(BEGINS, len(history))
        return [prompt] if opened < 0 else [prompt, prompt[:opened]]

    def _try(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._render(messages, add_generation_prompt)[0]
        except Exception:  # a template can raise anything, and many do where there is no message
            return None

    def _in_full_chat(self, body: str, start: int) -> str:
        """A turn as it is in this text from a place on, where others follow it; "" if it is another."""
        while True:
            for written in (body, answer := body.rpartition(ENDS)[2], answer.lstrip()):
                if self.text.startswith(written, start):
                    return written
            body = self._without_end(body)
            if not self._without_end(body):
                return ""

    def _without_end(self, body: str) -> str:
        """A text without the end token at its end; "" if there is none."""
        token = next(filter(body.rstrip().endswith, self._end_tokens), "")
        return body.rstrip().removesuffix(token) if token else ""


def learned_rows(
    whole: Conversation, turns: Sequence[int], *, apart: bool
) -> tuple[list[tuple[str, list[tuple[int, int, int]]]], list[str]]:
    """The conversation with the spans of these turns, and turns that are rows of their own.

    A turn is in a row of its own, which ends with it, if the template renders it differently when others follow:
    without its reasoning, as a rule. So it is learned as the model writes it.

    Args:
        apart: whether turns may become rows of their own.
    Returns:
        (text, spans and their turns) of each row, and notes.
    Raises:
        BadRow: a turn cannot be found, or the template does not write it.
    """
    rows: list[tuple[str, list[tuple[int, int, int]]]] = []
    spans: list[tuple[int, int, int]] = []
    notes = []
    for turn in turns:
        message = whole.messages[turn]
        places = [place for place in whole.places(turn) if apart or place[0] == whole.text]
        if not places:
            raise BadRow(
                f"turn {turn + 1}: the rendered turn does not start with the generation prompt, so what is learned "
                "of it is unknown. Use another chat template with --prompt_template, or --learn all"
            )
        missing = [_num_missing(message, text[slice(*span)]) for text, span in places]
        text, span = places[missing.index(min(missing))]
        _check_written(turn, message, text[slice(*span)])
        notes += [CUT] * (min(missing) > 0)
        if text == whole.text:
            spans.append((*span, turn))
        else:
            rows.append((text, [(*span, turn)]))
    notes += [APART] * bool(rows)
    return rows + ([(whole.text, spans)] if spans or not rows else []), list(dict.fromkeys(notes))


def _num_missing(message: Message, text: str) -> int:
    """How much of what a turn says a text lacks: its content, its reasoning, its calls."""
    content = "".join(texts_of(message)).lstrip().removeprefix(BEGINS)  # that may be in the prompt
    pieces = [content, *(str(message.get(name) or "") for name in REASONING)]
    pieces += [call["function"]["name"] for call in message.get("tool_calls") or []]
    return sum(_squeezed(piece) not in _squeezed(text) for piece in pieces)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _check_written(turn: int, message: Message, written: str) -> None:
    """Raise BadRow where a template writes nothing of what is to be learned."""
    words = "".join(texts_of(message)).rpartition(ENDS)[2].split()
    if words and words[-1] not in written:
        raise BadRow(f"turn {turn + 1}: the chat template does not write the text of this turn")
    for call in message.get("tool_calls") or []:
        if call["function"]["name"] not in written:
            raise BadRow(f"turn {turn + 1}: the chat template writes no tool calls; --prompt_template takes another")


def left_out(messages: list[Message], tools: list[dict[str, Any]] | None, text: str) -> list[str]:
    """Notes on what a template leaves out of a conversation besides the assistant's turns."""
    written = _squeezed(text)
    roles = dict.fromkeys(
        message["role"]
        for message in messages
        if message["role"] in ("system", "developer", "user")
        and any(_squeezed(text) not in written for text in texts_of(message))
    )
    functions = [tool.get("function", tool) for tool in tools or []]
    names = [tool["name"] for tool in functions if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    lost_tools = ["tools"] if names and not any(name in text for name in names) else []
    return [LEFT_OUT.format(what) for what in [*roles, *lost_tools]]


def _write(render: Render, messages: list[Message], end_tokens: Sequence[str]) -> Conversation:
    """A conversation. Some templates want a content in each message that calls tools, or their arguments as text."""
    import jinja2

    with_content = [{"content": "", **message} for message in messages]
    as_text = [copy.deepcopy(way) for way in (messages, with_content)]
    for call in (call for variant in as_text for message in variant for call in message.get("tool_calls") or []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    for way in (messages, with_content, *as_text) if any("tool_calls" in message for message in messages) else ():
        with contextlib.suppress(TypeError, jinja2.UndefinedError):
            return Conversation(render, way, end_tokens)
    return Conversation(render, messages, end_tokens)
