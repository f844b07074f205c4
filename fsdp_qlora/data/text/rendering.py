"""Rendering: a row's content becomes text through a prompt template or a chat template.

A record of this is kept with the trained model.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.config.learn import EMPTY_REASONING, REASONING, TOOL_CALLS, read_learn
from fsdp_qlora.data.content import (
    NO_TARGET,
    TOO_DEEP,
    BadRow,
    Chat,
    Content,
    Fields,
    PreferenceRow,
    PromptContent,
    Rendered,
    Segment,
    with_template_kwargs,
)
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.chats import read_chat
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.image_processor import NO_ANSWERS, ImageProcessor
from fsdp_qlora.data.text.image_store import keep_all
from fsdp_qlora.data.text.templates import TEMPLATES, ChosenTemplate, PromptTemplate, as_chat
from fsdp_qlora.data.text.turn_parts import (
    calls_in_text,
    has_reasoning,
    leading_block,
)
from fsdp_qlora.utils.errors import UserError

# kinds of records
TEMPLATE = "template"
CHAT = "chat"
TEXT = "text"
IN_PARTS = (
    "an answer of several turns, which the chat template renders differently when others follow"
)
_MARK = "<<answer>>"
R = TypeVar("R")
T = TypeVar("T")
# Rows for which all workers start, which takes a second or two.
_WORTH_WORKERS = 200


class Renderer:
    """Makes rows text in one way.

    Args:
        chosen: of --prompt_template.
        learn: the words of --learn, as `read_learn` reads them.
        of_format: the prompt template of the dataset's format.
        workers: processes that fill chat templates.
        image_processor: the model's, if it has one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chosen: ChosenTemplate,
        learn: str,
        of_format: PromptTemplate,
        workers: Sequence[TemplateWorker],
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._is_chat = chosen.is_chat
        self._learn = read_learn(learn)
        self._workers = workers
        self._image_processor = image_processor
        self._prompt = chosen.prompt or of_format
        self._chat_template = ChatTemplate(tokenizer, chosen.chat)

    def render_all(self, contents: Sequence[Content]) -> list[list[Rendered] | BadRow]:
        """Render rows, spread over the workers.

        Returns for each row what `render` returns, or why it cannot be used.
        """
        return over_workers(contents, self.render, self._workers)

    def render(self, content: Content, worker: TemplateWorker | None = None) -> list[Rendered]:
        """The row as text or tokens; several where turns of a chat become rows of their own.

        Raises:
            BadRow: it cannot be rendered, or nothing of it is learned.
            UserError: no row can be rendered.
        """
        rows = self._render(content, worker or self._workers[0])
        rendered = [row for row in rows if any(row.learned) or any(map(_is_learned, row.segments))]
        if not rendered:
            raise BadRow(NO_TARGET)
        return [*map(self._with_model_ids, rendered)]

    def prompt(self, content: PromptContent, worker: TemplateWorker | None = None) -> Rendered:
        """The text in front of an answer. Raises BadRow or UserError as `render` does."""
        if isinstance(content, Fields) and content.shows:
            content = as_shown(content)
        if isinstance(content, Fields):
            if self._is_chat:
                content = as_chat(content)
            else:
                # Without the last segment, which is the response.
                content = Rendered(self._prompt.fill(content)[:-1], "template")
        if isinstance(content, Chat):
            self._check_images(content)
            text = self._chat_template.text(
                content, worker or self._workers[0], add_generation_prompt=True
            )
            segments = [Segment(text, learned=False)]
            if content.images:
                assert self._image_processor is not None
                if self._image_processor.tells_answers:
                    raise UserError(f"Prompts have images: {NO_ANSWERS}.")
                [rendered] = self._shown([segments], content)
                return rendered
            content = Rendered(segments, "chat")
        return self._with_model_ids(content)

    def _with_model_ids(self, row: Rendered) -> Rendered:
        """A row in which the model's own tokens for images are looked for, if it has any."""
        if row.images or self._image_processor is None:
            return row
        return dataclasses.replace(row, image_ids=self._image_processor.model_ids)

    def _check_images(self, chat: Chat) -> None:
        """Raise BadRow for images that the model cannot see."""
        if chat.images and self._image_processor is None:
            raise BadRow("images: only text can be trained on with this model")

    def after_answer(self) -> str:
        """The text that follows the answer to an instruction."""
        if not self._is_chat:
            return self._prompt.fill(Fields("?", ""))[-1].text
        text = self._chat_template.text(as_chat(Fields("?", _MARK)), self._workers[0])
        return text.partition(_MARK)[2]

    def _render(self, content: Content, worker: TemplateWorker) -> list[Rendered]:
        if isinstance(content, Fields) and content.shows:
            content = as_shown(content)
        if isinstance(content, Fields) and not self._is_chat:
            filled = Rendered(self._prompt.fill(content), "template")
            content = with_template_kwargs(filled, content.template_kwargs)
        if isinstance(content, Fields):
            content = as_chat(content)
        if isinstance(content, Chat):
            content.refuse_unanswered()
            self._check_images(content)
            rows, notes = self._chat_template.fill(content, worker, learn=self._learn)
            notes += content.notes
            if content.unused:
                notes += (f"turns have fields that are not used: {', '.join(content.unused)}",)
            if content.images:
                rendered = self._shown(rows, content)
            else:
                rendered = [Rendered(row, "chat") for row in rows]
            # Of a turn that is a row of its own all may be only read.
            rendered = [row for row in rendered if any(map(_is_learned, row.segments))]
            if not rendered:
                raise BadRow(NO_TARGET)
            # Notes are of the dataset's row, so only its first one has them.
            return [dataclasses.replace(rendered[0], notes=notes), *rendered[1:]]
        if isinstance(content, PreferenceRow):
            answers = [self.render(answer, worker) for answer in content.answers]
            if any(len(answer) > 1 for answer in answers):
                raise BadRow(IN_PARTS)
            labels = itertools.chain(content.desired, itertools.repeat(None))
            return [
                dataclasses.replace(row, desired=label)
                for [row], label in zip(answers, labels, strict=False)
            ]
        row = content if isinstance(content, Rendered) else Rendered(content)
        return [self._relearn(row)]

    def _shown(self, rows: Sequence[Sequence[Segment]], chat: Chat) -> list[Rendered]:
        """The texts of a chat with the tokens of its images."""
        assert self._image_processor is not None
        names, pixels = keep_all(chat.images)
        expanded = [self._image_processor.expand(row, pixels) for row in rows]
        most = max(count for _, count, *_ in expanded)
        if most < len(chat.images):
            raise BadRow(f"the chat template shows {most} of the row's {len(chat.images)} images")
        ids = self._image_processor.image_ids
        return [
            Rendered(
                row,
                "chat",
                images=names[:n],
                image_values=size,
                image_ids=ids,
                num_image_ids=num_ids,
            )
            for row, n, size, num_ids in expanded
        ]

    def _relearn(self, row: Rendered) -> Rendered:
        """A row that is no chat, learned as --learn says. Raises BadRow."""
        if row.kind == "tokens":
            if {REASONING, TOOL_CALLS} & {*self._learn.read_only}:
                raise BadRow(f"rows of tokens have masks of their own: --learn {self._learn.text}")
            return row
        segments = row.segments
        last = max((i for i, segment in enumerate(segments) if _is_learned(segment)), default=0)
        learned = {last}
        if self._learn.turns == "all":
            learned = set(range(len(segments)))
        if self._learn.turns != "assistant":
            segments = [
                dataclasses.replace(segment, learned=i in learned)
                for i, segment in enumerate(segments)
            ]
        if TOOL_CALLS in self._learn.read_only:
            segments = _without_calls(segments, [bool(each.learned) for each in row.segments])
        if self._learn.read_only:
            segments = self._without_reasoning(segments)
        return dataclasses.replace(row, segments=segments)

    def _without_reasoning(self, segments: Sequence[Segment]) -> list[Segment]:
        """Segments whose blocks of reasoning, at their beginnings, are only read as --learn says.

        Raises BadRow for marks of reasoning in another place.
        """
        pieces: list[Segment] = []
        leaves_all = REASONING in self._learn.read_only
        leaves_empty = EMPTY_REASONING in self._learn.read_only
        for segment in segments:
            before = pieces[-1].text if pieces else ""
            block = leading_block(segment.text, before) if segment.learned else None
            if block and (leaves_all or (leaves_empty and not block[1])):
                end = block[0]
                pieces.append(Segment(segment.text[:end], learned=False, is_left_out=True))
                segment = dataclasses.replace(segment, text=segment.text[end:])
            if leaves_all and segment.learned and has_reasoning(segment.text):
                raise BadRow(
                    "its reasoning is neither in messages nor at the beginning of a response, so "
                    "--learn -reasoning cannot leave it out"
                )
            pieces.append(segment)
        return pieces


