"""docs/data.md: every example is read in its format, and what is said to be learned is."""

import json
import re

import numpy as np
import pytest

from fsdp_qlora.config.objectives import TEXTS
from fsdp_qlora.data.batches.tokenization import encode
from fsdp_qlora.data.content import Chat
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.rendering import Renderer
from fsdp_qlora.data.text.templates import TEMPLATES, ChosenTemplate
from tests.data.conftest import WORKER
from tests.helpers.run import ROOT
from tests.helpers.tokenizers import spelled_tokenizer

PAGE = (ROOT / "docs" / "data.md").read_text()
EXAMPLES = re.findall(
    r"^\*\*`(\w+)`\*\*(?:(?!^\*\*`).)*?^```json\n(.*?)^```\n\nTrained on: (.*?)$",
    PAGE,
    re.M | re.S,
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}{% for c in "
    "m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_every_format_of_texts_has_an_example():
    assert {name for name, _, _ in EXAMPLES} == {
        name for name in FORMATS if FORMATS[name].row_kind == TEXTS
    }
    assert all(f"`{name}`" in PAGE for name in (*FORMATS, *TEMPLATES))


def test_the_agents_log_of_the_page_is_read():
    section = PAGE.split("### Agents' logs")[1].split("\n### ")[0]
    [example] = re.findall(r"^```json\n(.*?)^```\n", section, re.M | re.S)
    chat = FORMATS["messages"].read(json.loads(example))
    assert isinstance(chat, Chat) and chat.tools is not None
    assert [message["role"] for message in chat.messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    for name in (name for name, _, learned in EXAMPLES if "<call>" in learned):
        assert f"| `{name}` |" in section


@pytest.mark.parametrize(
    ("name", "example", "learned"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES]
)
def test_an_example_is_of_its_format_and_learns_what_the_page_says(name, example, learned):
    row = json.loads(example)
    assert RequestedFormat().find(list(row), [row]).dataset_format == name
    tokenizer = spelled_tokenizer("byte_level")
    renderer = Renderer(
        tokenizer, ChosenTemplate(chat=TEMPLATE), "assistant", FORMATS[name].template, [WORKER]
    )
    [rendered] = renderer.render(FORMATS[name].read(row))
    [found] = encode([(1, rendered)], tokenizer, 1000)
    if learned.startswith("tokens"):
        assert (np.flatnonzero(found.learned) + 1).tolist() == [
            int(number) for number in re.findall(r"\d+", learned)
        ]
    else:
        assert tokenizer.decode(found.ids[found.learned]) == learned.strip("`")
