"""The rows of a step, made of the completions that it learns from."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.batches.rows import TokenizedRows, beside_teacher, join_completions
from fsdp_qlora.data.batches.shared_tokens import shared_of_prompts
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.rollout_file import Rollout
from fsdp_qlora.training.teacher import Teacher


def rows_of_rollouts(rollouts: Sequence[Rollout]) -> TokenizedRows:
    """The rows of a step."""
    prompts = [rollout.prompt.ids for rollout in rollouts]
    completions = [rollout.completion for rollout in rollouts]
    table = rows_of_completions(
        prompts, completions, [rollout.row for rollout in rollouts], _images_of(rollouts)
    )
    if rollouts[0].episode:
        table = _as_episodes(table, rollouts)
    advantages = [rollout.advantage for rollout in rollouts]
    table = table.with_columns("row", advantages=np.array(advantages, np.float32))
    # All rollouts of a generation have log-probabilities, or none.
    if rollouts[0].old_logps is not None:
        old_logps = [rollout.old_logps for rollout in rollouts]
        table = table.with_columns("token", old_logps=_over_tokens(prompts, old_logps))
    return table


def rows_of_completions(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    numbers: Sequence[int],
    images: Sequence[RowImages],
) -> TokenizedRows:
    """The rows of prompts with their completions, without what is learned of them.

    Args:
        numbers: of the rows in the dataset.
        images: of each prompt.
    """
    answers = [completion.token_ids for completion in completions]
    table = join_completions(prompts, answers, numbers, images)
    table = table.with_columns(
        "row", prompt_tokens=shared_of_prompts([len(prompt) for prompt in prompts])
    )
    if completions[0].logps is not None:
        sampled_logps = [completion.logps for completion in completions]
        table = table.with_columns("token", sampled_logps=_over_tokens(prompts, sampled_logps))
    return table


def _images_of(rollouts: Sequence[Rollout]) -> list[RowImages]:
    return [rollout.prompt.images for rollout in rollouts]


def _as_episodes(table: TokenizedRows, rollouts: Sequence[Rollout]) -> TokenizedRows:
    """The rows of episodes: nothing is learned of what an environment wrote.

    Rows share the tokens that all prompts of a row of the dataset begin with: environments may
    begin its episodes in different ways.
    """
    learned = table.learned[:].copy()
    for start, rollout in zip(table.offsets[:-1], rollouts, strict=True):
        assert rollout.episode is not None
        first = start + len(rollout.prompt.ids)
        for begin, end in rollout.episode.environment_spans:
            learned[first + begin : first + end] = False
    table = dataclasses.replace(table, learned=learned)
    shared = shared_of_prompts(_lengths_in_common(rollouts))
    return table.with_columns("row", prompt_tokens=shared)


def _lengths_in_common(rollouts: Sequence[Rollout]) -> list[int]:
    """Tokens that all prompts of a rollout's row begin with, for each rollout; at least 1."""
    prompts_of_row = defaultdict[int, list[list[int]]](list)
    for rollout in rollouts:
        prompts_of_row[rollout.row].append(rollout.prompt.ids)
    in_common = {row: max(1, _in_common(prompts)) for row, prompts in prompts_of_row.items()}
    return [in_common[rollout.row] for rollout in rollouts]


def _in_common(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens with which all prompts begin."""
    count = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def _over_tokens(prompts: Sequence[Sequence[int]], values: Sequence[Any]) -> np.ndarray:
    """Spread values of completions' tokens over all tokens, [tokens]; prompts' tokens get 0."""
    parts = []
    for prompt, values_of_row in zip(prompts, values, strict=True):
        numbers = np.array(values_of_row, np.float32)
        parts.append(np.pad(numbers, (len(prompt), 0)))
    return np.concatenate(parts)


def rows_with_teacher(rollouts: Sequence[Rollout], teacher: Teacher | None) -> TokenizedRows:
    """The rows of a step that learns from a teacher: a server, or the model itself.

    For the model itself, a row has a second document: the completion behind the teacher's prompt.
    """
    completions = [rollout.completion.token_ids for rollout in rollouts]
    teacher_prompts = [rollout.prompt.teacher_ids or rollout.prompt.ids for rollout in rollouts]
    if teacher:
        teacher.request(teacher_prompts, completions, rollouts[0].version)
        return rows_of_rollouts(rollouts)
    prompts_of_documents = []
    completions_of_documents = []
    for rollout, teacher_prompt in zip(rollouts, teacher_prompts, strict=True):
        prompts_of_documents += [rollout.prompt.ids, teacher_prompt]
        completions_of_documents += [rollout.completion.token_ids] * 2
    rows = [rollout.row for rollout in rollouts]
    documents = join_completions(prompts_of_documents, completions_of_documents, np.repeat(rows, 2))
    return beside_teacher(documents, _images_of(rollouts))
