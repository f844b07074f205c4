"""A chat with a loaded model in a terminal."""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp_qlora.data.content import Chat
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.run.open_model import LoadedModel
from fsdp_qlora.training.generation.prompt_format import EncodedPrompt
from fsdp_qlora.utils.errors import UserError

_IDLE = datetime.timedelta(days=7)  # how long a chat waits for its user
_IMAGE = "/image"  # begins a line with an image's path
_HELP = (
    "Ctrl-D ends the chat, an empty line clears its history, "
    f"{_IMAGE} FILE shows an image with the next question."
)


class _Turn(NamedTuple):
    role: str
    text: str
    images: tuple[Path, ...] = ()


def chat(model: LoadedModel, system: str) -> None:
    """Answer each line typed on rank 0 until the input ends.

    A model that was trained on chats sees earlier turns.
    """
    is_terminal = sys.stdin.isatty()
    # A group of its own waits for the user: no other collective takes long. On gloo, a GPU would be
    # busy meanwhile.
    waiting = dist.new_group(timeout=_IDLE, backend="gloo")
    first = [_Turn("system", system)] if system else []
    turns = first
    shown: list[Path] = []
    number = 0
    if model.ranks.is_rank_0 and is_terminal:
        print(_HELP, file=sys.stderr)
    while True:
        line = _read_line(model.ranks, is_terminal, waiting)
        if line is None:
            return
        if not line:
            turns = first
            shown = []
            continue
        command, _, path = line.partition(" ")
        if command == _IMAGE:
            shown += _image_at(path.strip(), model.ranks)
            continue
        asked = [*turns, _Turn("user", line, tuple(shown))]
        shown = []
        prompt, reason = _encoded(model, asked)
        if reason:
            if model.ranks.is_rank_0:
                forgotten = " The images shown for it are forgotten." if asked[-1].images else ""
                print(reason + forgotten, file=sys.stderr)
            continue
        text = model.stream(prompt, number, sys.stdout)
        number += 1
        if model.format.keeps_history:
            turns = [*asked, _Turn("assistant", text)]


def _image_at(path: str, ranks: Ranks) -> list[Path]:
    """The file that a line names, in a list; rank 0, which reads it, says if there is none."""
    is_there = Path(path).is_file()
    if ranks.is_rank_0 and not is_there:
        print(f"{path or _IMAGE}: there is no such file. {_HELP}", file=sys.stderr)
    return [Path(path)] if is_there else []


def _encoded(model: LoadedModel, turns: Sequence[_Turn]) -> tuple[EncodedPrompt | None, str]:
    """The prompt, on rank 0; and why the turns cannot be asked, on every rank, or an empty text."""
    prompt = None
    reason = ""
    if model.ranks.is_rank_0:
        try:
            prompt = model.format.encode(_conversation(turns))
        except UserError as error:
            reason = str(error)
    return prompt, all_gather_strings(reason, torch.device("cpu"))[0]


def _conversation(turns: Sequence[_Turn]) -> Chat:
    images = [image for turn in turns for image in turn.images]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        content: Any = turn.text
        if images:
            places = [{"type": "image"}] * len(turn.images)
            content = [*places, {"type": "text", "text": turn.text}]
        messages.append({"role": turn.role, "content": content})
    return Chat(messages, images=tuple(images))


def _read_line(ranks: Ranks, is_terminal: bool, waiting: dist.ProcessGroup) -> str | None:
    """A line that was typed on rank 0, on every rank; None at the end."""
    line = ""
    if ranks.is_rank_0:
        if is_terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    line = all_gather_strings(line, torch.device("cpu"), waiting)[0]
    return line.strip() if line else None