def as_shown(fields: Fields) -> Chat:
    """An instruction as a conversation, with the images of its row if it has any. Raises BadRow."""
    if fields.shows is None:
        return as_chat(fields)
    chat = read_chat(fields.shows, as_chat(fields).messages)
    return with_template_kwargs(chat, fields.template_kwargs)


def _without_calls(segments: Sequence[Segment], are_responses: Sequence[bool]) -> list[Segment]:
    """Segments of which the calls of tools in responses are only read. Raises BadRow."""
    pieces: list[Segment] = []
    before = ""
    for segment, is_response in zip(segments, are_responses, strict=True):
        text = segment.text
        place = 0
        if segment.learned and is_response:
            block = leading_block(text, before)
            for first, last in calls_in_text(text, block[0] if block else 0):
                pieces += [
                    Segment(text[place:first], segment.learned),
                    Segment(text[first:last], learned=False, is_left_out=True),
                ]
                place = last
        pieces.append(dataclasses.replace(segment, text=text[place:]))
        before = text
    return pieces


def _is_learned(segment: Segment) -> bool:
    return bool(segment.learned and (segment.text or segment.ends))


def over_workers(
    rows: Sequence[R], make: Callable[[R, TemplateWorker], T], workers: Sequence[TemplateWorker]
) -> list[T | BadRow]:
    """Make something of each row's content, of many rows on all workers.

    The result of a row that cannot be used is the reason.
    """

    def make_one(row: R, worker: TemplateWorker) -> T | BadRow:
        try:
            return make(row, worker)
        except BadRow as reason:
            return reason
        except RecursionError:
            return BadRow(TOO_DEEP)

    num = len(workers) if len(rows) >= _WORTH_WORKERS else 1

    def make_share(n: int) -> list[T | BadRow]:
        return [make_one(row, workers[n]) for row in rows[n::num]]

    # Threads only wait for their workers. Rows are dealt in turn, since long ones are often
    # together.
    with ThreadPoolExecutor(num) as threads:
        shares = list(threads.map(make_share, range(num)))
    return [shares[place % num][place // num] for place in range(len(rows))]


def prompt_record(
    dataset_format: str, chosen: ChosenTemplate, *, is_chat: bool = False, is_filled: bool = False
) -> dict[str, Any]:
    """The text around the rows of a dataset, as JSON.

    Args:
        is_chat, is_filled: whether rows of it were filled into a chat or a prompt template, which
            it does not tell.
    Returns:
        kind: TEMPLATE, with `name` and the fields of PromptTemplate; CHAT, with the chat template
        in `chat_template` where it replaces the tokenizer's own; or TEXT, where nothing is added.
    """
    content = FORMATS[dataset_format].content if dataset_format in FORMATS else None
    if content is Chat or is_chat or (content is Fields and chosen.is_chat):
        return {"kind": CHAT, "chat_template": chosen.chat}
    if content is Fields or is_filled:
        template = chosen.prompt or FORMATS[dataset_format].template
        return {"kind": TEMPLATE, "name": chosen.name or dataset_format} | dataclasses.asdict(
            template
        )
    return {"kind": TEXT}


def recorded_template(record: Mapping[str, Any]) -> ChosenTemplate:
    """The template of a record of `prompt_record`."""
    if record["kind"] == CHAT:
        return ChosenTemplate(CHAT, chat=record.get("chat_template"))
    if record["kind"] == TEXT:
        return ChosenTemplate()
    names = [field.name for field in dataclasses.fields(PromptTemplate)]
    return ChosenTemplate(record["name"], PromptTemplate(**{name: record[name] for name in names}))


def describe_default(dataset_format: str, record: Mapping[str, Any]) -> str:
    """One line: how instructions become text by `prompt_record`, and what the other way is.

    It is empty for other rows.
    """
    if dataset_format not in FORMATS or FORMATS[dataset_format].content is not Fields:
        return ""
    default = FORMATS[dataset_format].template
    names = [name for name, template in TEMPLATES.items() if template == default]
    name = names[0] if names else "FILE"
    if record["kind"] == CHAT:
        return (
            f"Prompts: the chat template that the model was made for (--prompt_template {name} for "
            "plain text)"
        )
    return f"Prompts: {name}, not the model's own chat template (--prompt_template chat for that)"


def describe_lack(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """One line, if a chat template writes special tokens that the tokenizer lacks; else empty.

    The template is the one of `prompt_record`.
    """
    if record["kind"] != CHAT:
        return ""
    template = str(record.get("chat_template") or tokenizer.chat_template)
    # A token that the tokenizer lacks falls into pieces, which the model has never seen in this
    # place.
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", template))
    lacked = [
        token for token in written if len(tokenizer.encode(token, add_special_tokens=False)) > 1
    ]
    if not lacked:
        return ""
    advice = f"--add_tokens '{','.join(lacked)}' adds and trains them."
    return f"The tokenizer has no tokens for {', '.join(lacked)} of the chat template: {advice}"


def example_prompts(record: Mapping[str, Any]) -> dict[str, str]:
    """The text in front of an answer by a record of kind TEMPLATE.

    It has places for a row's content.
    """
    template = recorded_template(record).prompt
    filled = {}
    assert template is not None
    for title, context in (("with an input", "{input}"), ("without", "")):
        filled[title] = template.fill(Fields("{instruction}", "", context=context))[0].text
    if filled["with an input"].replace("{input}", "") == filled["without"]:
        filled.pop("with an input")
    return filled
