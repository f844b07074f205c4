"""The file rollouts.jsonl: a line for each completion that a run learns from.

A generation is on the disk before the first update by it. A run that is killed in the middle of a
generation reads it back, and learns from the same answers as one that was not.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.checkpoint.result import append_with_room
from fsdp_qlora.data.batches.row_images import NO_IMAGES, RowImages
from fsdp_qlora.training.episodes.transcript import EpisodeRecord
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.utils.errors import RolloutError, TrainingError
from fsdp_qlora.utils.files import open_named
from fsdp_qlora.utils.records import parse_record

log = logging.getLogger("fsdp_qlora")


class RolloutPrompt(NamedTuple):
    """The prompt of a completion.

    content: text or messages. ids: its tokens. teacher_ids: those that a teacher sees, if they are
    others. images: that it shows, and the teacher's prompt as well.
    """

    content: Any
    ids: list[int]
    teacher_ids: list[int] | None = None
    images: RowImages = NO_IMAGES


@dataclass(frozen=True)
class Rollout:
    """A completion that a run learns from: a line of rollouts.jsonl."""

    step: int
    """The first step that learns from it, counted from 1."""
    version: int
    """Optimizer steps of the weights that made it."""
    row: int
    """The number of its prompt in the dataset."""
    prompt: RolloutPrompt
    text: str
    completion: Completion
    reward: float | None
    """The weighted sum of the rewards; None where no function applies."""
    rewards: dict[str, float | None]
    """The value of each reward function."""
    advantage: float
    old_logps: list[float] | None = None
    """Log-probabilities of the tokens under the weights before its first step, where they are used.
    """
    episode: EpisodeRecord | None = None
    """The course of the episode that the completion is, if it is one."""

    def to_json(self) -> dict[str, Any]:
        """The line's object. In the file the completion is a text, and its parts have own keys."""
        record = {
            "step": self.step,
            "version": self.version,
            "row": self.row,
            "prompt": self.prompt.content,
            "completion": self.text,
            "finish": self.completion.finish,
            "reward": self.reward,
            "rewards": self.rewards,
            "advantage": self.advantage,
            "prompt_ids": self.prompt.ids,
            "token_ids": self.completion.token_ids,
            "sampled_logps": self.completion.logps,
            "old_logps": self.old_logps,
            "teacher_prompt_ids": self.prompt.teacher_ids,
            "episode": self.episode._asdict() if self.episode else None,
        }
        images = self.prompt.images
        if len(images):
            record["images"] = images.hex_names
            record["image_values"] = int(images.num_values.sum())
        # A reward of null says that no function applies.
        return {
            name: value for name, value in record.items() if value is not None or name == "reward"
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Rollout":
        """The reverse of `to_json`. Raises KeyError or TypeError for other objects."""
        values = dict(record)
        names = [*map(bytes.fromhex, values.pop("images", ()))]
        images = RowImages.of_one_row(names, values.pop("image_values", 0))
        values["prompt"] = RolloutPrompt(
            values["prompt"],
            values.pop("prompt_ids"),
            values.pop("teacher_prompt_ids", None),
            images,
        )
        values["text"] = values["completion"]
        values["completion"] = Completion(
            token_ids=values.pop("token_ids"),
            is_done=values.pop("finish") == "stop",
            logps=values.pop("sampled_logps", None),
        )
        if "episode" in values:
            values["episode"] = EpisodeRecord(**values["episode"])
        return cls(**values)


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a generation, and return when it is on the disk.

    On a full disk the oldest checkpoints are deleted for it.

    Raises:
        RolloutError: that fails.
    """
    error = append_with_room(path, _lines(rollouts))
    if error:
        reason = getattr(error, "strerror", None) or error
        raise RolloutError(f"{path} cannot be written: {reason}.") from error


def _lines(rollouts: Sequence[Rollout]) -> bytes:
    lines = [json.dumps(rollout.to_json(), ensure_ascii=False) + "\n" for rollout in rollouts]
    return "".join(lines).encode()


def mark_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The length and hash of a generation's lines, by which a checkpoint recognizes them."""
    lines = _lines(rollouts)
    return {"bytes": len(lines), "sha256": hashlib.sha256(lines).hexdigest()}


def truncate_rollouts(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of steps after a checkpoint, and what a kill has left of a line.

    Damaged lines stay, which somebody may restore. Returns the records of the last step.

    Raises:
        TrainingError: it is not a file, or cannot be read and written.
    """
    last = list[dict[str, Any]]()
    # Where the file is to end: before the first line of a later step, if no earlier one follows it.
    cut = None
    position = 0
    is_damaged = False
    try:
        with contextlib.suppress(FileNotFoundError), open_named(path, "r+b", follow=False) as file:
            for line in file:
                is_whole = line.endswith(b"\n")
                record = parse_record(line) if is_whole else None
                if record and record["step"] <= step:
                    if last and last[0]["step"] != record["step"]:
                        last = []
                    last.append(record)
                    cut = None
                elif cut is None and (record or not is_whole):
                    cut = position
                is_damaged |= is_whole and not record
                position += len(line)
            file.truncate(position if cut is None else cut)
    except OSError as error:
        raise TrainingError(f"{path} cannot be continued: {error.strerror or error}.") from error
    if is_damaged:
        log.warning("%s has damaged lines, which stay.", path)
    return last
