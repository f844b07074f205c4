"""The rows of a step, made of the completions that it learns from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdp_qlora.data.batches.rows import TokenizedRows, beside_teacher, join_completions
from fsdp_qlora.data.batches.shared_tokens import shared_of_prompts
from fsdp_qlora.training.rl.rollout_file import Rollout
from fsdp_qlora.training.teacher import Teacher


def rows_of_rollouts(rollouts: Sequence[Rollout]) -> TokenizedRows:
    """The rows of a step."""
    prompts = [rollout.prompt_ids for rollout in rollouts]
    completions = [rollout.completion for rollout in rollouts]
    table = join_completions(
        prompts,
        [completion.token_ids for completion in completions],
        [rollout.row for rollout in rollouts],
    )
    advantages = [rollout.advantage for rollout in rollouts]
    table = table.with_columns(
        "row",
        advantages=np.array(advantages, np.float32),
        prompt_tokens=shared_of_prompts([len(prompt) for prompt in prompts]),
    )
    # All rollouts of a generation have log-probabilities, or none.
    if rollouts[0].old_logps is not None:
        old_logps = [rollout.old_logps for rollout in rollouts]
        table = table.with_columns("token", old_logps=_over_tokens(prompts, old_logps))
    if completions[0].logps is not None:
        sampled_logps = [completion.logps for completion in completions]
        table = table.with_columns("token", sampled_logps=_over_tokens(prompts, sampled_logps))
    return table


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
    teacher_prompts = [rollout.teacher_prompt_ids or rollout.prompt_ids for rollout in rollouts]
    if teacher:
        teacher.request(teacher_prompts, completions, rollouts[0].version)
        return rows_of_rollouts(rollouts)
    prompts_of_documents = []
    completions_of_documents = []
    for rollout, teacher_prompt in zip(rollouts, teacher_prompts, strict=True):
        prompts_of_documents += [rollout.prompt_ids, teacher_prompt]
        completions_of_documents += [rollout.completion.token_ids] * 2
    rows = [rollout.row for rollout in rollouts]
    documents = join_completions(prompts_of_documents, completions_of_documents, np.repeat(rows, 2))
    return beside_teacher(documents)
