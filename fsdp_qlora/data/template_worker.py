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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

MEMORY_BYTES = 2 * 2**30  # besides what the process has when it is ready

Message = dict[str, Any]
Span = tuple[int, int]

# Llama 3 writes the day into its system prompt. Tokens must be the same tomorrow, or the run could not be resumed.
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') }}{% endmacro %}\n"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NotSplit(ValueError):
    """What is learned of a turn cannot be told from the rendered text. The message is the reason."""


def turn_spans(
    render: Callable[..., str], messages: list[Message], turns: Sequence[int], full: str, end_tokens: Sequence[str]
) -> list[Span]:
    """Where the assistant's turns stand in the rendered conversation.

    A turn begins where the model begins to write: behind the text of the messages before it with the prompt for a
    generation. It ends with its end token, or where the text of the messages up to it ends.

    Args:
        render: (messages, add_generation_prompt=bool) -> text.
        turns: places of the turns in `messages`.
        full: the text of all messages.
        end_tokens: tokens after which a model stops; white space that the template writes behind one is not learned.
    Raises:
        NotSplit: the text before a turn, or that up to its end, does not begin the whole text.
    """
    spans = []
    for turn in turns:
        content = str(messages[turn].get("content") or "").strip()
        start = _start(render, messages[:turn], content, full, turn)
        end = _end(render, messages[: turn + 1], content, full, start) if turn + 1 < len(messages) else len(full)
        if end is None or end < start:
            raise NotSplit(_reason(turn))
        body = full[start:end].rstrip()
        spans.append((start, start + len(body) if body.endswith(tuple(end_tokens)) else end))
    return spans


def _start(render: Callable[..., str], before: list[Message], content: str, full: str, turn: int) -> int:
    prompt = render(before, add_generation_prompt=True)
    if full.startswith(prompt):
        return len(prompt)
    # The prompt opens a block for reasoning that this turn does not have: the turn begins where the two part.
    head = render(before, add_generation_prompt=False)
    same = next((i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b), min(len(prompt), len(full)))
    start = full.find(content, len(head)) if content and full.startswith(head) else -1
    if not 0 <= start <= same:
        raise NotSplit(_reason(turn))
    return start


def _end(render: Callable[..., str], until: list[Message], content: str, full: str, start: int) -> int | None:
    text = render(until, add_generation_prompt=False)
    if full.startswith(text):
        return len(text)
    # As the last turn it has a block for reasoning, say, that earlier ones do not have: look for its text and what
    # the template writes behind it.
    if not content or content not in text:
        return None
    written = text[text.rindex(content) :]
    return start + len(written) if full.startswith(written, start) else None


def _reason(turn: int) -> str:
    return (
        f"turn {turn + 1}: the chat template writes this turn in another way when others follow, so what is learned "
        "cannot be told; --learn last or all can"
    )


def generation_spans(blocks: Sequence[Span], messages: list[Message], turns: Sequence[int]) -> list[Span] | None:
    """The blocks that the template marks as generated, for these turns; None if there is not one for each turn."""
    speakers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    by_turn = dict(zip(speakers, blocks, strict=False))
    return [by_turn[turn] for turn in turns] if len(blocks) == len(speakers) else None


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"text", "spans"} of the learned parts, or {"error"}, or {"fatal"} for what every row would meet."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages, turns = request["template"], request["messages"], request["turns"]
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    fill = partial(render_jinja_template, tools=request["tools"], chat_template=template, **request["variables"])

    def render(part: list[Message], *, add_generation_prompt: bool) -> str:
        return fill([part], add_generation_prompt=add_generation_prompt)[0][0]

    try:
        has_blocks = bool(_GENERATION.search(template)) and bool(turns)
        texts, blocks = fill([messages], return_assistant_tokens_mask=has_blocks)
        spans = generation_spans(blocks[0], messages, turns) if has_blocks else None
        if spans is None:
            spans = turn_spans(render, messages, turns, texts[0], request["end_tokens"])
        return {"text": texts[0], "spans": spans}
    except NotSplit as error:
        return {"error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"fatal": f"it is not valid (line {error.lineno}: {error.message})"}
    except MemoryError:
        return {"fatal": f"it took more than {MEMORY_BYTES >> 30} GiB of memory"}
    except Exception as error:  # a template can raise anything
        return {"error": f"the chat template refuses it: {' '.join(str(error).split())[:200] or type(error).__name__}"}


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
