"""Prompts in the format of a run: from a question to the token ids before the answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.tokenization import encode_prompt
from fsdp_qlora.data.content import BadRow, Chat, Fields, PromptContent, Rendered, Segment, prompt_text, texts_of
from fsdp_qlora.data.text.chat_template import TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import CHAT, TEMPLATE, TEXT, Renderer, prompt_record, recorded_template
from fsdp_qlora.data.text.templates import TEMPLATES, find_template
from fsdp_qlora.utils.errors import UserError

_AS_INSTRUCTION = RequestedFormat(renames={"prompt": "instruction"})


class PromptFormat:
    """The text around a question.

    Args:
        record: of data/text/rendering.py.
    Attributes:
        stop_text: what ends an answer besides the tokenizer's end token; empty if nothing does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]) -> None:
        self._tokenizer, self._kind, self._worker = tokenizer, record["kind"], TemplateWorker()
        self._renderer = Renderer(
            tokenizer, recorded_template(record), "assistant", TEMPLATES["alpaca"], [self._worker]
        )
        try:
            self.stop_text = "" if self._kind == TEXT else self._renderer.after_answer().strip()
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    @property
    def keeps_history(self) -> bool:
        """Whether a prompt begins with earlier questions and answers."""
        return bool(self._kind == CHAT)

    def ids(self, asked: PromptContent) -> list[int]:
        """The token ids before the answer.

        Raises:
            UserError: the chat template refuses the conversation.
        """
        try:
            return encode_prompt(self._renderer.prompt(_of_kind(asked, self._kind)), self._tokenizer)
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def close(self) -> None:
        """End the process that fills chat templates; the next prompt starts it again."""
        self._worker.close()


def _of_kind(asked: PromptContent, kind: str) -> PromptContent:
    """The question in the form of the rows that a model was trained on, whatever form it was given in."""
    if kind == TEXT and isinstance(asked, Fields | Chat):
        texts = [asked.system, asked.instruction, asked.context] if isinstance(asked, Fields) else _texts(asked)
        return Rendered([Segment("\n".join(filter(None, texts)), learned=False)], "text")
    if kind == TEMPLATE and isinstance(asked, Chat):
        return Fields(prompt_text(asked), "", system="".join(_texts(asked, "system")))
    return Fields(prompt_text(asked), "") if kind != TEXT and isinstance(asked, Rendered) else asked


def _texts(chat: Chat, role: str = "") -> list[str]:
    """The texts of the messages, of one role or of all."""
    return ["".join(texts_of(message)) for message in chat.messages if role in ("", message["role"])]


def chosen_format(
    dataset_format: str, prompt_template: str | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The format by the options, for a model without a record of its training: a chat if the tokenizer has a template.

    Raises:
        UserError: there is no such template.
    """
    chosen = find_template(prompt_template)
    if dataset_format in FORMATS or chosen.prompt:
        return prompt_record(dataset_format if dataset_format in FORMATS else "alpaca", chosen)
    return prompt_record("", chosen, is_chat=bool(chosen.is_chat or tokenizer.chat_template))


def _has_context(row: Mapping[str, Any]) -> bool:
    """Whether the row has a `prompt` with the context of an instruction."""
    return bool(row.get("input") or row.get("context")) and row.keys() & {"instruction", "question", "prompt"} == {
        "prompt"
    }


def read_questions(path: Path) -> list[tuple[dict[str, Any], PromptContent]]:
    """The rows of a file of prompts: .jsonl with an object or a text in each line, or text with a prompt in each line.

    Returns:
        (the row, its question) of each.
    Raises:
        UserError: it cannot be read, or a row has no question.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would split within strings of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix in (".jsonl", ".json") else line
            row = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise BadRow("not an object or a text")
            requested = _AS_INSTRUCTION if _has_context(row) else RequestedFormat()
            found.append((row, requested.prompt(row)[1]))
        except BadRow as reason:
            raise UserError(f"{path}:{number} has no question that can be asked: {reason}.") from reason
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is not JSON ({error}). Give one object in each line.") from error
    if not found:
        raise UserError(f"{path} has no prompts.")
    return found
