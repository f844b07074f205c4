"""Rows that a run makes while it trains: answers to its prompts, scored, each generation used for
some steps.

They are in rollouts.jsonl, a line for each answer, from which a step's rows are made, fresh or read
back.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdp_qlora.checkpoint.result import write_with_room
from fsdp_qlora.data.batches.rows import TokenizedRows, join_completions
from fsdp_qlora.data.batches.schedule import BEGINNING, Schedule, StepRows
from fsdp_qlora.data.pipeline import Prompt
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
    release_cached_memory,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.engine import Engine
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.server_teacher import ServerTeacher
from fsdp_qlora.training.rl.waiting import run_on_rank_0
from fsdp_qlora.utils.errors import RolloutError, TrainingError
from fsdp_qlora.utils.files import open_named
from fsdp_qlora.utils.records import parse_record

log = logging.getLogger("fsdp_qlora")

# Of a line, in their order.
_NAMES = (
    *(
        "step",
        "version",
        "row",
        "prompt",
        "completion",
        "finish",
        "reward",
        "rewards",
        "advantage",
        "prompt_ids",
    ),
    *("token_ids", "sampled_logps", "old_logps", "teacher_prompt_ids"),
)


@dataclass(frozen=True)
class Rollout:
    """A completion that a run learns from: a line of rollouts.jsonl.

    step: the first that learns from it, from 1. version: optimizer steps of the weights that made
    it. row: the number of its prompt in the dataset. prompt: text or messages. rewards: by
    function; reward: their sum, None where no function applies. old_logps: of the tokens under
    these weights, where they are used. teacher_prompt_ids: that a teacher sees, if they are others.
    """

    step: int
    version: int
    row: int
    prompt: Any
    text: str
    completion: Completion
    reward: float | None
    rewards: dict[str, float | None]
    advantage: float
    prompt_ids: list[int]
    old_logps: list[float] | None = None
    teacher_prompt_ids: list[int] | None = None

    def to_json(self) -> dict[str, Any]:
        made = self.completion
        record = vars(self) | {"completion": self.text, "finish": made.finish}
        record |= {"token_ids": made.token_ids, "sampled_logps": made.logps}
        return {
            name: record[name] for name in _NAMES if record[name] is not None or name == "reward"
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Rollout":
        values = dict(record) | {"text": record["completion"]}
        ids = values.pop("token_ids")
        finish = values.pop("finish")
        logps = values.pop("sampled_logps", None)
        return cls(**(values | {"completion": Completion(ids, finish == "stop", logps)}))


def append_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a generation, on the disk before the first update by it; a full disk loses checkpoints
    for it.

    Raises:
        RolloutError: that fails.
    """
    size = path.stat().st_size if path.exists() else 0

    def write() -> None:
        with open_named(path, "ab", follow=False) as file:
            file.truncate(size)  # what an attempt has left
            file.write(_lines(rollouts))
            file.flush()
            os.fsync(file.fileno())

    error = write_with_room(path.parent, write)
    if error:
        raise RolloutError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}."
        ) from error


def _lines(rollouts: Sequence[Rollout]) -> bytes:
    return "".join(
        json.dumps(rollout.to_json(), ensure_ascii=False) + "\n" for rollout in rollouts
    ).encode()


def mark_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The length and hash of a generation's lines, by which a checkpoint recognizes them."""
    return {"bytes": len(lines := _lines(rollouts)), "sha256": hashlib.sha256(lines).hexdigest()}


