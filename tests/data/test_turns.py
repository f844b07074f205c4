# ruff: noqa: E501
"""Where assistant turns stand in texts of chat templates with the habits of well-known families."""

from functools import partial
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_qlora.data.content import Chat
from fsdp_qlora.data.text.chat_template import answer
from fsdp_qlora.data.text.learned_turns import APART, CUT, LEFT_OUT

pytestmark = pytest.mark.quick

END_TOKENS = [
    "<s>",
    "</s>",
    "<end>",
    "<return>",
    "<user>",
    "<bot>",
    "<think>",
    "</think>",
    "<call>",
    "</call>",
]

# {bot}: how a turn of the assistant is written.
CHAT = "{{{{ bos_token }}}}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{bot}{{% else %}}<user>{user}<end>\n{{% endif %}}{{% endfor %}}{end}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
BOT = "<bot>{{ m.content }}<end>\n"
USER = "{{ m.content }}"
PROMPT = "<bot>"
IN_LAST_QUESTION = "{% set last = messages[loop.index:] | selectattr('role', 'eq', 'user') | list | length == 0 %}{{ 'BE KIND ' if last else '' }}{{ m.content }}"
REASONING = "{% set text = m.content.split('</think>')[-1].lstrip() %}{% set thought = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content or m.reasoning_content else '' %}<bot>"


def template(*, bot: str = BOT, user: str = USER, end: str = "", prompt: str = PROMPT) -> str:
    return CHAT.format(bot=bot, user=user, end=end, prompt=prompt)


TEMPLATES = {
    "plain": template(),
    "trims white space": template(
        bot="<bot>{{ m.content | trim }}<end>\n", user="{{ m.content | trim }}"
    ),
    "ends the text with a token of its own": template(
        end="{% if not add_generation_prompt %}</s>{% endif %}"
    ),
    "ends the last turn with another token": template(
        bot="<bot>{{ m.content }}{{ '<return>' if loop.last else '<end>' }}"
    ),
    "writes the system prompt into the last question": template(user=IN_LAST_QUESTION),
    "has no prompt and moves the system prompt": template(
        bot="{{ m.content }}</s>",
        prompt="",
        user=IN_LAST_QUESTION,
    ),
    "keeps reasoning in the last turn alone": template(
        bot=REASONING + "{% if loop.last %}<think>{{ thought }}</think>{% endif %}{{ text }}<end>\n"
    ),
    "ends turns with words": template(
        bot="<bot>{% if loop.last %}<think></think>{% endif %}{{ m.content }}[end]",
    ),
    "opens a block for reasoning in the prompt": template(
        bot=REASONING
        + "{% if loop.last %}<think>{{ thought }}</think>{% endif %}{{ text }}<end>\n",
        prompt="<bot>{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}",
    ),
    "leaves reasoning out": template(bot=REASONING + "{{ text }}<end>\n", prompt="<bot><think>"),
    "begins turns with the first letters of the prompt's block": template(
        prompt="<bot><think>", bot="<bot>{{ m.content }}</s>"
    ),
    "has no end token": template(bot="<bot>{{ m.content }}", user="{{ m.content }}"),
    "takes arguments as text": template(
        bot="<bot>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}<end>\n",
        user="{{ tools[0].name + ' ' if tools and loop.first else '' }}{{ m.content }}",
    ),
    # As gpt-oss: reasoning before a call is there until an answer follows, that of an answer in the
    # last turn alone.
    "keeps the reasoning of calls until the answer": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{% set ns = namespace(answered=false) %}{% for later in messages[loop.index:] %}{% if later.role == 'assistant' and not later.tool_calls %}{% set ns.answered = true %}{% endif %}{% endfor %}{% set thought = m.thinking or m.content %}{% if thought and not ns.answered %}<bot>thinks:{{ thought }}<end>{% endif %}<bot>calls:{{ m.tool_calls[0].function.name }}<call>{% elif loop.last and not add_generation_prompt %}{% if m.thinking %}<bot>thinks:{{ m.thinking }}<end>{% endif %}<bot>says:{{ m.content }}<return>{% else %}<bot>says:{{ m.content }}<end>{% endif %}{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    ),
    # As the newest of Gemma 4: no prompt behind a result, and words beside a call end a turn that
    # nothing continues.
    "writes the words of a call behind its result": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<bot>' if loop.first or loop.previtem.role == 'user' }}{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}{% endfor %}{% set result = loop.nextitem is defined and loop.nextitem.role == 'tool' %}{% if result %}{{ '</call>' + loop.nextitem.content }}{% endif %}{{ m.content }}{% set goes_on = result and messages[loop.index + 1] is defined %}{% if m.tool_calls and not result %}</call>{% elif not goes_on and (m.content or not result) %}<end>\n{% endif %}{% elif m.role == 'user' %}<user>{{ m.content }}<end>\n{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<bot>{% endif %}"
    ),
    "closes an empty block in the prompt": template(
        bot="<bot>{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}<end>\n",
        prompt="<bot><think></think>",
    ),
    "opens a block that turns have without a line": template(
        bot="<bot><think>{{ m.thinking }}</think>{{ m.content }}<end>\n", prompt="<bot><think>\n"
    ),
    "ends the prompt with what no turn has": template(prompt="<bot><now>\n"),
    "has reasoning in parts": template(
        bot="<bot>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}<end>"
    ),
    "writes any role": template(user="{{ m.role + ':' + m.content }}"),
    "knows no developer": template(
        user="{{ m.role + ':' + m.content if m.role != 'developer' else raise_exception('unknown role') }}"
    ),
    "drops it": template(user="{{ m.role + ':' + m.content if m.role != 'developer' }}"),
    "wants OpenAI's tools": template(user="{{ tools[0].function.name + ' ' }}{{ m.content }}"),
    "writes one call alone": template(
        bot="<bot>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}<end>\n"
    ),
    "wants a question": "{{ '' if messages else raise_exception('no message') }}" + template(),
    "wants alternate roles": template(
        user="{% if loop.index0 % 2 %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}"
    ),
}


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def learned(name: str, *asked: Any, **more: Any) -> tuple[list[list[str]], list[str]]:
    """The learned texts of each row that `rendered` gives, and the notes; or the refusal."""
    reply = rendered(name, *asked, **more)
    if "error" in reply:
        return [], [reply["error"]]
    rows = [[text[start:end] for start, end, _ in spans] for text, spans in reply["rows"]]
    return rows, reply["notes"]


