"""Reads the rows of a dataset as prompts, to which a run generates completions."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.config.objectives import OBJECTIVES
from fsdp_qlora.data.batches import tokenization
from fsdp_qlora.data.batches.report import NO_ROOM, DataReport
from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.rows import NO_ROWS, TokenizedRows
from fsdp_qlora.data.columns import COLUMNS
from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Fields,
    PromptContent,
    Rendered,
    Row,
    prompt_text,
    shows_images,
    with_template_kwargs,
)
from fsdp_qlora.data.dataset_text import DatasetText
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.preferences import OTHER_IMAGES
from fsdp_qlora.data.text.recognition import IGNORE
from fsdp_qlora.data.text.rendering import Renderer, as_shown, over_workers
from fsdp_qlora.data.text.template_kwargs import read_kwargs
from fsdp_qlora.data.text.templates import as_chat

# The column that names the environment of a row, as in TRL.
ENVIRONMENT = "environment"
# The name of a row's images for reward functions, as in TRL.
IMAGES = "images"
# Names that reward functions know for something else.
_OURS = {"prompt", "completion", "completion_ids"}


class ReadPrompt(NamedTuple):
    """A row as it was read."""

    columns: Row
    """All of its columns, under the dataset's names."""
    format_name: str
    content: PromptContent
    for_teacher: PromptContent | None
    """The prompt that the teacher sees instead, if it is another one."""
    answer: object
    """The right answer, where it is in no column of its own."""
    environment: str = ""
    """The name of its environment, if there are several."""


class RenderedPrompt(NamedTuple):
    """A prompt as text."""

    prompt: Rendered
    for_teacher: Rendered | None


class PromptRows:
    """The prompts of a dataset, each of the format that its filled columns fit.

    Args:
        text: how rows become text.
        keep: takes the prompts that can be used, in the order of the dataset.
    """

    def __init__(self, text: DatasetText, keep: Callable[[Sequence[Prompt]], None]) -> None:
        self._text = text
        self._keep = keep
        self._template_columns: Mapping[str, str] | None = None
        self._renderers: dict[str, Renderer] = {}
        options = text.options.text
        self._has_teacher = options.has_teacher
        self._takes_images = options.image_processor is not None
        self._may_have_teacher = OBJECTIVES[options.objective].distills
        self.num_used = 0
        """Prompts that were given to `keep`."""
        self.num_tokens = 0
        """Their tokens."""

    def look_at(self, columns: Sequence[str], rows: Sequence[Row], report: DataReport) -> None:
        """Find the variables of the chat template; see `KindOfRows`."""
        is_first = self._template_columns is None
        self._template_columns = self._text.template_columns(FORMATS["messages"], columns)
        if is_first:
            self._text.requested.check(columns, report.origin)

    def read(self, row: Row, folder: str) -> ReadPrompt:
        """Read the prompt of a row; see `KindOfRows`."""
        assert self._template_columns is not None
        reading = self._text.requested.find_prompt(row)
        if not self._takes_images:
            reading = reading.without_images()
        content, completion = reading.prompt(row, folder=folder)
        for_teacher = None
        if self._has_teacher or (self._may_have_teacher and any(map(row.get, COLUMNS["teacher"]))):
            for_teacher, _ = reading.prompt(row, for_teacher=True, folder=folder)
        template_kwargs = read_kwargs(row, self._template_columns)
        content = with_template_kwargs(content, template_kwargs)
        if for_teacher is not None:
            for_teacher = with_template_kwargs(for_teacher, template_kwargs)
        answer = _right_answer(row, completion)
        environment = ""
        tools = self._text.options.text.tools
        if tools is not None:
            environment = environment_of(row, tools)
            content = _with_tools(content, tools[environment])
        return ReadPrompt(row, reading.dataset_format, content, for_teacher, answer, environment)

    def tokenize(
        self, contents: Sequence[tuple[int, ReadPrompt]], report: DataReport
    ) -> tuple[TokenizedRows, list[int]]:
        """Give prompts, each with all columns, to `keep`.

        Returns:
            No rows, since the run makes them, and the tokens of each prompt with the longest
            completion.
        """
        lengths: list[int] = []
        prompts: list[Prompt] = []
        options = self._text.options
        rows = [row for _, row in contents]
        all_rendered = over_workers(rows, self._render, self._text.workers[:1])
        for (row_number, row), rendered in zip(contents, all_rendered, strict=True):
            if isinstance(rendered, BadRow):
                report.reject(row_number, str(rendered))
                continue
            report.dataset_format = report.dataset_format or row.format_name
            report.is_chat |= rendered.prompt.kind == "chat"
            report.is_filled |= rendered.prompt.kind == "template"
            try:
                prompt = self._encode(row_number, row, rendered)
            except BadRow as reason:
                report.reject(row_number, str(reason))
                continue
            longest = max(len(prompt.ids), len(prompt.teacher_ids or ()))
            lengths.append(longest + options.text.max_completion_length)
            if not prompt.ids:
                report.reject(row_number, "the prompt has no tokens")
            elif lengths[-1] > options.longest_row:
                report.reject(row_number, NO_ROOM)
            else:
                prompts.append(prompt)
        self.num_used += len(prompts)
        self.num_tokens += sum(len(prompt.ids) for prompt in prompts)
        self._keep(prompts)
        return NO_ROWS, lengths

    def _render(self, row: ReadPrompt, worker: TemplateWorker) -> RenderedPrompt:
        name = row.format_name
        if name not in self._renderers:
            self._renderers[name] = self._text.renderer(FORMATS[name], "assistant")
        renderer = self._renderers[name]
        prompt = renderer.prompt(row.content, worker)
        for_teacher = None
        if row.for_teacher is not None:
            for_teacher = renderer.prompt(row.for_teacher, worker)
            if for_teacher.images != prompt.images:
                raise BadRow(OTHER_IMAGES)
        return RenderedPrompt(prompt, for_teacher)

    def _encode(self, row_number: int, row: ReadPrompt, rendered: RenderedPrompt) -> Prompt:
        """The prompt with its tokens. Raises BadRow if one stands for an image by itself."""
        tokenizer = self._text.tokenizer
        teacher_ids = None
        if rendered.for_teacher is not None:
            teacher_ids = tokenization.encode_prompt(rendered.for_teacher, tokenizer)
        has_environment = self._text.options.text.tools is not None
        return Prompt(
            row_number,
            tokenization.encode_prompt(rendered.prompt, tokenizer),
            _shown(row.content, rendered.prompt),
            self._beside(row.columns, has_images=bool(rendered.prompt.images)),
            row.answer,
            teacher_ids,
            row.content if has_environment and isinstance(row.content, Chat) else None,
            row.environment,
            RowImages.of_one_row(rendered.prompt.images, rendered.prompt.image_values),
        )

    def _beside(self, row: Row, *, has_images: bool) -> Row:
        """The columns for reward functions, under the names that --columns gives.

        Functions get the images themselves as `IMAGES`, which is an empty list here.
        """
        renames = self._text.requested.renames
        columns = {renames.get(name, name): value for name, value in row.items()}
        if self._takes_images and (has_images or columns.keys() & {*COLUMNS["images"]}):
            columns = {
                name: value for name, value in columns.items() if name not in COLUMNS["images"]
            }
            columns[IMAGES] = []
        if isinstance(columns.get("prompt"), list):
            columns["messages"] = columns["prompt"]
        return {name: value for name, value in columns.items() if name not in {*_OURS, IGNORE}}


