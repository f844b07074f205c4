"""Prompt templates: an instruction with its response becomes text.

A new template is a row of TEMPLATES.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fsdp_qlora.data.content import Chat, Fields, Segment
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named

# Names in braces that a template may have -> the field of `Fields`. What else is in braces is text.
PLACEHOLDERS = (
    dict.fromkeys(("instruction", "question", "prompt"), "instruction")
    | dict.fromkeys(("input", "context"), "context")
    | dict.fromkeys(("output", "response", "answer", "completion"), "response")
    | {"system": "system"}
)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# the line between the two variants in a template's file
_VARIANTS = re.compile(r"^===+ *\n", re.MULTILINE)


@dataclass(frozen=True)
class PromptTemplate:
    """The text around the fields of a row.

    The response follows, unless the template has a place for it.
    """

    with_context: str
    without_context: str
    """For rows whose context (Alpaca's input) is absent or empty."""
    system_with_context: str = ""
    system_without_context: str = ""
    """The value of {system} in rows without a system prompt."""

    def fill(self, fields: Fields) -> list[Segment]:
        """The row's text: prompts, and responses, which are learned.

        Text that the template has after a response is learned with it.
        """
        turns = [(*turn, "") for turn in fields.history]
        turns.append((fields.instruction, fields.response, fields.context))
        system = fields.system
        if not system:
            system = self.system_with_context if fields.context else self.system_without_context
        segments: list[Segment] = []
        for turn_number, (instruction, response, context) in enumerate(turns, start=1):
            template = self.with_context if context else self.without_context
            values = {
                "instruction": instruction,
                "context": context,
                "response": response,
                "system": system,
            }
            before, after = self._split(template, values, is_first=turn_number == 1)
            segments += [
                Segment(before, learned=False),
                Segment(response + after, learned=True, ends=turn_number < len(turns)),
            ]
        return segments

    def _split(self, template: str, values: dict[str, str], *, is_first: bool) -> tuple[str, str]:
        """(the text before the response, the text after it).

        The system prompt is in the first turn only.
        """
        head, _, tail = template.partition("{response}")
        if is_first and values["system"] and "{system}" not in template:
            head = "{system}\n\n" + head
        if not is_first or not values["system"]:
            # With the blank lines behind it, or the text would begin with them.
            head = re.sub(r"\{system\}\s*", "", head)
        if not is_first:
            head = "\n\n" + head
        return _substitute(head, values), _substitute(tail, values)


def _substitute(template: str, values: dict[str, str]) -> str:
    # One pass: braces within a row's text are text.
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


# The templates of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py); the response
# follows the colon directly. A row's own system prompt takes the place of the first paragraph.
_ALPACA = PromptTemplate(
    "{system}\n\n### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:",
    "{system}\n\n### Instruction:\n{instruction}\n\n### Response:",
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.",
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.",
)

# question_answer is that of the 2024 program (AnswerDotAI/fsdp_qlora, train.py), for its datasets
# sql and orca_math.
TEMPLATES: dict[str, PromptTemplate] = {
    "alpaca": _ALPACA,
    "question_answer": PromptTemplate(
        "###Context:\n{context}\n###Question:\n{instruction}\n###Answer:\n",
        "###Question:\n{instruction}\n###Answer:\n",
    ),
    "plain": PromptTemplate("{instruction}\n{context}\n", "{instruction}\n"),
    "vicuna": PromptTemplate(
        "{system}\n\nUSER: {instruction}\n{context} ASSISTANT:",
        "{system}\n\nUSER: {instruction} ASSISTANT:",
    ),
}

# Chat templates in Jinja, for models that bring none.
CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
        "'<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "user_assistant": (
        "{{ bos_token or '' }}{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ 'Assistant: ' + message.content + eos_token + '\\n' }}{% else %}"
        "{{ message.role.capitalize() + ': ' + message.content + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}

CHAT = "chat"  # the model's own chat template, for instructions too


@dataclass(frozen=True)
class ChosenTemplate:
    """The template that --prompt_template names.

    Without it each format has its own, and chats have the model's.
    """

    name: str | None = None
    prompt: PromptTemplate | None = None
    """For instructions."""
    chat: str | None = None
    """A chat template that replaces the model's, for chats and instructions."""

    @property
    def is_chat(self) -> bool:
        return self.name == CHAT or self.chat is not None


def find_template(name: str | None) -> ChosenTemplate:
    """Find a template by name or file.

    Args:
        name: a key of TEMPLATES or CHAT_TEMPLATES, "chat", the path of a text file, or of a chat
            template that ends in .jinja.
    Raises:
        UserError: there is no such name or file, or the template lacks a place for the instruction.
    """
    if name is None or name == CHAT:
        return ChosenTemplate(name)
    if name in TEMPLATES:
        return ChosenTemplate(name, prompt=TEMPLATES[name])
    if name in CHAT_TEMPLATES:
        return ChosenTemplate(name, chat=CHAT_TEMPLATES[name])
    path = Path(name).expanduser()
    try:
        with open_named(path, "r") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        names = ", ".join([*TEMPLATES, *CHAT_TEMPLATES, CHAT])
        raise UserError(
            f"prompt_template: {name} is neither one of {names} nor a file that can be read "
            f"({reason})."
        ) from error
    return (
        ChosenTemplate(name, chat=text)
        if path.suffix in (".jinja", ".j2")
        else _parse_template(text, name)
    )


def _parse_template(text: str, name: str) -> ChosenTemplate:
    """Parse a template's file: text with {instruction} and so on.

    What follows a line of === is for rows without context.
    """
    variants = _VARIANTS.split(text)
    if len(variants) > 2:
        raise UserError(
            f"prompt_template {name}: it may have at most one line of ===, between two variants."
        )
    for variant in variants:
        names = {PLACEHOLDERS.get(word) for word in _PLACEHOLDER.findall(variant)}
        unknown = [word for word in _PLACEHOLDER.findall(variant) if word not in PLACEHOLDERS]
        if unknown or "instruction" not in names:
            wrong = f"{{{unknown[0]}}} is not known" if unknown else "it has no {instruction}"
            placeholders = ", ".join(f"{{{word}}}" for word in PLACEHOLDERS)
            raise UserError(f"prompt_template {name}: {wrong}. Known: {placeholders}.")
    first, last = (
        _PLACEHOLDER.sub(lambda word: f"{{{PLACEHOLDERS[word[1]]}}}", part)
        for part in (variants[0].removesuffix("\n"), variants[-1].removesuffix("\n"))
    )
    return ChosenTemplate(name, prompt=PromptTemplate(first, last))


def as_chat(fields: Fields) -> Chat:
    """An instruction as a conversation, for a chat template.

    The context follows the instruction, and then comes the response, if there is one.
    """
    messages = []
    if fields.system:
        messages.append({"role": "system", "content": fields.system})
    question = fields.instruction
    if fields.context:
        question += f"\n\n{fields.context}"
    for instruction, response in (*fields.history, (question, fields.response)):
        messages += [
            {"role": "user", "content": instruction},
            {"role": "assistant", "content": response},
        ]
    return Chat(
        messages if fields.response else messages[:-1], template_kwargs=fields.template_kwargs
    )
