"""Turns with tools in tokens, as a chat template says: the prompt, calls, and what follows them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.content import TOO_DEEP, BadRow, Chat
from fsdp_qlora.data.text.call_readers import ToolCall
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.conversation import THOUGHTS, Message, Tools
from fsdp_qlora.data.text.tool_calls import FORMS, NO_CALLS, Form, ParsedTurn, parse_turn
from fsdp_qlora.training.generation.control_tokens import ControlTokens, HiddenTexts
from fsdp_qlora.utils.errors import UserError

_CURE = "--prompt_template takes another template, the path of a .jinja file."
_SHOWN = 400  # characters of a template's text in a message

# Calls that a form has to read as they are.
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "digits": {"type": "string", "description": "A text of digits."},
                "count": {"type": "integer", "description": "A number."},
                "ratio": {"type": "number", "description": "A number."},
                "flag": {"type": "boolean", "description": "A switch."},
                "nested": {"type": "object", "description": "An object."},
                "list": {"type": "array", "items": {}, "description": "A list."},
            },
        },
    },
}
_PROBE = ToolCall(
    "probe_tool",
    {
        "text": 'a "quoted" word,\n  líne 2 ☃ {x: [1]}, \\ and <b> & its end',
        "digits": "75001",
        "count": -3,
        "ratio": 0.5,
        "flag": True,
        "nested": {"deep": {"flag": False, "words": ["a, b", "c"]}, "n": 1},
        "list": [1, "two", {"three": 3}],
    },
)
_BARE = ToolCall("probe_tool", {})
_PROBES = ([_PROBE], [_BARE])
_TWO = [_PROBE, ToolCall("probe_tool", {"text": "second"})]
_QUESTION: Message = {"role": "user", "content": "dummy"}
_ANSWER = "probed answer"
_RESULT = "probed result"


class _Ending(NamedTuple):
    """Where a turn of the assistant ends in a conversation that continues."""

    text: str
    """The conversation, with a generation prompt."""
    cut: int
    """The place behind the turn and the token that ends it."""


class ToolTurns:
    """Writes and reads turns with tools as a tokenizer's chat template does.

    Text that tools, environments and rows have never becomes control tokens.

    Args:
        template: a chat template that replaces the tokenizer's.
        template_kwargs: variables of the template, such as enable_thinking.
        worker: fills templates.
        has_tools: whether there are tools. Without, every template will do, and no turn has calls.
    Attributes:
        form: how the model writes its calls.
        writes_tools: whether prompts say which tools there are. Without, a question has to say it.
        calls_together: whether a turn can have several calls.
        end_ids: the tokens that end a turn, with calls and without. A model that does not stop at
            them goes on in the tool's place.
    Raises:
        UserError: the template takes no tools, writes calls in a form that no row of FORMS reads,
            or writes a turn differently when a tool's result follows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        worker: TemplateWorker | None = None,
        *,
        has_tools: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        if template is None and tokenizer.chat_template:
            # Some tokenizers have a template of their own for conversations with tools.
            template = tokenizer.get_chat_template(None, [_TOOL] if has_tools else None)
        self._template = ChatTemplate(tokenizer, template)
        self._kwargs = dict(template_kwargs or {})
        self._worker = worker or TemplateWorker()
        self._control = ControlTokens(tokenizer)
        self._reasons = False
        self.form = NO_CALLS
        self.writes_tools = False
        self.calls_together = False
        try:
            prompt = self._fill([_QUESTION], prompts=True)
            self._opened = _opened_in(prompt)
            source = self._template.source
            self._marks = [marks for marks in THOUGHTS if marks[1] in source]
            self.end_ids = self._ends_of_answers()
            if has_tools:
                self._probe(prompt)
        except BadRow as reason:
            raise UserError(
                f"The chat template cannot be filled for turns with tools: {reason}."
            ) from reason

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation with the generation prompt.

        Args:
            template_kwargs: a row's own variables, besides those of all rows.
        Raises:
            BadRow: the template refuses the conversation.
        """
        kwargs = self._kwargs | dict(template_kwargs or {})
        try:
            hidden = self._control.hidden_in(messages, tools, kwargs)
            conversation = Chat(
                hidden.hide_messages(messages),
                tools and hidden.hide(tools),
                template_kwargs=hidden.hide(kwargs),
            )
        except RecursionError as error:
            raise BadRow(TOO_DEEP) from error
        text = self._template.text(conversation, self._worker, add_generation_prompt=True)
        return hidden.encode(text)

    def parse(self, token_ids: Sequence[int], tools: Tools = None) -> ParsedTurn:
        """The parts of a completion. It raises nothing, whatever the model writes.

        A turn of which one call is malformed has no calls, as TRL has it, and its whole text is the
        content. `problem` then says what is wrong.

        Args:
            token_ids: the completion, with its end token or without.
            tools: whose schemas give types to arguments that are written as text.
        """
        ids = [id_ for id_ in token_ids if 0 <= id_ < len(self._tokenizer)]
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        text = str(
            self._tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        parsed = parse_turn(text, self.form, tools, opened=self._opened, marks=self._marks)
        content = self._without_special(parsed.content)
        return parsed._replace(content=content, reasoning=self._without_special(parsed.reasoning))

    def result_ids(
        self, results: Sequence[tuple[str, str]], completion: Sequence[int] = ()
    ) -> list[int]:
        """The token ids between a completion that calls tools and the next one.

        Args:
            results: the name and the result of each call, in their order.
            completion: the completion's ids. A token that ends it and begins the results, as of
                models that stop where a result begins, is not repeated.
        Raises:
            BadRow: the template refuses the results.
        """
        assert results
        texts = [text for _, text in results]
        names = [name for name, _ in results]
        hidden = self._control.hidden_in(texts, names)
        shown = [*zip(hidden.hide(names), hidden.hide(texts), strict=True)]
        ids = self._following(hidden, self._with_results(shown))
        if completion and ids[:1] == [completion[-1]]:
            return ids[1:]
        return ids

    def user_ids(self, content: str, completion: Sequence[int] = ()) -> list[int]:
        """The token ids between a completion and the next one where a user answers.

        Args and raises as of `result_ids`.
        """
        hidden = self._control.hidden_in(content)
        ids = self._following(hidden, self._with_user(hidden.hide(content)))
        if completion and ids[:1] == [completion[-1]]:
            return ids[1:]
        return ids

    def turn_ids(self, calls: Sequence[ToolCall]) -> list[int]:
        """The token ids of a turn of the assistant, as the template writes it, with its end token.

        calls: that it makes; a turn without any says "...".
        """
        said = _calling(calls) if calls else {"role": "assistant", "content": "..."}
        text = self._behind_prompt(said, self._fill([_QUESTION], prompts=True))
        ids = self._control.encode(text)
        ends = [place for place, id_ in enumerate(ids) if id_ in self.end_ids]
        return ids[: ends[0] + 1] if ends else ids

    def message(self, parsed: ParsedTurn) -> dict[str, Any]:
        """The message of a turn, for reward functions, as TRL gives it to them."""
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_written(call) for call in parsed.calls]
        return message

    # --- what the template says, once ---

    def _probe(self, prompt: str) -> None:
        """Find out how the template writes calls and results. Raises UserError or BadRow."""
        self.writes_tools = _PROBE.name in self._fill([_QUESTION], tools=[_TOOL])
        turns = [self._turn(calls, prompt) for calls in _PROBES]
        if any(_PROBE.name not in turn for turn in turns):
            raise UserError(
                "The chat template takes no tools: it does not write the calls of the assistant. "
                f"{_CURE}"
            )
        self.form = self._proved_form(turns)
        try:
            two = self._turn(_TWO, prompt)
        except BadRow:  # as of Llama 3, which refuses several
            two = ""
        self.calls_together = self._read(two, self.form) == _TWO
        # Some templates write an empty block for reasoning in a last turn alone.
        self._reasons = not self._keeps_prefix()
        if self._reasons and not self._keeps_prefix():
            raise UserError(
                "The chat template does not keep its prefix: it writes the assistant's turn "
                f"differently when a tool's result follows. {_CURE}"
            )
        self.end_ids |= self._ends_of_calls(two)

    def _turn(self, calls: list[ToolCall], prompt: str) -> str:
        """The text of a turn with calls, behind its prompt."""
        return self._behind_prompt(_calling(calls), prompt)

    def _behind_prompt(self, said: Message, prompt: str) -> str:
        """The text of the assistant's message behind its prompt."""
        text = self._fill([_QUESTION, said])
        if text.startswith(prompt):
            return text[len(prompt) :]
        # Some prompts open reasoning that a turn without any has not.
        ids = self._control.encode(text)
        asked = self._control.encode(prompt)
        common = 0
        while common < min(len(ids), len(asked)) and ids[common] == asked[common]:
            common += 1
        return str(self._tokenizer.decode(ids[common:], clean_up_tokenization_spaces=False))

    def _proved_form(self, turns: list[str]) -> Form:
        """The form that reads the calls that the template has written. Raises UserError."""
        for form in FORMS:
            found = [self._read(turn, form) for turn in turns]
            if found == [*_PROBES]:
                return form
        shown = " ".join(turns[0].split())[:_SHOWN]
        raise UserError(
            f"The chat template writes calls of tools in a form that is not known: {shown}. {_CURE}"
        )

    def _read(self, turn: str, form: Form) -> list[ToolCall]:
        """The calls in a turn's text, by way of its tokens."""
        ids = self._control.encode(turn)
        text = str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        # What ends a turn is not known yet: a special token behind it may belong to a call.
        calls = parse_turn(self._shortened(text), form, [_TOOL]).calls
        return calls or parse_turn(text, form, [_TOOL]).calls

    def _shortened(self, text: str) -> str:
        """A turn without a special token behind it that ends it."""
        token = self._control.ends(text)
        special = {str(name) for name in self._tokenizer.all_special_tokens}
        return text.rstrip().removesuffix(token) if token in special else text

    def _keeps_prefix(self) -> bool:
        """Whether a turn with calls stays as it is when results follow."""
        turn = self._fill([_QUESTION, self._dummy([_BARE])])
        ending = self._with_results([(_BARE.name, _RESULT)])
        if _RESULT not in ending.text:
            raise UserError(
                f"The chat template takes no tools: it leaves out their results. {_CURE}"
            )
        return ending.text.startswith(turn[: ending.cut]) and ending.cut > 0

    def _ends_of_answers(self) -> frozenset[int]:
        """The tokens that end a turn without calls."""
        alone = self._fill([_QUESTION, {"role": "assistant", "content": _ANSWER}])
        followed = self._with_user("probed question")
        texts = {
            self._control.begins(alone[alone.rfind(_ANSWER) + len(_ANSWER) :]),
            self._control.ends(followed.text[: followed.cut])
            or self._control.begins(followed.text[followed.cut :]),
        }
        eos = self._tokenizer.eos_token_id
        own = set() if eos is None else {eos}
        return frozenset(own | {id_ for id_, text in self._control.texts.items() if text in texts})

    def _ends_of_calls(self, two: str) -> frozenset[int]:
        """The token that ends a turn with calls. two: the text of a turn with two."""
        called = self._with_results([(_BARE.name, _RESULT)])
        token = self._control.ends(called.text[: called.cut])
        # What ends each call does not end a turn; then it is what begins a result.
        if not token or two.count(token) > 1:
            token = self._control.begins(called.text[called.cut :])
        return frozenset(id_ for id_, text in self._control.texts.items() if text == token)

    # --- conversations with a dummy in front ---

    def _dummy(self, calls: Sequence[ToolCall]) -> Message:
        message = _calling(calls)
        return message | {"reasoning_content": "dummy"} if self._reasons else message

    def _with_results(self, results: Sequence[tuple[str, str]]) -> _Ending:
        """A dummy conversation whose tools answer."""
        names = [name for name, _ in results]
        calls = [ToolCall(name, {}) for name in names]
        turn = self._dummy(calls if self.calls_together else calls[:1])
        turns = [_QUESTION, turn]
        for place, (name, text) in enumerate(results):
            turns.append(
                {"role": "tool", "name": name, "content": text, "tool_call_id": _call_id(place)}
            )
        before = self._fill(turns[:2])
        token = self._control.ends(before)
        # The template may write white space behind the end token, which the model does not.
        cut = len(before.rstrip()) if token else len(before)
        return _Ending(self._fill(turns, prompts=True), cut)

    def _with_user(self, content: str) -> _Ending:
        """A dummy conversation whose user answers."""
        answer = {"role": "assistant", "content": _ANSWER}
        user = {"role": "user", "content": content}
        alone = self._fill([_QUESTION, answer])
        text = self._fill([_QUESTION, answer, user], prompts=True)
        if _ANSWER not in text:
            raise BadRow("it leaves out the assistant's answers")
        # From the first one on: the user may say the same.
        cut = text.find(_ANSWER) + len(_ANSWER)
        is_ended = self._control.begins(alone[alone.rfind(_ANSWER) + len(_ANSWER) :])
        token = self._control.begins(text[cut:]) if is_ended else ""
        if token:
            cut = text.index(token, cut) + len(token)
        return _Ending(text, cut)

    def _following(self, hidden: HiddenTexts, ending: _Ending) -> list[int]:
        """The ids of what follows a turn, tokenized as behind its end token."""
        token = self._control.ends(ending.text[: ending.cut])
        ids = hidden.encode(token + ending.text[ending.cut :])
        anchor = hidden.encode(token)
        return ids[len(anchor) :]

    def _fill(self, messages: list[Message], *, tools: Tools = None, prompts: bool = False) -> str:
        conversation = Chat(messages, tools, template_kwargs=self._kwargs)
        return self._template.text(conversation, self._worker, add_generation_prompt=prompts)

    def _without_special(self, text: str) -> str:
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(str(token), "")
        return text


def _opened_in(prompt: str) -> str:
    """The mark that opens reasoning if a prompt ends within it."""
    for opening, closing in THOUGHTS:
        if prompt.rfind(opening) > prompt.rfind(closing):
            return opening
    return ""


def _call_id(place: int) -> str:
    return f"call{place:05}"  # Mistral's templates want nine letters and digits


def _calling(calls: Sequence[ToolCall]) -> Message:
    """A message that calls tools."""
    written = [{"id": _call_id(place), **_written(call)} for place, call in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": written}


def _written(call: ToolCall) -> dict[str, Any]:
    """A call as messages have it."""
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
