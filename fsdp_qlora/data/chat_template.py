"""Chats become text through the tokenizer's chat template, filled by a process of its own: template_worker.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.examples import BadRow, Chat, Segment
from fsdp_qlora.errors import UserError

SECONDS_PER_CHAT = 10
_ROOT = Path(__file__).resolve().parents[2]


class ChatTemplate:
    """The chat template of a tokenizer, or one that replaces it. The process starts with the first chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._worker: subprocess.Popen[str] | None = None
        self._variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._end_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()

    def fill(self, chat: Chat, *, learn: str) -> tuple[list[list[Segment]], tuple[str, ...]]:
        """The text of a chat, and what of it is learned: mostly as one row. And notes on it.

        Turns that the template writes in another way when others follow are rows of their own, which end with them.

        Args:
            learn: "assistant" for the assistant's turns, "last" for the last of them, "all" for all text; without
                those of weight 0.
        Raises:
            BadRow: the template refuses the chat, or what is learned cannot be told.
            UserError: there is no template, or it is not valid, does not end, or takes too much memory.
        """
        turns = chat.learned_turns(learn)
        if learn == "all":  # then the turns are those that are not learned
            turns = sorted(set(chat.learned_turns("assistant")) ^ set(Chat(chat.messages).learned_turns("assistant")))
        elif not turns:
            raise BadRow("no assistant turn has a weight above 0, so nothing to learn")
        reply = self._ask(chat, turns, apart=learn != "all")
        if "error" in reply:
            raise BadRow(reply["error"])
        if "fatal" in reply:
            raise UserError(f"The chat template cannot be used: {reply['fatal']}. {_CURE}")
        rows = [_split(text, spans, inside=learn != "all") for text, spans in reply["rows"]]
        return rows, tuple(reply["notes"])

    def _ask(self, chat: Chat, turns: list[int], *, apart: bool) -> dict[str, Any]:
        try:
            template = self._template or self._tokenizer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise UserError(f"The model's tokenizer has no chat template. {_CURE}") from error
        request = {
            "template": template,
            "messages": chat.messages,
            "tools": chat.tools,
            "turns": turns,
            "apart": apart,
            "variables": self._variables,
            "end_tokens": self._end_tokens,
            "seconds": SECONDS_PER_CHAT,
        }
        try:
            line = json.dumps(request)
        except TypeError as error:
            raise BadRow(f"tools or messages hold what JSON has no word for ({error})") from error
        worker = self._worker = self._worker or _start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            reply = worker.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self._worker = None
            worker.wait()
            raise UserError(
                f"The chat template did not end within {SECONDS_PER_CHAT} s for a chat of {len(chat.messages)} "
                f"messages (its process ended with {worker.returncode}). {_CURE}"
            )
        answer: dict[str, Any] = json.loads(reply)
        return answer


_CURE = (
    "Give another with --prompt_template: chatml, user_assistant, or the path of a .jinja file; or use a model whose "
    "tokenizer has one, such as an instruct model."
)


def _start() -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_qlora.data.template_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _split(text: str, spans: list[list[int]], *, inside: bool) -> list[Segment]:
    """The text in segments: what is within the spans is learned, or what is not."""
    segments, position = [], 0
    for start, end in sorted(spans):
        segments += [Segment(text[position:start], not inside), Segment(text[start:end], inside)]
        position = end
    segments.append(Segment(text[position:], not inside))
    return [segment for segment in segments if segment.text]