def truncate_rollouts(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of steps after a checkpoint, and what a kill has left of one; returns the
    last step's.

    Damaged lines stay, which somebody may restore.

    Raises:
        TrainingError: it is not a file, or cannot be read and written.
    """
    last = list[dict[str, Any]]()
    cut = None
    position = 0
    is_damaged = False
    try:
        with contextlib.suppress(FileNotFoundError), open_named(path, "r+b", follow=False) as file:
            for line in file:
                is_whole = line.endswith(b"\n")
                record = parse_record(line) if is_whole else None
                if record and record["step"] <= step:
                    last = [*(last if last and last[0]["step"] == record["step"] else ()), record]
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


def table_of(rollouts: Sequence[Rollout]) -> TokenizedRows:
    """The rows of a step."""
    prompts = [rollout.prompt_ids for rollout in rollouts]
    made = [rollout.completion for rollout in rollouts]
    logps = {
        "old_logps": [rollout.old_logps for rollout in rollouts],
        "sampled_logps": [completion.logps for completion in made],
    }
    return dataclasses.replace(
        join_completions(
            prompts,
            [completion.token_ids for completion in made],
            [rollout.row for rollout in rollouts],
        ),
        advantages=np.array([rollout.advantage for rollout in rollouts], np.float32),
        **{
            name: _of_tokens(prompts, values)
            for name, values in logps.items()
            if values[0] is not None
        },
    )


def _of_tokens(prompts: Sequence[Sequence[int]], values: Sequence[Any]) -> np.ndarray:
    """A number for each token, 0 for those of prompts."""
    pairs = zip(prompts, values, strict=True)
    return np.concatenate(
        [np.pad(np.array(own, np.float32), (len(prompt), 0)) for prompt, own in pairs]
    )


def taught_table(rollouts: Sequence[Rollout], teacher: ServerTeacher | None) -> TokenizedRows:
    """The rows of a step that learns from a teacher: a server, or the model itself, with each
    completion once more.
    """
    asked = [
        (rollout.prompt_ids, rollout.teacher_prompt_ids or rollout.prompt_ids)
        for rollout in rollouts
    ]
    made = [rollout.completion.token_ids for rollout in rollouts]
    if teacher:
        teacher.ask([seen for _, seen in asked], made, rollouts[0].version)
        return table_of(rollouts)
    rows = [rollout.row for rollout in rollouts]
    sides = join_completions(
        [*chain(*asked)], [ids for ids in made for _ in range(2)], np.repeat(rows, 2)
    )
    splits = np.diff(sides.offsets)[::2]
    desired = np.ones(len(rows), np.bool_)
    return dataclasses.replace(
        sides,
        offsets=sides.offsets[::2],
        row_numbers=sides.row_numbers[::2],
        splits=splits,
        desired=desired,
    )


_LEAST_SPREAD = 1e-4  # is added to a standard deviation that divides, as TRL does


@dataclass(eq=False)
class Rollouts:
    """A `RowSource`: each generation is written to rollouts.jsonl before the first step that learns
    from it.

    text_of: the text of an answer's tokens. logprobs: of all tokens of a table under the weights
    that answered; None where those of the step itself are as good. scale_rewards: as the option.
    next_check: the first step that may find whether a server uses the adapter; None if it is known.
    teacher: on a server, if one is asked.
    """

    data: RunData
    engine: Engine
    scorer: Scorer
    path: Path
    ranks: Ranks
    control: Control
    text_of: Callable[[list[int]], str]
    logprobs: Callable[..., np.ndarray] | None
    scale_rewards: str
    next_check: int | None = None
    teacher: ServerTeacher | None = None

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, Any] = BEGINNING
    ) -> Iterator[StepRows]:
        """Give every step from `first` on; in the middle of a generation its answers are read back.

        Raises:
            RolloutError: the engine or a reward function has failed. TrainingError: the file cannot
            be written, or lacks answers. RunStopped: the ranks have agreed to stop.
        """
        rollouts = self._kept(first)
        group_size = schedule.num_generations
        if position and position != mark_of(rollouts):  # older checkpoints have no mark
            rollouts = []
        for step, rows in schedule.rows_of_steps(self.data.train_rows, first=first):
            started = time.perf_counter()
            generation, iteration = divmod(step, schedule.num_iterations)
            memory = {}
            if iteration == 0:
                release_cached_memory(self.ranks.device)
                rollouts = self._generation(rows.reshape(-1, group_size), generation, step)
                peak = (
                    gather_numbers([release_cached_memory(self.ranks.device)], torch.device("cpu"))
                    .max()
                    .item()
                )
                memory = {"generation_memory_gib": round(peak, 3)} if peak else {}
                position = mark_of(rollouts)
            elif [rollout.step for rollout in rollouts] != [step - iteration + 1] * len(rows):
                raise TrainingError(
                    f"rollouts.jsonl lacks answers that step {step + 1} learns from, or has others "
                    "than those of the checkpoint. Restore it, or resume from the checkpoint of a "
                    f"step that is a multiple of --num_iterations {schedule.num_iterations}."
                )
            table = (
                table_of(rollouts) if self.scorer.rewards else taught_table(rollouts, self.teacher)
            )
            metrics = (
                metrics_of(rollouts, group_size)
                | {"generation_seconds": time.perf_counter() - started}
                | memory
            )
            yield StepRows(step, table, np.arange(len(rollouts)), position, metrics)
        self.scorer.close()

    def _kept(self, step: int) -> list[Rollout]:
        """The last rollouts before a step, on every rank; none if they are damaged. What was
        written later goes.
        """
        text = ""
        with raise_on_all_ranks(TrainingError, self.ranks.device):
            if self.ranks.is_rank_0:
                text = json.dumps(truncate_rollouts(self.path, step))
        records = json.loads(all_gather_strings(text, torch.device("cpu"))[0])
        try:
            return [Rollout.from_json(record) for record in records]
        except (KeyError, TypeError, ValueError, AttributeError):
            return []

    def _generation(self, rows: np.ndarray, generation: int, step: int) -> list[Rollout]:
        """Complete the prompts of rows [prompts, completions]; called on every rank, with the same
        result.
        """
        prompts = [self.data.prompts[row] for row in rows.ravel()]
        completions = self.engine([prompt.ids for prompt in prompts], generation, step)
        answered = list(zip(prompts, completions, strict=True))
        numbers = self.data.train.row_numbers[rows.ravel()].tolist()
        if self.ranks.is_rank_0:
            self.scorer.start()
        score = partial(self.scorer.score, self._batch(answered), numbers)
        values = json.loads(
            run_on_rank_0(lambda: json.dumps(score()), self.control, self.ranks, step)
        )
        weights = [reward.weight for reward in self.scorer.rewards]
        sums = [_weighted(scores, weights) for scores in zip(*values.values(), strict=True)] or [
            None
        ] * len(answered)
        if set(sums) == {None} and values:
            log.warning(
                "Step %d learns nothing: no reward function gives a value for any of its answers.",
                step + 1,
            )
        gains = (
            advantages(np.array(sums, np.float64).reshape(rows.shape), self.scale_rewards)
            .ravel()
            .tolist()
        )
        rollouts = [
            Rollout(
                step=step + 1,
                version=step,
                row=numbers[place],
                prompt=prompt.content,
                text=self.text_of(made.token_ids),
                completion=made,
                reward=sums[place],
                rewards={name: values[name][place] for name in values},
                advantage=gains[place],
                prompt_ids=prompt.ids,
                teacher_prompt_ids=prompt.teacher_ids,
            )
            for place, (prompt, made) in enumerate(answered)
        ]
        is_checked = self.next_check is not None and step >= self.next_check
        if self.logprobs and (is_checked or values):
            table = table_of(rollouts)
            logps = self.logprobs(table)
            if is_checked:
                self.next_check = 2 * step + 1  # each check costs a forward pass
                self._check_server(table, logps, self.logprobs(table, at_start=True))
            rollouts = [
                dataclasses.replace(rollout, old_logps=of_row[len(rollout.prompt_ids) :].tolist())
                for rollout, of_row in zip(
                    rollouts, np.split(logps, table.offsets[1:-1]), strict=True
                )
            ]
        with raise_on_all_ranks(RolloutError, self.ranks.device):
            if self.ranks.is_rank_0:
                append_rollouts(self.path, rollouts)
        return rollouts

    def _check_server(self, table: TokenizedRows, logps: np.ndarray, base: np.ndarray) -> None:
        """Decide whether a server uses the adapter, once its log-probabilities are nearer to one
        side by half.

        Raises:
            RolloutError: it does not, and its answers would stay the base's.
        """
        sampled = table.sampled_logps
        count = table.num_targets.sum()
        to_model, to_base = (
            float(np.abs(sampled - values).sum() / count) for values in (logps, base)
        )
        if 2 * to_base < to_model:
            raise RolloutError(
                f"The server ignores the adapter: its log-probabilities are {to_base:.2g} from the "
                f"base's and {to_model:.2g} from the adapted model's. vLLM ignores adapters of "
                "some layers, as of some experts: use a version that reads them, or train without "
                "(--lora_target_parameters). If --temperature is not 1, it needs --logprobs-mode "
                "processed_logprobs."
            )
        if 2 * to_model < to_base:
            log.info(
                "The server uses the adapter: it is %.2g from the model, %.2g from the base.",
                to_model,
                to_base,
            )
            self.next_check = None

    def _batch(self, answered: Sequence[tuple[Prompt, Completion]]) -> dict[str, list[Any]]:
        """The arguments of reward functions, which are TRL's.

        Answers to messages are messages too.
        """
        prompts = [prompt for prompt, _ in answered]
        said = [completion.token_ids for _, completion in answered]
        texts: list[Any] = list(map(self.text_of, said))
        for place, prompt in enumerate(prompts):
            if not isinstance(prompt.content, str):
                texts[place] = [{"role": "assistant", "content": texts[place]}]
        beside = [prompt.for_rewards for prompt in prompts]
        columns = {
            name: [row.get(name) for row in beside] for name in dict.fromkeys(chain(*beside))
        }
        columns["prompts"] = [prompt.content for prompt in prompts]
        return columns | {"completions": texts, "completion_ids": said}


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The sum of an answer's rewards; None if no function applies to it."""
    weighted = [
        weight * value for weight, value in zip(weights, values, strict=True) if value is not None
    ]
    return sum(weighted) if weighted else None


def advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    """How much better each answer is than the mean of its group (Shao et al. 2024), as TRL computes
    it.

    Args:
        rewards: float64 [groups, answers]; NaN for one without a reward, which counts for nothing
        and gets 0. scale: "group", "batch" or "none": the standard deviation to divide by.
    """
    masked = np.ma.masked_invalid(rewards)
    gains = masked - masked.mean(axis=1, keepdims=True)
    if scale != "none":
        gains = gains / (_spread(masked, axis=1 if scale == "group" else None) + _LEAST_SPREAD)
    return np.asarray(np.ma.filled(gains, 0.0))


def _spread(values: Any, axis: int | None = None) -> Any:
    """The standard deviation, from one less than there are values."""
    return values.std(axis=axis, ddof=1, keepdims=True)


def metrics_of(rollouts: Sequence[Rollout], num_generations: int) -> dict[str, float]:
    """The metrics of a step's completions, under TRL's names; NaN where no function applies."""
    lengths = np.array([len(rollout.completion.token_ids) for rollout in rollouts])
    ended = lengths[[rollout.completion.is_done for rollout in rollouts]]
    metrics: dict[str, Any] = {}
    if rollouts[0].rewards:
        rewards = _masked([rollout.reward for rollout in rollouts])
        of_groups = _spread(rewards.reshape(-1, num_generations), axis=1)
        metrics |= {"reward": rewards.mean(), "reward_std": _spread(rewards)}
        metrics["frac_reward_zero_std"] = np.isclose(of_groups.filled(np.nan), 0).mean()
    for name in rollouts[0].rewards:
        values = _masked([rollout.rewards[name] for rollout in rollouts])
        metrics |= {f"rewards/{name}/mean": values.mean(), f"rewards/{name}/std": _spread(values)}
    for name, counts in (("", lengths), ("_terminated", ended if len(ended) else np.zeros(1))):
        for kind in ("mean", "min", "max"):
            metrics[f"completions/{kind}{name}_length"] = getattr(counts, kind)()
    metrics["completions/clipped_ratio"] = 1 - len(ended) / len(rollouts)
    return {
        name: float(np.ma.filled(np.ma.asarray(value, float), np.nan).item())
        for name, value in metrics.items()
    }


def _masked(values: Sequence[float | None]) -> Any:
    return np.ma.masked_invalid(np.array(values, np.float64))
