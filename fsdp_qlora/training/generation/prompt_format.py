"""Prompts in the format of a run: from a question to the token ids before the answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import (
    BadRow,
    Chat,
    Fields,
    PromptContent,
    Rendered,
    Segment,
    prompt_text,
    texts_of,
)
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
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


class PromptFormat:
    """The text around a question.

    Args:
        record: of data/text/rendering.py.
    Attributes:
        stop_text: what ends an answer besides the tokenizer's end token; empty if nothing does.
        keeps_history: whether a prompt begins with earlier questions and answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kind = record["kind"]
        self._worker = TemplateWorker()
        self.keeps_history = self._kind == CHAT
        self._renderer = Renderer(
            tokenizer, recorded_template(record), "assistant", TEMPLATES["alpaca"], [self._worker]
        )
        try:
            self.stop_text = "" if self._kind == TEXT else self._renderer.after_answer().strip()
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def ids(self, question: PromptContent) -> list[int]:
        """The token ids before the answer.

        Raises:
            UserError: the chat template refuses the conversation.
        """
        try:
            rendered = self._renderer.prompt(_of_kind(question, self._kind))
            return encode_prompt(rendered, self._tokenizer)
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def close(self) -> None:
        """End the process that fills chat templates; the next prompt starts it again."""
        self._worker.close()


def _of_kind(row: PromptContent, kind: str) -> PromptContent:
    """The question in the form of the rows that a model was trained on."""
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


def read_questions(path: Path) -> list[tuple[dict[str, Any], PromptContent]]:
    """Read a file of prompts.

    Args:
        path: .jsonl with an object or a text in each line, or text with a prompt in each line.
    Returns:
        Each row with its question.
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
        try:
            questions.append(_question(line, is_json=path.suffix in (".jsonl", ".json")))
        except BadRow as reason:
            # --columns is an option of training, and there is none for prompts.
            why = str(reason).partition("; --columns")[0]
            raise UserError(f"{path}:{line_number} has no usable question: {why}.") from reason
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}:{line_number} is not JSON ({error}). Give one object in each line."
            ) from error
    if not questions:
        raise UserError(f"{path} has no prompts.")
    return questions


def _question(line: str, *, is_json: bool) -> tuple[dict[str, Any], PromptContent]:
    """The row of a line, and its question. Raises BadRow or ValueError if there is none."""
    row = json.loads(line) if is_json else line
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadRow("not an object or a text")
    has_context = bool(row.get("input") or row.get("context"))
    names = row.keys() & {"instruction", "question", "prompt"}
    requested = _AS_INSTRUCTION if has_context and names == {"prompt"} else RequestedFormat()
    prompt, _ = requested.find_prompt(row).prompt(row)
    return row, prompt