def environment_of(row: Row, names: Collection[str]) -> str:
    """The name of a row's environment. Raises BadRow if there is none of that name."""
    if "" in names:
        return ""
    name = row.get(ENVIRONMENT)
    if name not in names:
        known = ", ".join(names)
        raise BadRow(f"environment is {str(name)[:60]!r}, and --environment has {known}")
    return str(name)


def _with_tools(content: PromptContent, tools: list[dict[str, Any]]) -> Chat:
    """The prompt as a conversation in which the model may call tools.

    Raises BadRow for text that is no conversation.
    """
    if isinstance(content, Fields) and not content.shows:
        content = as_chat(content)
    if shows_images(content):
        raise BadRow("images: episodes in environments are of text alone")
    if not isinstance(content, Chat):
        raise BadRow("an environment needs messages or an instruction, and the prompt is a text")
    return dataclasses.replace(content, tools=tools or None)


def _right_answer(row: Row, said: str | None) -> object:
    """The right answer that is in no column of its own.

    It is in an object of verl's rows, or is what the assistant says at the end.
    """
    for name in ("reward_model", "verification_info"):
        value = row.get(name)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and value.get("ground_truth") is not None:
            return value["ground_truth"]
    last = row.get("completion")
    if isinstance(last, list) and last:
        last = last[-1]
    if isinstance(last, Mapping):
        last = last.get("content")
    return said or last


def _shown(content: PromptContent, rendered: Rendered) -> Any:
    """The prompt as reward functions get it: messages where it is a chat, else text."""
    if rendered.kind != "chat":
        return prompt_text(content)
    if isinstance(content, Fields):
        content = as_shown(dataclasses.replace(content, context=""))
    assert not isinstance(content, Rendered)
    return content.messages
