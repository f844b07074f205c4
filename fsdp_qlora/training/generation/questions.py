"""Prompts in the format of a run: from a question to the token ids before the answer."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.batches.tokenization import encode
from fsdp_qlora.data.content import BadRow, Fields, Rendered, Segment
from fsdp_qlora.data.text.chat_template import ChatTemplate, TemplateWorker
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.rendering import CHAT, TEMPLATE, prompt_record
from fsdp_qlora.data.text.templates import PromptTemplate, find_template
from fsdp_qlora.utils.errors import UserError

_MARK = "<<answer>>"
# Columns of a file of prompts -> what they mean; a row has one of the first four.
_INSTRUCTION, _CONTEXT = ("instruction", "question", "prompt", "text"), ("input", "context")


class Question(NamedTuple):
    """A question: a conversation that ends with the user, or an instruction with its context."""

    messages: list[dict[str, str]]
    context: str = ""


def question(text: str, *, system: str = "", context: str = "") -> Question:
    messages = [{"role": "system", "content": system}] if system else []
    return Question([*messages, {"role": "user", "content": text}], context)


class PromptFormat:
    """The text around a question.

    Args:
        record: of data/text/rendering.py.
    Attributes:
        stop_text: what ends an answer besides the tokenizer's end token; empty if nothing does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]) -> None:
        self._tokenizer, self._record = tokenizer, record
        self._chat_template, self._worker = ChatTemplate(tokenizer, record.get("chat_template")), TemplateWorker()
        self.stop_text = self._find_stop_text().strip()

    @property
    def keeps_history(self) -> bool:
        """Whether a prompt begins with earlier questions and answers."""
        return bool(self._record["kind"] == CHAT)

    def ids(self, asked: Question) -> list[int]:
        """The token ids before the answer.

        Raises:
            UserError: the chat template refuses the conversation.
        """
        if self._record["kind"] == CHAT:
            messages = asked.messages
            if asked.context:
                last = f"{messages[-1]['content']}\n\n{asked.context}"
                messages = [*messages[:-1], {**messages[-1], "content": last}]
            text = self._fill_chat(messages, add_generation_prompt=True)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._record["kind"] == TEMPLATE:
            rendered = Rendered(self._segments(asked)[:-1])
        else:
            text = "\n".join(
                [*(message["content"] for message in asked.messages), *[asked.context] * bool(asked.context)]
            )
            rendered = Rendered([Segment(text, learned=True)], "text")
        [row] = encode([(0, rendered)], self._tokenizer, 10**9)
        return [int(token) for token in row.ids[:-1]]  # without the end token

    def _segments(self, asked: Question) -> list[Segment]:
        names = [field.name for field in dataclasses.fields(PromptTemplate)]
        template = PromptTemplate(**{name: self._record[name] for name in names})
        system = "".join(message["content"] for message in asked.messages if message["role"] == "system")
        fields = Fields(asked.messages[-1]["content"], "", asked.context, system)
        return template.fill(fields)

    def _fill_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            return self._chat_template.text(messages, self._worker, add_generation_prompt=add_generation_prompt)
        except BadRow as reason:
            raise UserError(f"The chat template cannot be filled: {reason}.") from reason

    def close(self) -> None:
        """End the process that fills chat templates; the next prompt starts it again."""
        self._worker.close()

    def _find_stop_text(self) -> str:
        if self._record["kind"] == TEMPLATE:
            return self._segments(question("?"))[-1].text
        if self._record["kind"] == CHAT:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
            return self._fill_chat(messages).partition(_MARK)[2]
        return ""


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


def read_questions(path: Path) -> list[tuple[dict[str, Any], Question]]:
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
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is not JSON ({error}). Give one object in each line.") from error
        row = {"prompt": row} if isinstance(row, str) else row
        if isinstance(row, dict) and (row.get("images") or row.get("image")):
            raise UserError(f"{path}:{number} shows images, and answers are generated to text alone.")
        asked = question_of(row)
        if asked is None:
            raise UserError(f"{path}:{number} has no question: give messages, or {', '.join(_INSTRUCTION)}.")
        found.append((row, asked))
    if not found:
        raise UserError(f"{path} has no prompts.")
    return found


def question_of(row: Any) -> Question | None:
    if not isinstance(row, dict):
        return None
    messages = row.get("messages")
    if isinstance(messages, list):
        known = all(
            isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        )
        while known and messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return Question(messages) if known and messages else None
    texts = [row[name] for name in _INSTRUCTION if isinstance(row.get(name), str) and row[name]]
    contexts = [row[name] for name in _CONTEXT if isinstance(row.get(name), str)]
    system = row.get("system") if isinstance(row.get("system"), str) else ""
    return question(texts[0], system=str(system), context="".join(contexts[:1])) if texts else None
