"""Fills chat templates in a separate process, so that a hostile or endless template can only end this process.

A template comes with the model, from people one does not know. transformers renders it in jinja2's sandbox, which keeps
it from reading and writing, but bounds neither its time nor its memory: the kernel does, here. Each line of stdin is a
request, each line of stdout its answer, both JSON.
"""

import json
import re
import resource
import signal
import sys
from functools import partial
from typing import Any

from fsdp_qlora.data.turns import (
    Conversation,
    Message,
    NotSplit,
    Span,
    learned_rows,
    left_out,
    with_arguments_as_text,
)

MEMORY_BYTES = 2 * 2**30  # besides what the process has when it is ready

# Notes on rows that are used.
APART = "chats of which turns are rows of their own: the chat template writes these in another way when others follow"
CUT = "the chat template leaves out a part of what the assistant says, such as its reasoning"
LEFT_OUT = "the chat template leaves out what the row has for: {}"

# Llama 3 writes the day into its system prompt. Tokens must be the same tomorrow, or the run could not be resumed.
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"rows": [(text, spans)], "notes"}, or {"error"}, or {"fatal"} for what every row would meet."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages = request["template"], request["messages"]
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    has_blocks = bool(_GENERATION.search(template))
    fill = partial(render_jinja_template, tools=request["tools"], chat_template=template, **request["variables"])

    def render(part: list[Message], *, add_generation_prompt: bool = False, **options: Any) -> tuple[str, list[Span]]:
        texts, blocks = fill(
            [part], add_generation_prompt=add_generation_prompt, return_assistant_tokens_mask=has_blocks, **options
        )
        return texts[0], blocks[0] if has_blocks else []

    try:
        try:
            whole = Conversation(render, messages, request["end_tokens"])
        except TypeError:  # some templates take the arguments of tool calls as text
            messages = with_arguments_as_text(messages)
            whole = Conversation(render, messages, request["end_tokens"])
        rows, num_cut, is_apart = learned_rows(whole, request["turns"], apart=request["apart"])
        notes = [LEFT_OUT.format(what) for what in left_out(messages, request["tools"], whole.text)]
        return {"rows": rows, "notes": [*notes, *[CUT] * bool(num_cut), *[APART] * is_apart]}
    except NotSplit as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"fatal": f"it is not valid (line {error.lineno}: {error.message})"}
    except MemoryError:
        return {"fatal": f"it took more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return {"error": f"the chat template refuses it: {reason} (--prompt_template takes another)"}


def limit_memory() -> None:
    """Let the process grow by MEMORY_BYTES at most."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    except (OSError, ValueError):  # not Linux, or less is allowed already
        pass


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401  before the limits

    # The default action of the alarm ends the process, also within one endless operation.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
