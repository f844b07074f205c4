"""Chats become text through the tokenizer's chat template, which a process of its own fills.

A template comes with the model, from strangers. transformers renders it in jinja2's sandbox, which
keeps it from reading and writing, but bounds neither its time nor its memory: the kernel does, in
the worker. Time is counted as processor time, so a pause or a busy machine costs no chat.
"""

import json
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp_qlora.config.learn import Learn
from fsdp_qlora.data.content import ENDED_WORKERS, BadRow, Chat, Segment
from fsdp_qlora.data.text.conversation import Conversation, Message, Span, Tools
from fsdp_qlora.data.text.conversation_forms import readable, written
from fsdp_qlora.data.text.learned_turns import LEFT_OUT, learned_rows, left_out
from fsdp_qlora.data.text.template_kwargs import COLUMN, unused
from fsdp_qlora.distributed.supervision.clock import Worker, limit_memory
from fsdp_qlora.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEMORY_BYTES = 2 * 2**30  # besides what the process has when it is ready
# Of the clock: also for the start of a process on a busy machine; one that is stopped never
# answers.
_ANSWER_SECONDS = 120.0
# A chat of more messages has more time, in proportion: each of its turns is found by filling the
# template up to it.
_USUAL_MESSAGES = 100
_MOST_TIMES = 10
# Usual chats in a row that take too long: then the template is at fault, not a chat.
_MOST_KILLS = 3
_CURE = (
    "Give another with --prompt_template: chatml, user_assistant, or the path of a .jinja file; or "
    "use a model whose tokenizer has one, such as an instruct model."
)