def rendered(
    name: str,
    messages: list[dict[str, Any]],
    learn: str = "assistant",
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The worker's answer for a chat."""
    return answer(
        {
            "template": TEMPLATES[name],
            "messages": messages,
            "tools": tools,
            "turns": Chat(messages).learned_turns(learn),
            "apart": True,
            "variables": {"bos_token": "<s>", "eos_token": "</s>"},
            "given": [],
            "end_tokens": END_TOKENS,
        }
    )


TWO = turns("hi", "go on", "so", "no")
THOUGHT = turns("hi", "<think>hm</think>go on", "so", "<think>ah</think>no")
FIELDS = [
    {**turn, **({"reasoning_content": "hm"} if turn["role"] == "assistant" else {})} for turn in TWO
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [TWO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, *turns("2", "it is 2")]
ONE_ROW = [["go on<end>", "no<end>"]]
IN_ROWS = [["<think>hm</think>go on<end>"], ["<think>ah</think>no<end>"]]

WHITE_SPACE = turns(" hi ", " go on\n", "so ", "\nno")
ANSWER_FIRST = turns("go on", "so", "no", first="assistant")
OWN_END = "ends the text with a token of its own"
LAST_ALONE = "keeps reasoning in the last turn alone"
OPENS = "opens a block for reasoning in the prompt"
# name of the template, chat -> what is learned of each row, without a note.
EXACT: dict[tuple[str, str], tuple[Any, list[list[str]]]] = {
    ("plain", "two turns"): (TWO, ONE_ROW),
    ("plain", "words of the template"): (turns("bot", "b", "end", "e"), [["b<end>", "e<end>"]]),
    ("plain", "all the same"): (turns("a", "a", "a", "a"), [["a<end>", "a<end>"]]),
    ("plain", "the assistant first"): (ANSWER_FIRST, ONE_ROW),
    ("plain", "two in a row"): (
        [*TWO[:2], *turns("more", "so", "no", first="assistant")],
        [["go on<end>", "more<end>", "no<end>"]],
    ),
    ("plain", "a question at the end"): (TWO[:3], [["go on<end>"]]),
    ("trims white space", "white space"): (WHITE_SPACE, ONE_ROW),
    ("plain", "white space"): (WHITE_SPACE, [[" go on\n<end>", "\nno<end>"]]),
    (OWN_END, "two turns"): (TWO, [["go on<end>", "no<end>\n</s>"]]),
    (OWN_END, "white space"): (turns("hi", " go on\n", "so"), [[" go on\n<end>"]]),
    (LAST_ALONE, "no reasoning"): (TWO, [["go on<end>", "<think></think>no<end>"]]),
    ("ends turns with words", "no reasoning"): (TWO, [["go on[end]", "<think></think>no[end]"]]),
    (LAST_ALONE, "in the last turn"): ([*TWO[:3], THOUGHT[3]], [["go on<end>", IN_ROWS[1][0]]]),
    (OPENS, "no reasoning"): (TWO, [["go on<end>", "</think>no<end>"]]),
    ("leaves reasoning out", "no reasoning"): (TWO, ONE_ROW),
    ("begins turns with the first letters of the prompt's block", "tags"): (
        turns("hi", "<t>a", "so", "</t>"),
        [["<t>a</s>", "</t></s>"]],
    ),
    ("has no end token", "two turns"): (TWO, [["go on", "no"]]),
    ("takes arguments as text", "calls"): (
        CALLS,
        [['<call>add{"a": 1}</call><end>', "it is 2<end>"]],
    ),
    ("wants a question", "the assistant first"): (ANSWER_FIRST, ONE_ROW),
}
# The same, of turns that are rows of their own.
IN_ROWS_APART: dict[tuple[str, str], tuple[Any, list[list[str]]]] = {
    ("ends the last turn with another token", "two turns"): (
        TWO,
        [["go on<return>"], ["no<return>"]],
    ),
    ("writes the system prompt into the last question", "two turns"): (
        TWO,
        [["go on<end>"], ["no<end>"]],
    ),
    ("has no prompt and moves the system prompt", "two turns"): (TWO, [["go on</s>"], ["no</s>"]]),
    (LAST_ALONE, "in the text"): (THOUGHT, IN_ROWS),
    (LAST_ALONE, "in a field"): (
        FIELDS,
        [["<think>hm</think>go on<end>"], ["<think>hm</think>no<end>"]],
    ),
    (OPENS, "in the text"): (THOUGHT, [["hm</think>go on<end>"], ["ah</think>no<end>"]]),
}
CASES: dict[tuple[str, str], tuple[Any, list[list[str]], list[str]]] = {
    **{case: (messages, rows, []) for case, (messages, rows) in EXACT.items()},
    **{case: (messages, rows, [APART]) for case, (messages, rows) in IN_ROWS_APART.items()},
    ("plain", "reasoning in a field"): (FIELDS, ONE_ROW, [CUT]),
    ("leaves reasoning out", "in the text"): (THOUGHT, ONE_ROW, [CUT]),
    ("plain", "calls"): (
        CALLS,
        [],
        ["turn 2: the chat template writes no tool calls; --prompt_template takes another"],
    ),
    ("writes one call alone", "two calls"): (
        [TWO[0], {**CALLS[1], "tool_calls": [CALL, CALL]}],
        [],
        [
            "turn 2: the chat template writes one tool call, and there are 2; "
            "--prompt_template takes another"
        ],
    ),
    ("wants alternate roles", "the assistant first"): (
        TWO[1:],
        [],
        ["the chat template refuses it: roles must alternate (--prompt_template takes another)"],
    ),
}


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_learned_tokens_are_exact_for_every_template_style(name, chat):
    messages, expected, notes = CASES[name, chat]
    assert learned(name, messages) == (expected, notes)


def thought(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "thinking": "hm", **more}


RESULT = {"role": "tool", "content": "2"}
SAYS = {"role": "assistant", "content": "it is 2"}
CALLING = [TWO[0], thought("", tool_calls=[CALL]), RESULT, thought("it is 2")]
WORDS = [TWO[0], {**SAYS, "content": "let me see", "tool_calls": [CALL]}, RESULT, SAYS]
KEEPS = "keeps the reasoning of calls until the answer"
BEHIND = "writes the words of a call behind its result"
# name of the template, chat -> what is learned of each row. All are behind the prompts of
# apply_chat_template.
BEHIND_PROMPTS: dict[tuple[str, str], tuple[Any, Any]] = {
    (KEEPS, "reasoning"): (
        CALLING,
        ["thinks:hm<end><bot>calls:add<call>", "thinks:hm<end><bot>says:it is 2<return>"],
    ),
    (KEEPS, "words"): (
        WORDS,
        ["thinks:let me see<end><bot>calls:add<call>", "says:it is 2<return>"],
    ),
    (KEEPS, "two calls, and more"): (
        [*CALLING[:3], *CALLING[1:], TWO[2], thought("no")],
        [
            *["thinks:hm<end><bot>calls:add<call>"] * 2,
            "thinks:hm<end><bot>says:it is 2<return>",
            "thinks:hm<end><bot>says:no<return>",
        ],
    ),
    (BEHIND, "reasoning"): (
        CALLING,
        ["<think>hm</think><call>add</call>", "<think>hm</think>it is 2<end>"],
    ),
    (BEHIND, "words"): (WORDS, ["<call>addlet me see</call>", "it is 2<end>"]),
    (BEHIND, "words and reasoning"): (
        [*WORDS[:3], thought("it is 2")],
        ["<call>addlet me see</call>", "<think>hm</think>it is 2<end>"],
    ),
    ("closes an empty block in the prompt", "no reasoning"): (TWO, ["go on<end>", "no<end>"]),
    ("opens a block that turns have without a line", "no reasoning"): (
        TWO,
        ["</think>go on<end>", "</think>no<end>"],
    ),
    ("ends the prompt with what no turn has", "two turns"): (TWO, ["go on<end>", "no<end>"]),
    ("has reasoning in parts", "in a field"): (
        [TWO[0], thought("no")],
        ["[THINK]hm[/THINK]no<end>"],
    ),
}


@pytest.mark.parametrize(("name", "chat"), BEHIND_PROMPTS)
def test_each_turn_is_learned_behind_the_prompt_that_the_model_gets(name, chat):
    messages, expected = BEHIND_PROMPTS[name, chat]
    rows = rendered(name, messages)["rows"]
    found = {
        turn: (text[:start], text[start:end]) for text, spans in rows for start, end, turn in spans
    }
    assert [answer for _, (_, answer) in sorted(found.items())] == expected
    fill = partial(
        render_jinja_template,
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        add_generation_prompt=True,
    )
    assert {turn: prompt for turn, (prompt, _) in found.items()} == {
        turn: fill([messages[:turn]])[0][0] for turn in Chat(messages).learned_turns("assistant")
    }


def test_reasoning_stays_where_the_prompt_has_an_empty_block():
    text = rendered("closes an empty block in the prompt", [TWO[0], FIELDS[3]])["rows"][0][0]
    assert text == "<s><user>hi<end>\n<bot><think>hm</think>no<end>\n"


def test_the_developer_is_the_system_where_a_template_has_none():
    messages = [{"role": "developer", "content": "be kind"}, *TWO[:2]]
    for name, role in (
        ("writes any role", "developer"),
        ("knows no developer", "system"),
        ("drops it", "system"),
    ):
        assert (
            rendered(name, messages)["rows"][0][0]
            == f"<s><user>{role}:be kind<end>\n<user>user:hi<end>\n<bot>go on<end>\n"
        )


def test_tools_have_the_form_that_the_template_reads():
    assert learned("wants OpenAI's tools", TWO, tools=[{"name": "add"}]) == (ONE_ROW, [])


def test_only_the_last_turn_is_learned_where_that_is_asked_for():
    assert learned(LAST_ALONE, THOUGHT, "last") == ([IN_ROWS[1]], [])
    assert learned(LAST_ALONE, [*THOUGHT, THOUGHT[0]], "last") == ([IN_ROWS[1]], [APART])


def test_fields_a_template_ignores_are_named():
    system = {"role": "system", "content": "be kind"}
    tools = [{"name": "add"}]
    TEMPLATES["drops"] = template(user="{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    try:
        found = learned("drops", [system, *TWO], tools=tools)
    finally:
        del TEMPLATES["drops"]
    assert found == (ONE_ROW, [LEFT_OUT.format("system"), LEFT_OUT.format("tools")])
    assert learned("takes arguments as text", [system, *CALLS], tools=tools)[1] == []
