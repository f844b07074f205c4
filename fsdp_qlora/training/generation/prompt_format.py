"""Prompts in the format of a run: from a question to the token ids before the answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Fields,
    PromptContent,
    Rendered,
    Segment,
    prompt_text,
    shows_images,
    texts_of,
)
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import (
    CHAT,
    TEMPLATE,
    TEXT,
    Renderer,
    prompt_record,
    recorded_template,
)
from fsdp_qlora.data.text.templates import TEMPLATES, find_template
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named

# For rows with a context: the formats with a context call the question an instruction.
_AS_INSTRUCTION = RequestedFormat(renames={"prompt": "instruction"})


class Question(NamedTuple):
    """A prompt of a user."""

    content: PromptContent
    origin: str
    """Where it is from, for messages: a file with the line's number, or an option."""
    row: dict[str, Any]
    """The row of the file; empty for an option's."""


class EncodedPrompt(NamedTuple):
    """A prompt for a model."""

    ids: list[int]
    """The tokens before the answer."""
    images: RowImages
    """The images that it shows, as those of a table of one row."""


class PromptFormat:
    """The text around a question.

    Args:
        record: of data/text/rendering.py.
        image_processor: the model's; None if it takes no images.
        no_images: why it takes none, as the end of a sentence.
    Attributes:
        stop_text: what ends an answer besides the tokenizer's end token; empty if nothing does.
        keeps_history: whether a prompt begins with earlier questions and answers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        record: Mapping[str, Any],
        image_processor: ImageProcessor | None = None,
        no_images: str = "the model takes text alone",
    ) -> None:
        self._tokenizer = tokenizer
        self._no_images = no_images
        self._takes_images = image_processor is not None
        self._kind = record["kind"]
        self._worker = TemplateWorker()
        self.keeps_history = self._kind == CHAT
        self._renderer = Renderer(
            tokenizer,
            recorded_template(record),
            "assistant",
            TEMPLATES["alpaca"],
            [self._worker],
            image_processor,
        )
        try:
            self.stop_text = "" if self._kind == TEXT else self._renderer.after_answer().strip()
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def encode(self, content: PromptContent, origin: str = "") -> EncodedPrompt:
        """The tokens before the answer, with the images.

        Args:
            origin: of the prompt, as in `Question`.
        Raises:
            UserError: an image cannot be read, the model takes none, or the chat template refuses
                the conversation.
        """
        try:
            if shows_images(content) and not self._takes_images:
                raise BadRow(f"it shows images, and {self._no_images}")
            rendered = self._renderer.prompt(_of_kind(content, self._kind))
            images = RowImages.of_one_row(rendered.images, rendered.image_values)
            return EncodedPrompt(encode_prompt(rendered, self._tokenizer), images)
        except BadRow as reason:
            where = f"{origin}: the" if origin else "The"
            raise UserError(f"{where} prompt cannot be used: {reason}.") from reason

    def close(self) -> None:
        """End the process that fills chat templates; the next prompt starts it again."""
        self._worker.close()


def _of_kind(row: PromptContent, kind: str) -> PromptContent:
    """The question in the form of the rows that a model was trained on."""
    if shows_images(row):
        # A chat template alone has places for images, so rows with images were chats in training.
        return row
    if kind == TEXT and isinstance(row, Fields | Chat):
        if isinstance(row, Fields):
            texts = [row.system, row.instruction, row.context]
        else:
            texts = _texts(row)
        return Rendered([Segment("\n".join(filter(None, texts)), learned=False)], "text")
    # A template has one place for the question: the earlier turns of a chat have none.
    if kind == TEMPLATE and isinstance(row, Chat):
        return Fields(prompt_text(row), "", system="".join(_texts(row, "system")))
    if kind != TEXT and isinstance(row, Rendered):
        return Fields(prompt_text(row), "")
    return row


def _texts(chat: Chat, role: str = "") -> list[str]:
    """The texts of the messages, of one role or of all."""
    return [
        "".join(texts_of(message)) for message in chat.messages if role in ("", message["role"])
    ]


def chosen_format(
    dataset_format: str, prompt_template: str | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The format by the options, for a model without a record of its training.

    Without a format or a template among the options it is a chat if the tokenizer has a template.

    Raises:
        UserError: there is no such template.
    """
    chosen = find_template(prompt_template)
    if dataset_format in FORMATS or chosen.prompt:
        return prompt_record(dataset_format if dataset_format in FORMATS else "alpaca", chosen)
    return prompt_record("", chosen, is_chat=bool(chosen.is_chat or tokenizer.chat_template))


def read_questions(path: Path) -> list[Question]:
    """Read a file of prompts.

    Args:
        path: .jsonl with an object or a text in each line, or text with a prompt in each line.
            Paths of images are relative to its folder.
    Raises:
        UserError: it cannot be read, or a row has no question.
    """
    try:
        # splitlines() would also split at U+2028 and others, which may be in strings of JSON.
        lines = read_named(path).decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}).") from error
    questions = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        origin = f"{path}:{line_number}"
        try:
            row = _row(line, is_json=path.suffix in (".jsonl", ".json"))
            questions.append(Question(_content(row, path.parent), origin, row))
        except BadRow as reason:
            # --columns is an option of training, and there is none for prompts.
            why = str(reason).partition("; --columns")[0]
            raise UserError(f"{origin} has no usable question: {why}.") from reason
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{origin} is not JSON ({error}). Give one object in each line."
            ) from error
    if not questions:
        raise UserError(f"{path} has no prompts.")
    return questions


def _row(line: str, *, is_json: bool) -> dict[str, Any]:
    """The row of a line. Raises BadRow or ValueError."""
    row = json.loads(line) if is_json else line
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadRow("not an object or a text")
    return row


def _content(row: dict[str, Any], folder: Path) -> PromptContent:
    """The question of a row. Raises BadRow if there is none."""
    has_context = bool(row.get("input") or row.get("context"))
    names = row.keys() & {"instruction", "question", "prompt"}
    requested = _AS_INSTRUCTION if has_context and names == {"prompt"} else RequestedFormat()
    prompt, _ = requested.find_prompt(row).prompt(row, folder=str(folder))
    return prompt