class TemplateWorker(Worker):
    """A process that fills chat templates.

    It starts with the first chat, and again when it has ended.

    seconds_per_chat: the time of the processor that a chat of usual length may take.
    """

    def __init__(self, seconds_per_chat: float = 10) -> None:
        super().__init__(__name__, _ANSWER_SECONDS)
        self.seconds_per_chat = seconds_per_chat
        self._kills = 0  # in a row

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the process `answer` a request.

        Raises:
            BadRow: it is no JSON, takes too long, or has ended two processes.
            UserError: several one after the other take too long.
        """
        num_messages = len(request.get("messages", ()))
        times = min(max(num_messages / _USUAL_MESSAGES, 1), _MOST_TIMES)
        seconds = self.seconds_per_chat * times
        try:
            line = f"{seconds} {json.dumps(request)}"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(
                f"tools or messages contain values that JSON cannot represent ({error})"
            ) from error
        for _ in range(2):  # the kernel, or a person, may have ended the first process
            reply, status = self._exchange(line, _ANSWER_SECONDS * times)
            if reply:
                self._kills = 0
                return dict(json.loads(reply))
            # Its own timer: the same chat would take too long once more.
            if status == -signal.SIGPROF:
                break
        else:
            raise BadRow(f"{ENDED_WORKERS}, the last by signal {-status}")
        reason = f"did not end within {seconds:g} s for it"
        if times > 1:
            raise BadRow(
                f"the chat template {reason}, which has {num_messages} messages: --learn final and "
                "--learn last have fewer turns to find"
            )
        self._kills += 1
        if self._kills == _MOST_KILLS:
            raise UserError(
                f"The chat template {reason}, as for {_MOST_KILLS - 1} chats before. {_CURE}"
            )
        raise BadRow(f"the chat template {reason}")


class ChatTemplate:
    """The chat template of a tokenizer, or one that replaces it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._end_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def fill(
        self, chat: Chat, worker: TemplateWorker, *, learn: Learn
    ) -> tuple[list[list[Segment]], tuple[str, ...]]:
        """The text of a chat, and what of it is learned: mostly as one row. And notes on it.

        Turns that the template renders differently when others follow are rows of their own, which
        end with them.

        Args:
            learn: the turns that are learned, and what of them is only read. Turns of weight 0 are
                only read.
        Raises:
            BadRow: the template refuses the chat or takes too long or too much memory, or what is
                learned, or only read, is unknown.
            UserError: there is no template, or it is not valid.
        """
        turns = chat.learned_turns(learn.turns)
        weights = chat.weights or (None,) * len(chat.messages)
        is_all = learn.turns == "all"
        if is_all:
            # All text is learned, so only turns have to be found whose weight is another one, or of
            # which a part is only read.
            turns = Chat(chat.messages).learned_turns("assistant")
            if not learn.read_only:
                turns = [turn for turn in turns if weights[turn] not in (None, 1)]
        elif not turns:
            behind = " behind the last result of a tool" if learn.turns == "final" else ""
            raise BadRow(f"no assistant turn{behind} has a weight above 0, so nothing to learn")
        reply = self._ask(worker, chat, turns=turns, apart=not is_all, read_only=learn.read_only)
        rows = [
            _read_only(_split(text, spans, weights, outside=is_all), read_only)
            for (text, spans), read_only in zip(reply["rows"], reply["read_only"], strict=True)
        ]
        return rows, tuple(reply["notes"])

    def text(
        self, chat: Chat, worker: TemplateWorker, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation. Raises as `fill` does."""
        return str(self._ask(worker, chat, add_generation_prompt=add_generation_prompt)["text"])

    @property
    def source(self) -> str:
        """The text of the template, or of all where the tokenizer has several.

        It is empty if there is none.
        """
        templates = self._template or self._tokenizer.chat_template or ""
        return templates if isinstance(templates, str) else "\n".join(templates.values())

    def variables(self, worker: TemplateWorker) -> set[str]:
        """The names of what the template reads, and a row may set.

        There are none if the template is not valid, which is said when a chat is filled.
        """
        try:
            return set(worker.ask({"variables_of": self.source}).get("names", ()))
        except BadRow:
            return set()

    def _ask(self, worker: TemplateWorker, chat: Chat, **request: object) -> dict[str, Any]:
        # A row could otherwise write special tokens of its own into every turn.
        clash = [name for name in chat.template_kwargs if name in self._variables]
        if clash:
            raise BadRow(f"{COLUMN}: a row cannot set {clash[0]}")
        try:
            template = self._template or self._tokenizer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise UserError(f"The model's tokenizer has no chat template. {_CURE}") from error
        request |= {"template": template, "messages": chat.messages, "tools": chat.tools}
        given = [
            name for name, value in chat.template_kwargs.items() if value not in (None, "", [], {})
        ]
        request |= {"variables": self._variables | dict(chat.template_kwargs), "given": given}
        reply = worker.ask(request | {"end_tokens": self._end_tokens})
        if "error" in reply:
            raise BadRow(reply["error"])
        if "fatal" in reply:
            raise UserError(f"The chat template cannot be used: {reply['fatal']}. {_CURE}")
        return reply


def _split(
    text: str, spans: list[list[int]], weights: Sequence[float | None], *, outside: bool
) -> list[Segment]:
    """The text in segments. spans: (start, end, turn). outside: whether other text is learned."""
    segments = []
    position = 0
    for start, end, turn in sorted(spans):
        # A weight of 0 or 1 is an int, and a mask is enough for it: only others make masks of
        # floats.
        weight = weights[turn]
        inside = weight if isinstance(weight, float) else weight != 0
        segments += [Segment(text[position:start], outside), Segment(text[start:end], inside)]
        position = end
    segments.append(Segment(text[position:], outside))
    return [segment for segment in segments if segment.text]


def _read_only(segments: Iterable[Segment], spans: Iterable[Sequence[int]]) -> list[Segment]:
    """The same segments, with these spans of their text only read."""
    pieces = []
    begin = 0
    for segment in segments:
        end = begin + len(segment.text)
        place = begin
        for first, last in spans:
            start = max(first, place)
            stop = min(last, end)
            if start < stop:
                before = segment.text[place - begin : start - begin]
                inside = segment.text[start - begin : stop - begin]
                pieces += [
                    Segment(before, segment.learned),
                    Segment(inside, learned=False, is_left_out=True),
                ]
                place = stop
        pieces.append(Segment(segment.text[place - begin :], segment.learned))
        begin = end
    return [piece for piece in pieces if piece.text]


# --- in the worker ---

# Llama 3 writes the day into its system prompt. Tokens must be the same tomorrow, or the run could
# not be resumed.
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') "
    "| replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GENERATIONS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # also what ends one


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer with {"rows": [(text, spans)], "read_only": [spans], "notes"}, {"text"} or {"names"};
    or with {"error"}, or {"fatal"} for what every row meets.
    """
    import jinja2

    if "variables_of" in request:
        return {"names": _variables_of(request["variables_of"])}
    try:
        return _filled(request)
    except BadRow as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"fatal": f"it is not valid (line {error.lineno}: {error.message})"}
    except RecursionError:
        return {"error": "nested too deeply for a chat template"}
    except MemoryError:
        return {
            "error": f"the chat template takes more than {MEMORY_BYTES >> 30} GiB of memory for it"
        }
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return {
            "error": f"the chat template refuses it: {reason} (--prompt_template takes another)"
        }


