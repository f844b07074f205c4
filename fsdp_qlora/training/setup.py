"""A run's work besides losses: rewards for its answers, samples of its text, and tasks."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.content import PromptContent
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.training.generation.prompt_format import PromptFormat, read_questions
from fsdp_qlora.training.generation.tasks import Tasks
from fsdp_qlora.training.rl.rewards import Scorer, check_answers


@dataclass(frozen=True)
class SetupOptions:
    """The options that ask for such work."""

    rewards: Sequence[str]
    on_reward_error: str
    hang_seconds: float
    sample_prompts: str | None
    eval_tasks: Sequence[str]


@dataclass(frozen=True)
class Setup:
    """Work that is opened before the model: what it needs may be missing or wrong."""

    scorer: Scorer
    scored_by: list[str]
    """On rank 0, the reward functions with hashes of their files."""
    questions: tuple[PromptContent, ...] = ()
    """The prompts of --sample_prompts."""
    tasks: Tasks | None = None
    stop_text: str = ""
    """`PromptFormat.stop_text` of a run that answers its prompts."""

    def with_rows(self, data: RunData, tokenizer: PreTrainedTokenizerBase) -> "Setup":
        """The same for a run's rows. Raises UserError if they lack columns of the rewards."""
        if not data.prompts:
            return self
        check_answers(self.scorer.rewards, [row.for_rewards for row in data.prompts])
        with contextlib.closing(
            PromptFormat(tokenizer, data.provenance["prompt"])
        ) as prompt_format:
            return replace(self, stop_text=prompt_format.stop_text)


def open_setup(options: SetupOptions, *, is_rank_0: bool) -> Setup:
    """Read and start what the options name. Called on every rank.

    Raises:
        UserError: a file is missing or wrong.
        RankError: a reward's file cannot be run.
    """
    scorer = Scorer(
        options.rewards,
        zero_on_error=options.on_reward_error == "zero",
        seconds=options.hang_seconds,
    )
    # Rewards are computed on rank 0 alone; the other ranks receive them.
    scored_by = scorer.start() if is_rank_0 else []
    questions = read_questions(Path(options.sample_prompts)) if options.sample_prompts else []
    tasks = Tasks(options.eval_tasks) if options.eval_tasks else None
    return Setup(scorer, scored_by, tuple(question for _, question in questions), tasks)
