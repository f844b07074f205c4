"""Advantages of answers over the others to their prompt, and the metrics of a generation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdp_qlora.training.episodes.transcript import FAILED, LENGTH, MAX_TURNS, EpisodeRecord
from fsdp_qlora.training.rl.rollout_file import Rollout

# Added to a standard deviation that divides, as TRL does.
_LEAST_SPREAD = 1e-4


def sums_of_rewards(
    values: Mapping[str, Sequence[float | None]], weights: Sequence[float]
) -> list[float | None]:
    """The weighted sum of each answer's values. weights: of the functions, in their order."""
    return [weighted_sum(scores, weights) for scores in zip(*values.values(), strict=True)]


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The sum of an answer's rewards; None if no function applies to it."""
    terms = [
        weight * value for weight, value in zip(weights, values, strict=True) if value is not None
    ]
    return sum(terms) if terms else None


def advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    """The advantage of each answer: how much better it is than the mean of its group.

    GRPO's advantages (Shao et al. 2024), computed as TRL does. Without a scale they
    are those of Dr. GRPO (Liu et al. 2025).

    Args:
        rewards: float64 [groups, answers]; NaN for one without a reward, which counts for nothing
            and gets 0.
        scale: "group", "batch" or "none": the standard deviation to divide by.
    """
    # Only answers with a reward count in a group's mean and deviation.
    masked = np.ma.masked_invalid(rewards)
    gains = masked - masked.mean(axis=1, keepdims=True)
    if scale != "none":
        gains = gains / (_spread(masked, axis=1 if scale == "group" else None) + _LEAST_SPREAD)
    return np.asarray(np.ma.filled(gains, 0.0))


def _spread(values: Any, axis: int | None = None) -> Any:
    """The standard deviation, from one less than there are values, as torch.std has it."""
    return values.std(axis=axis, ddof=1, keepdims=True)


def metrics_of(rollouts: Sequence[Rollout], num_generations: int) -> dict[str, float]:
    """The metrics of a step's completions, under TRL's names; NaN where no function applies."""
    metrics: dict[str, float] = {}
    if rollouts[0].rewards:
        rewards = [rollout.reward for rollout in rollouts]
        values = {
            name: [rollout.rewards[name] for rollout in rollouts] for name in rollouts[0].rewards
        }
        of_groups = _spread(_masked(rewards).reshape(-1, num_generations), axis=1)
        # The share of groups from which nothing is learned. A group without rewards is not of them.
        metrics = _sum_metrics(rewards)
        metrics["frac_reward_zero_std"] = float(np.isclose(of_groups.filled(np.nan), 0).mean())
        metrics |= _function_metrics(values)
    lengths = [_num_sampled(rollout) for rollout in rollouts]
    metrics |= length_metrics(lengths, [rollout.completion.is_done for rollout in rollouts])
    episodes = [rollout.episode for rollout in rollouts if rollout.episode]
    return metrics | _metrics_of_episodes(episodes)


def reward_metrics(
    rewards: Sequence[float | None], values: Mapping[str, Sequence[float | None]]
) -> dict[str, float]:
    """Means and standard deviations of answers' rewards, under TRL's names.

    Answers to which no function applies do not count; NaN where there is no other.

    Args:
        rewards: the weighted sum of each answer.
        values: of each function.
    """
    return _sum_metrics(rewards) | _function_metrics(values)


def _sum_metrics(rewards: Sequence[float | None]) -> dict[str, float]:
    """Mean and standard deviation of the sums of answers' rewards."""
    masked = _masked(rewards)
    return {"reward": _as_float(masked.mean()), "reward_std": _as_float(_spread(masked))}


def _function_metrics(values: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Mean and standard deviation of each function's rewards."""
    metrics: dict[str, Any] = {}
    for name, of_function in values.items():
        masked = _masked(of_function)
        metrics |= {f"rewards/{name}/mean": masked.mean(), f"rewards/{name}/std": _spread(masked)}
    return {name: _as_float(value) for name, value in metrics.items()}


def length_metrics(num_tokens: Sequence[int], are_done: Sequence[bool]) -> dict[str, float]:
    """The lengths of completions in tokens, and the share that was cut, under TRL's names.

    are_done: whether each ended by itself.
    """
    lengths = np.array(num_tokens)
    ended_lengths = lengths[[*are_done]]
    metrics: dict[str, Any] = {}
    # TRL's names and values: 0 where no answer has ended by itself.
    terminated = ended_lengths if len(ended_lengths) else np.zeros(1)
    for name, counts in (("", lengths), ("_terminated", terminated)):
        for kind in ("mean", "min", "max"):
            metrics[f"completions/{kind}{name}_length"] = getattr(counts, kind)()
    metrics["completions/clipped_ratio"] = 1 - len(ended_lengths) / len(lengths)
    return {name: _as_float(value) for name, value in metrics.items()}


def _num_sampled(rollout: Rollout) -> int:
    """Tokens of a completion that the model has sampled."""
    written = rollout.episode.num_written if rollout.episode else 0
    return len(rollout.completion.token_ids) - written


def _metrics_of_episodes(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """The metrics of a step's episodes, if its answers are such; the tools' under TRL's names."""
    if not episodes:
        return {}
    num_calls = sum(episode.num_calls for episode in episodes)
    num_failed = sum(episode.num_failed_calls for episode in episodes)
    ends = [episode.end for episode in episodes]
    return {
        "tools/call_frequency": num_calls / len(episodes),
        "tools/failure_frequency": num_failed / num_calls if num_calls else 0.0,
        "episodes/mean_turns": sum(episode.num_turns for episode in episodes) / len(episodes),
        "episodes/failed": ends.count(FAILED),
        "episodes/cut": ends.count(MAX_TURNS) + ends.count(LENGTH),
    }


def _as_float(value: Any) -> float:
    """A number; NaN for numpy's masked one, which a mean over no values is."""
    return float(np.ma.filled(np.ma.asarray(value, float), np.nan).item())


def _masked(values: Sequence[float | None]) -> Any:
    """The rewards as an array in which those that are None do not count."""
    # float64 turns None into NaN.
    return np.ma.masked_invalid(np.array(values, np.float64))
