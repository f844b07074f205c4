"""Chat templates that write tool calls, and tiny tokenizers with their tokens."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parent / "chat_templates"
# Templates with the calls of families whose own are not kept here.
_AROUND = (
    "{{% for m in messages %}}<|turn|>{{{{ m.role }}}}\n"
    "{{% if loop.first and tools %}}{{{{ tools | tojson }}}}{{% endif %}}"
    "{{% if m.tool_calls %}}{calls}{{% elif m.role == 'tool' %}}"
    "<result>{{{{ m.content }}}}</result>"
    "{{% else %}}{{{{ m.content }}}}{{% endif %}}<|stop|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|turn|>assistant\n{{% endif %}}"
)
_EACH = "{{% for c in m.tool_calls %}}{}{{% endfor %}}"
_NAME = "{{ c.function.name }}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"


def _small(calls: str) -> str:
    return _AROUND.format(calls=calls)


_CALL = {
    "Llama 3": (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        '{% set c = m.tool_calls[0] %}{"name": "' + _NAME + '", "parameters": ' + _ARGUMENTS + "}"
    ),
    "Mistral v3": (
        "[TOOL_CALLS] [{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]'
    ),
    "Mistral v13": _EACH.format(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}"),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>"
        + _EACH.format(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|>"
        + _EACH.format(
            f"<|tool_call_begin|>functions.{_NAME}:{{{{ loop.index0 }}}}"
            f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>"
    ),
    "Command R7B": (
        "<|START_ACTION|>[{% for c in m.tool_calls %}"
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}{{ "" if loop.last else "," }}'
        "{% endfor %}]<|END_ACTION|>"
    ),
    "LFM2": (
        "<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]"
        "<|tool_call_end|>"
    ),
}


class ToolTemplate(NamedTuple):
    """A chat template, with what is known of it."""

    text: str
    form: str
    """The name of the row of FORMS."""
    ends: set[str]
    """The tokens that end turns."""
    control: str
    """Its control tokens, with spaces in between; those before a slash alone are special tokens."""


def _of_file(name: str, form: str, ends: set[str], control: str) -> ToolTemplate:
    return ToolTemplate((_FOLDER / f"{name}.jinja").read_text(), form, ends, control)


_CHATML = "<|im_end|> <|im_start|> / <tool_call> </tool_call> <think> </think>"
_QWEN_3 = f"{_CHATML} <tool_response> </tool_response>"
_DEEPSEEK = (
    "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> / <｜tool▁calls▁begin｜> "
    "<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <think> "
    "</think> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
    "<｜tool▁outputs▁end｜>"
)
_IN_TAGS = "functions and parameters in tags"
TEMPLATES = {
    "Qwen2.5": _of_file("qwen2_5", "JSON in tags", {"<|im_end|>"}, _CHATML),
    "Qwen3": _of_file("qwen3", "JSON in tags", {"<|im_end|>"}, _QWEN_3),
    "Qwen3.5": _of_file("qwen3_5_think", _IN_TAGS, {"<|im_end|>"}, _QWEN_3),
    "gpt-oss": _of_file(
        "gptoss",
        "harmony",
        {"<|return|>", "<|call|>", "<|end|>"},
        "<|return|> <|start|> <|message|> <|end|> <|call|> <|channel|> <|constrain|> /",
    ),
    "GLM 4.5": _of_file(
        "glm4moe",
        "keys and values in tags",
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
        "<|endoftext|> [gMASK] <sop> <|user|> <|assistant|> <|observation|> <|system|> / "
        "<tool_call> </tool_call> <think> </think> <arg_key> </arg_key> <arg_value> </arg_value>",
    ),
    "DeepSeek-V3": _of_file("deepseekv3", "DeepSeek's marks", {"<｜end▁of▁sentence｜>"}, _DEEPSEEK),
    "Gemma 4": _of_file(
        "gemma4_v5",
        "names and texts in Gemma's marks",
        {"<eos>", "<turn|>", "<|tool_response>"},
        "<eos> <bos> <|turn> <turn|> <|tool_response> <tool_response|> <|tool_call> <tool_call|> "
        '<|tool> <tool|> <|"|> <|channel> <channel|> /',
    ),
}
_SMALL_FORMS = {
    "Llama 3": ("JSON alone", "<|python_tag|> /"),
    "Mistral v3": ("a list behind [TOOL_CALLS]", "[TOOL_CALLS] /"),
    "Mistral v13": ("names behind [TOOL_CALLS]", "[TOOL_CALLS] [ARGS] /"),
    "DeepSeek V3.1": ("DeepSeek's marks", _DEEPSEEK),
    "Kimi K2": ("Kimi's marks", "<|tool_call_begin|> / <|tool_call_end|>"),
    "Command R7B": ("JSON in Cohere's marks", "/ <|START_ACTION|> <|END_ACTION|>"),
    "LFM2": ("Python calls", "<|tool_call_start|> <|tool_call_end|> /"),
}
TEMPLATES |= {
    name: ToolTemplate(_small(_CALL[name]), form, {"<|stop|>"}, f"<|stop|> <|turn|> {control}")
    for name, (form, control) in _SMALL_FORMS.items()
}


def tokenizer_of(template: ToolTemplate) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the control tokens of a template, of which the first is its eos."""
    special, _, others = template.control.partition("/")
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special.split())
    backend.add_tokens(others.split())
    end = special.split()[0]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        additional_special_tokens=special.split()[1:],
    )
    tokenizer.chat_template = template.text
    return tokenizer
