"""Notes down the prompt format of a run, in full, for whoever uses its adapter."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from fsdp_qlora.data.examples import Chat, Fields
from fsdp_qlora.data.formats import FORMATS
from fsdp_qlora.data.prompts import ChosenTemplate, PromptTemplate

TEMPLATE, CHAT, TEXT = "template", "chat", "text"  # kinds


def prompt_record(dataset_format: str, chosen: ChosenTemplate) -> dict[str, Any]:
    """What stands around the rows of a dataset, as JSON.

    Returns:
        kind: TEMPLATE, with `name` and the fields of PromptTemplate; CHAT, with the chat template in
        `chat_template` where it replaces the tokenizer's own; or TEXT, where nothing is added. What a format's rows
        hold is told from the annotation of its `read`.
    """
    row_format = FORMATS.get(dataset_format)
    content = get_type_hints(row_format.read).get("return") if row_format else None
    if content is Chat or (content is Fields and chosen.is_chat):
        return {"kind": CHAT, "chat_template": chosen.chat}
    if content is Fields and row_format is not None:
        template = chosen.prompt or row_format.template
        return {"kind": TEMPLATE, "name": chosen.name or dataset_format, **dataclasses.asdict(template)}
    return {"kind": TEXT}


def example_prompts(record: Mapping[str, Any]) -> dict[str, str]:
    """The text in front of an answer, with places for the row's content: for rows with context, and for those without.

    Args:
        record: of kind TEMPLATE.
    """
    names = [field.name for field in dataclasses.fields(PromptTemplate)]
    template = PromptTemplate(**{name: record[name] for name in names})
    filled = {}
    for title, context in (("with an input", "{input}"), ("without", "")):
        segments = template.fill(Fields("{instruction}", "", context=context), learn="assistant")
        filled[title] = segments[0].text
    if filled["with an input"].replace("{input}", "") == filled["without"]:
        filled.pop("with an input")
    return filled
