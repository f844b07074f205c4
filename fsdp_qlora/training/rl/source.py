"""Rows that a run makes while it trains: answers to its prompts, scored.

Each generation is used for some steps. Its answers are in rollouts.jsonl, from which a step's rows
are made, fresh or read back.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import BEGINNING, Schedule, StepRows
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.process_group import (
    all_gather_strings,
    gather_numbers,
    raise_on_all_ranks,
    release_cached_memory,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.adapter_use import check_use
from fsdp_qlora.training.rl.advantages import advantages, metrics_of, sums_of_rewards
from fsdp_qlora.training.rl.ahead import KEY as AHEAD
from fsdp_qlora.training.rl.answerer import Answerer
from fsdp_qlora.training.rl.answers import Answer
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.rollout_file import (
    Rollout,
    RolloutPrompt,
    append_rollouts,
    mark_of,
    truncate_rollouts,
)
from fsdp_qlora.training.rl.rollout_rows import (
    rows_of_completions,
    rows_of_rollouts,
    rows_with_teacher,
)
from fsdp_qlora.training.rl.scoring import Values, reward_arguments, score_answers
from fsdp_qlora.training.teacher import Teacher
from fsdp_qlora.utils.errors import RolloutError, TrainingError

log = logging.getLogger("fsdp_qlora")

_REMEDY = (
    "use a version that reads them, or train without (--lora_target_parameters). If --temperature "
    "is not 1, it needs --logprobs-mode processed_logprobs."
)


@dataclass(eq=False)
class Rollouts:
    """A `RowSource` of answers that the run samples.

    Each generation is written to rollouts.jsonl before the first step that learns from it.
    """

    data: RunData
    answerer: Answerer
    scorer: Scorer
    path: Path
    """The path of rollouts.jsonl."""
    ranks: Ranks
    control: Control
    logprobs: Callable[..., np.ndarray] | None
    """Gives log-probabilities of all tokens of a table under the weights of now.

    None where the step's own log-probabilities are as good.
    """
    scale_rewards: str
    """The option: group, batch or none."""
    next_check: int | None = None
    """The first step that may find whether a server uses the adapter; None if it is known."""
    teacher: Teacher | None = None
    """On a server, if one is asked."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward, by its name; none where a teacher teaches."""
        weights = {reward.name: reward.weight for reward in self.scorer.rewards}
        return weights | dict.fromkeys(self.answerer.names_of_rewards, 1.0)

    def steps(
        self, schedule: Schedule, *, first: int = 0, position: Mapping[str, Any] = BEGINNING
    ) -> Iterator[StepRows]:
        """Give every step from `first` on; in the middle of a generation its answers are read back.

        Raises:
            RolloutError: the engine or a reward function has failed.
            TrainingError: the file cannot be written, or lacks answers.
            RunStopped: the ranks have agreed to stop.
        """
        try:
            yield from self._steps(schedule, first, position)
        finally:
            # The loop has left this step, for whatever reason.
            self.answerer.close(is_complete=False)
        self.scorer.close()
        self.answerer.close(is_complete=True)

    def _steps(
        self, schedule: Schedule, first: int, position: Mapping[str, Any]
    ) -> Iterator[StepRows]:
        rollouts = self._read_back(first)
        mark = {name: value for name, value in position.items() if name != AHEAD}
        # Checkpoints of earlier versions have no mark.
        if mark and mark != mark_of(rollouts):
            rollouts = []
        self.answerer.resume(position)
        for step, rows in schedule.rows_of_steps(self.data.train_rows, first=first):
            started = time.perf_counter()
            generation, iteration = divmod(step, schedule.num_iterations)
            memory = {}
            if iteration == 0:
                # Generation and training reserve blocks of other sizes: what one has cached would
                # be missing to the other.
                release_cached_memory(self.ranks.device)
                rows_of_prompts = rows.reshape(-1, schedule.num_generations)
                rollouts = self._generation(rows_of_prompts, generation, step)
                peaks = gather_numbers(
                    [release_cached_memory(self.ranks.device)], torch.device("cpu")
                )
                peak = peaks.max().item()
                if peak:
                    memory["generation_memory_gib"] = round(peak, 3)
                position = mark_of(rollouts) | self.answerer.position()
            elif [rollout.step for rollout in rollouts] != [step - iteration + 1] * len(rows):
                raise TrainingError(
                    f"rollouts.jsonl lacks answers that step {step + 1} learns from, or has others "
                    "than the checkpoint. Restore it, or resume from the checkpoint of a "
                    f"step that is a multiple of --num_iterations {schedule.num_iterations}."
                )
            if self.weights:
                table = rows_of_rollouts(rollouts)
            else:
                table = rows_with_teacher(rollouts, self.teacher)
            metrics = metrics_of(rollouts, schedule.num_generations)
            metrics["generation_seconds"] = time.perf_counter() - started
            metrics |= memory
            yield StepRows(step, table, np.arange(len(rollouts)), position, metrics)

    def _read_back(self, step: int) -> list[Rollout]:
        """The last rollouts before a step, on every rank; none if they are damaged.

        What was written later goes.
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
        """Complete the prompts of rows [prompts, completions] and score the answers.

        Called on every rank, with the same result.
        """
        asked = [self.data.prompts[row] for row in rows[:, 0]]
        prompts = [prompt for prompt in asked for _ in range(rows.shape[1])]
        answers = self.answerer.answers(prompts, generation, step)
        values = self._scores(answers, step)
        rewards = self._rewards(values, len(answers), step)
        # An answer without a reward, None, becomes NaN.
        by_prompt = np.array(rewards, np.float64).reshape(rows.shape)
        gains = advantages(by_prompt, self.scale_rewards).ravel().tolist()
        rollouts = []
        for place, answer in enumerate(answers):
            rollout = Rollout(
                step=step + 1,
                version=self.answerer.version(step),
                row=answer.prompt.row_number,
                prompt=RolloutPrompt(
                    answer.shown_prompt,
                    answer.prompt_ids,
                    answer.prompt.teacher_ids,
                    answer.prompt.images,
                ),
                text=answer.text,
                completion=answer.completion,
                reward=rewards[place],
                rewards={name: values[name][place] for name in values},
                advantage=gains[place],
                episode=answer.transcript.record if answer.transcript else None,
            )
            rollouts.append(rollout)
        rollouts = self._with_old_logps(rollouts, step, has_rewards=bool(values))
        with raise_on_all_ranks(RolloutError, self.ranks.device):
            if self.ranks.is_rank_0:
                append_rollouts(self.path, rollouts)
        return rollouts

    def _scores(self, answers: Sequence[Answer], step: int) -> Values:
        """The value that each reward function gives each answer, and the environments' own."""
        # Functions expect that the model has said something.
        places = [place for place, answer in enumerate(answers) if answer.is_sound]
        sound = [answers[place] for place in places]
        rows = [answer.prompt.row_number for answer in sound]
        arguments = reward_arguments(sound)
        found = score_answers(self.scorer, arguments, rows, self.control, self.ranks, step)
        values: Values = {}
        for name, of_sound in found.items():
            by_place = dict(zip(places, of_sound, strict=True))
            values[name] = [by_place.get(place) for place in range(len(answers))]
        return values | self.answerer.own_rewards(answers)

    def _rewards(
        self, values: dict[str, list[float | None]], count: int, step: int
    ) -> list[float | None]:
        """The weighted sum of each answer's values."""
        # A run that learns from a teacher has no functions.
        if not values:
            return [None] * count
        rewards = sums_of_rewards(values, [*self.weights.values()])
        if set(rewards) == {None}:
            log.warning(
                "Step %d learns nothing: no reward function gives a value for any of its answers.",
                step + 1,
            )
        return rewards

    def _with_old_logps(
        self, rollouts: list[Rollout], step: int, *, has_rewards: bool
    ) -> list[Rollout]:
        """Add the log-probabilities under the weights before the step, where they are used.

        Checks by them whether a server uses the adapter, if that is due.
        """
        is_checked = self.next_check is not None and step >= self.next_check
        if not self.logprobs or not (is_checked or has_rewards):
            return rollouts
        table = rows_of_rollouts(rollouts)
        logps = self.logprobs(table)
        if is_checked:
            self._check(table, logps, step)
        logps_of_rows = np.split(logps, table.offsets[1:-1])
        return [
            dataclasses.replace(rollout, old_logps=of_row[len(rollout.prompt.ids) :].tolist())
            for rollout, of_row in zip(rollouts, logps_of_rows, strict=True)
        ]

    def _check(self, table: TokenizedRows, logps: np.ndarray, step: int) -> None:
        """Check whether a server uses the adapter, by answers of the weights of now.

        table, logps: the step's own, which are of these weights if no generation is ahead.
        """
        assert self.logprobs is not None
        # Each check costs a forward pass of the base, so they become rare.
        self.next_check = 2 * step + 1
        if self.answerer.ahead:
            following = self.answerer.ahead.of_current_weights(step)
            if following is None:
                return
            prompts, completions = following
            numbers = range(len(prompts.ids))
            table = rows_of_completions(prompts.ids, completions, numbers, prompts.images)
            logps = self.logprobs(table)
        self._check_server(table, logps, self.logprobs(table, at_start=True))

    def _check_server(self, table: TokenizedRows, logps: np.ndarray, base: np.ndarray) -> None:
        """Decide whether a server uses the adapter. Raises RolloutError if it does not.

        Args:
            logps, base: of the table's tokens with the adapter, and without it.
        """
        sampled = table.columns["sampled_logps"].values
        count = table.num_targets.sum()
        # Tokens of prompts are 0 on all sides.
        to_model = float(np.abs(sampled - logps).sum() / count)
        to_base = float(np.abs(sampled - base).sum() / count)
        if check_use(to_model, to_base, _REMEDY):
            self.next_check = None