def _filled(request: dict[str, Any]) -> dict[str, Any]:
    """Fill the template of a request. It raises whatever the template does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = request["template"]
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    has_blocks = bool(_GENERATION.search(template))
    fill = partial(render_jinja_template, chat_template=template, **request["variables"])

    def render(
        tools: Tools, part: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, Sequence[Span]]:
        texts, blocks = fill(
            [part],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=has_blocks,
        )
        return texts[0], blocks[0] if has_blocks else []

    def prompt(messages: list[Message], tools: Tools) -> str:
        bound = partial(render, tools)
        return bound(readable(bound, messages), request["add_generation_prompt"])[0]

    def conversation(messages: list[Message], tools: Tools) -> Conversation:
        bound = partial(render, tools)
        return Conversation(bound, readable(bound, messages), request["end_tokens"])

    if "turns" not in request:
        return {"text": written(prompt, request["messages"], request["tools"])}
    whole = written(conversation, request["messages"], request["tools"])
    rows, notes = learned_rows(
        whole,
        request["turns"],
        apart=request["apart"],
        read_only=request.get("read_only", ()),
    )
    lost = [
        *left_out(whole.messages, request["tools"], whole.text),
        *unused(request["given"], template),
    ]
    return {
        "rows": [(row.text, row.spans) for row in rows],
        "read_only": [row.read_only for row in rows],
        "notes": [*map(LEFT_OUT.format, lost), *notes],
    }


def _variables_of(template: str) -> list[str]:
    """The names that a template wants to be given; none if it is not valid.

    It reads them before it sets them. Where it also sets them, it asks whether they are given.
    """
    import jinja2.meta
    from jinja2.nodes import Filter, Name, Test

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATIONS.sub("", template))
        names = jinja2.meta.find_undeclared_variables(tree)
    except (jinja2.TemplateError, RecursionError, MemoryError):
        return []
    asked = {
        node.node for node in tree.find_all((Filter, Test)) if node.name in _ASKS_WHETHER_GIVEN
    }
    asked_names = {node.name for node in asked if isinstance(node, Name)}
    set_names = {node.name for node in tree.find_all(Name) if node.ctx == "store"}
    parameters = {node.name for node in tree.find_all(Name) if node.ctx == "param"}  # of macros
    return sorted(names - (set_names - asked_names) - parameters)


_ASKS_WHETHER_GIVEN = ("defined", "undefined", "default", "d")


def work() -> None:
    """Answer requests: each line of stdin is one, each line of stdout its answer, both JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401  before the limits

    # The signal's default action ends the process, also within one endless operation of jinja2 or
    # of a regular expression, where a handler in Python would never run.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin:
        seconds, _, request = line.partition(" ")
        # Time of the processor, so that a pause or a busy machine costs no chat.
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        try:
            reply = answer(json.loads(request))
        except (RecursionError, MemoryError):
            reply = {"error": "too large or nested too deeply for a chat template"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)
