"""Scores answers with reward functions, for training and for evaluations."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.answers import Answer
from fsdp_qlora.training.rl.reward_images import NAMES
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.waiting import run_on_rank_0

Values = dict[str, list[float | None]]
"""The name of a function -> the value of each answer, None where it does not apply."""


def score_answers(
    scorer: Scorer,
    arguments: dict[str, list[Any]],
    row_numbers: Sequence[int],
    control: Control,
    ranks: Ranks,
    step: int,
) -> Values:
    """The value that each reward function gives each answer. Called on every rank.

    Only rank 0 calls the functions, which may draw random numbers or ask a service: all ranks must
    have the same values.

    Args:
        arguments: from `reward_arguments`.
        row_numbers: of the prompts' rows, for messages.
        step: optimizer steps that the run has taken.
    Raises:
        RolloutError: a function fails.
        RunStopped: the ranks have agreed to stop.
    """
    if ranks.is_rank_0:
        # In this thread, which lives as long as the run: the process ends with the thread that
        # has started it.
        scorer.start()
    score = partial(scorer.score, arguments, row_numbers)
    text = run_on_rank_0(lambda: json.dumps(score()), control, ranks, step)
    values: Values = json.loads(text)
    return values


def reward_arguments(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """The arguments of reward functions, which are TRL's."""
    # Rows of several datasets may have other columns: a function gets None for a missing one.
    rows = [answer.prompt.for_rewards for answer in answers]
    names = dict.fromkeys(chain(*rows))
    arguments: dict[str, list[Any]] = {}
    for name in names:
        arguments[name] = [row.get(name) for row in rows]
    # Last, so that no column of the dataset replaces them.
    arguments["prompts"] = [answer.shown_prompt for answer in answers]
    arguments["completions"] = [answer.shown for answer in answers]
    arguments["completion_ids"] = [answer.completion.token_ids for answer in answers]
    images = [answer.prompt.images.hex_names for answer in answers]
    if any(images):
        arguments[NAMES] = images
    return arguments
