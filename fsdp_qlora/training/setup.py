"""A run's work besides losses: rewards for its answers, samples of its text, and tasks."""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.training.episodes.opening import OpenedEnvironments, open_environments
from fsdp_qlora.training.episodes.played_episode import Limits, Stage
from fsdp_qlora.training.episodes.turns_file import TurnsFile
from fsdp_qlora.training.generation.prompt_format import PromptFormat, Question, read_questions
from fsdp_qlora.training.generation.samples import SamplePrompts
from fsdp_qlora.training.generation.tasks import Tasks
from fsdp_qlora.training.generation.tool_turns import ToolTurns
from fsdp_qlora.training.rl.held_out import REWARD
from fsdp_qlora.training.rl.rewards import Scorer, check_answers
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

LOSS = "loss"
"""The measure of held-out rows that is no score."""


@dataclass(frozen=True)
class SetupOptions:
    """The options that ask for such work."""

    rewards: Sequence[str]
    eval_rewards: Sequence[str]
    best_measure: str
    on_reward_error: str
    hang_seconds: float
    environment: Sequence[str]
    tool_seconds: float
    episode_seconds: float
    sample_prompts: str | None
    eval_tasks: Sequence[str]


@dataclass(frozen=True)
class Setup:
    """Work that is opened before the model: what it needs may be missing or wrong."""

    scorer: Scorer
    scored_by: list[str]
    """On rank 0, the reward functions with hashes of their files."""
    eval_scorer: Scorer
    """For answers to held-out prompts."""
    eval_scored_by: list[str]
    """The same as `scored_by`."""
    questions: tuple[Question, ...] = ()
    """The prompts of --sample_prompts."""
    samples: SamplePrompts | None = None
    """The same in the format of the run's rows."""
    tasks: Tasks | None = None
    stop_text: str = ""
    """`PromptFormat.stop_text` of a run that answers prompts of its datasets."""
    environments: OpenedEnvironments | None = None
    """The environments of a run whose answers are episodes."""
    tool_turns: ToolTurns | None = None
    """Knows how the chat template writes turns with tools, if there are environments."""

    def stage(self, max_turns: int, max_tokens: int, path: Path) -> Stage | None:
        """All that the episodes of the run have in common; None on other ranks than 0.

        path: of episodes.jsonl.
        """
        if not (self.environments and self.environments.processes and self.tool_turns):
            return None
        return Stage(
            self.environments.processes,
            self.tool_turns,
            Limits(max_turns, max_tokens),
            TurnsFile(path),
            threading.Lock(),
        )

    @property
    def tools(self) -> Mapping[str, list[dict[str, Any]]] | None:
        """The tools of each environment, if there are some."""
        return self.environments.tools if self.environments else None

    def with_rows(
        self,
        data: RunData,
        held_out: Mapping[str, Sequence[Prompt]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> "Setup":
        """The same for a run's rows.

        Args:
            held_out: the prompts of each evaluation.
        Raises:
            UserError: rows lack columns of the rewards, or a prompt of --sample_prompts cannot be
                used.
        """
        if not (data.prompts or held_out or self.questions):
            return self
        if data.prompts:
            check_answers(self.scorer.rewards, (row.for_rewards for row in data.prompts))
        for prompts in held_out.values():
            rows = (row.for_rewards for row in prompts)
            check_answers(self.eval_scorer.rewards, rows, "eval_rewards")
        setup = self
        record = data.provenance["prompt"]
        with contextlib.closing(
            PromptFormat(tokenizer, record, data.image_processor)
        ) as prompt_format:
            if data.prompts or held_out:
                setup = replace(setup, stop_text=prompt_format.stop_text)
            if self.questions:
                samples = SamplePrompts.of(self.questions, prompt_format)
                setup = replace(setup, samples=samples)
        if not self.environments:
            return setup
        template = record.get("chat_template")
        has_tools = self.environments.have_tools
        tool_turns = ToolTurns(tokenizer, template, has_tools=has_tools)
        if has_tools and not tool_turns.writes_tools:
            log.info(
                "The chat template does not tell the model which tools there are: the prompts of "
                "the dataset have to."
            )
        return replace(setup, tool_turns=tool_turns)


def open_setup(options: SetupOptions, ranks: Ranks, store: dist.Store | None) -> Setup:
    """Read and start what the options name. Called on every rank.

    Args:
        store: of the session; None for one process.
    Raises:
        UserError: a file is missing or wrong.
        RankError: the file of a reward or of an environment cannot be run.
    """
    scorer = Scorer(
        options.rewards,
        zero_on_error=options.on_reward_error == "zero",
        seconds=options.hang_seconds,
    )
    # Rewards are computed on rank 0 alone; the other ranks receive them.
    eval_scorer = open_eval_scorer(options)
    scored_by = scorer.start() if ranks.is_rank_0 else []
    eval_scored_by = eval_scorer.start() if ranks.is_rank_0 else []
    environments = open_environments(
        options.environment,
        call_seconds=options.tool_seconds,
        episode_seconds=options.episode_seconds,
        ranks=ranks,
        store=store,
    )
    if environments:
        scored_by += environments.described
        if not (options.rewards or environments.rewards):
            raise UserError(
                f"--environment {', '.join(options.environment)} gives no reward: it has no "
                "method get_reward. Add one, or give --rewards."
            )
    questions = read_questions(Path(options.sample_prompts)) if options.sample_prompts else []
    tasks = Tasks(options.eval_tasks) if options.eval_tasks else None
    return Setup(
        scorer,
        scored_by,
        eval_scorer,
        eval_scored_by,
        tuple(questions),
        tasks=tasks,
        environments=environments,
    )


def open_eval_scorer(options: SetupOptions) -> Scorer:
    """The functions that score answers to held-out prompts; none if the options name none.

    Raises:
        UserError: there is no such function, or none that `best_measure` names.
    """
    # A process of their own: a function that counts its calls, or draws random numbers, must not
    # give the training other rewards because of an evaluation.
    scorer = Scorer(
        options.eval_rewards,
        zero_on_error=options.on_reward_error == "zero",
        seconds=options.hang_seconds,
        option="eval_rewards",
        of_rows="the held-out dataset",
    )
    names = [LOSS, REWARD, *(reward.name for reward in scorer.rewards)]
    if options.best_measure not in names:
        raise UserError(
            f"--best_by {options.best_measure}: there is no such measure. Give one of "
            f"{', '.join(names)}."
        )
    return scorer
