"""Scores of a run's answers to held-out prompts, at each evaluation."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.generation.answering import Answering
from fsdp_qlora.training.rl.advantages import length_metrics, reward_metrics, sums_of_rewards
from fsdp_qlora.training.rl.answers import answers_of_prompts
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.scoring import reward_arguments, score_answers
from fsdp_qlora.training.rl.waiting import check_stop
from fsdp_qlora.utils.errors import RunStopped

REWARD = "reward"
"""The score that is the sum of all functions."""


@dataclass(eq=False)
class HeldOutScores:
    """Answers held-out prompts with the weights of now, and scores the answers."""

    prompts: Mapping[str, Sequence[Prompt]]
    """The name of an evaluation -> its prompts."""
    answering: Answering
    scorer: Scorer
    """Not the one of the training, whose functions may keep a state."""
    control: Control
    chosen: str = REWARD
    """The score that stands for the others: `REWARD`, or the name of a function."""
    chooses_best: bool = False
    """Whether this score chooses the best checkpoint."""

    def measure(self, name: str, step: int) -> dict[str, Any]:
        """The mean scores of an evaluation's prompts. Called on every rank, with the same result.

        The keys are TRL's, such as eval_reward; NaN where no function applies to any answer.

        Args:
            name: of the evaluation.
            step: optimizer steps that the run has taken.
        Raises:
            RolloutError: a function fails.
            RunStopped: the ranks have agreed to stop.
        """
        ranks = self.answering.ranks
        prompts = self.prompts[name]
        # What steps have cached would be missing to the answers, and the other way round.
        release_cached_memory(ranks.device)
        with _stop_named(self.control, step):
            beat = partial(check_stop, self.control, ranks, step)
            ids = [prompt.ids for prompt in prompts]
            images = [prompt.images for prompt in prompts]
            completions = self.answering.answers_to(ids, images, beat)
            release_cached_memory(ranks.device)
            answers = answers_of_prompts(prompts, completions, self.answering.text_of)
            arguments = reward_arguments(answers)
            numbers = [prompt.row_number for prompt in prompts]
            values = score_answers(self.scorer, arguments, numbers, self.control, ranks, step)
        weights = [reward.weight for reward in self.scorer.rewards]
        metrics = reward_metrics(sums_of_rewards(values, weights), values)
        metrics |= length_metrics(
            [len(completion.token_ids) for completion in completions],
            [completion.is_done for completion in completions],
        )
        return {f"eval_{name}": value for name, value in metrics.items()}

    def score_in(self, record: Mapping[str, Any]) -> float:
        """The score that stands for the others; NaN if no function has applied.

        record: from `measure`.
        """
        name = "eval_reward"
        if self.chosen != REWARD:
            name = f"eval_rewards/{self.chosen}/mean"
        return float(record.get(name, math.nan))

    def close(self) -> None:
        """End the process of the functions."""
        self.scorer.close()


@contextlib.contextmanager
def _stop_named(control: Control, step: int) -> Iterator[None]:
    """Name the evaluation in the message of a stop in the block, instead of the next step."""
    try:
        yield
    except RunStopped as error:
        if control.stop is None:
            raise
        state, reason = control.stop
        message = f"Stopped in the evaluation after step {step} ({reason})."
        raise RunStopped(state, message) from error
