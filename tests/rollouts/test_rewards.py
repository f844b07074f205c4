"""Reward functions: the ready ones, the user's own, their failures, and the advantages that follow from them."""

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.training.generation.generate import Completion
from fsdp_qlora.training.rl.rewards import Reward, Scorer, load_rewards
from fsdp_qlora.training.rl.source import Rollout, advantages, append_rollouts, metrics_of, truncate_rollouts
from fsdp_qlora.utils.errors import RolloutError, UserError

pytestmark = pytest.mark.quick

SAID = ["42", " 42\n", "it is $1,042.50.", "none", "6 x 7 = 42"]


def values_of(word: str, completions: list[Any] = SAID, **columns: Any) -> list[float | None]:
    """What the ready function says of the answers, as a run calls it."""
    ids = [list(range(len(said))) for said in completions]
    batch = {"prompts": ["?"] * len(ids), "completions": completions, "completion_ids": ids, **columns}
    [values] = Scorer(load_rewards([word]), zero_on_error=False, seconds=60).score(batch, range(len(ids))).values()
    return values


def test_builtin_rewards_score_text_and_messages() -> None:
    assert values_of("exact_match", answer=["42"] * 5) == [1, 1, 0, 0, 0]
    assert values_of("number", answer=["40 + 2\n#### 42"] * 5) == [1, 1, 0, 0, 1]
    assert values_of("number", solution=["1042.5"] * 4 + [None]) == [0, 0, 1, 0, None]
    assert values_of("regex:<a>.*</a>", ["<a>\n1</a>", "x<a></a>", " <a></a> "]) == [1, 0, 1]
    assert values_of("length:2", ["", "ab", "abc", "abcd", "abcdefgh"]) == [0, 0, -0.5, -1, -1]
    messages = [[{"role": "assistant", "content": said}] for said in SAID]
    assert values_of("exact_match=2", messages, answer=["42"] * 5) == [1, 1, 0, 0, 0]  # weighed later
    assert values_of("number") == [None] * 5  # nothing is known to be right


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        (None, "{path}:f", "cannot be read: No such file"),
        ("def f(:\n", "{path}:f", "own.py:1 cannot be run: SyntaxError"),
        ("import os\n\nx = os.nosuch\n", "{path}:f", "own.py:3 cannot be run: AttributeError"),
        ("def g(): pass\n", "{path}:f", "has no function 'f'. It has: g."),
        ("f = 3\n", "{path}:f", "has no function 'f'"),
        ("", "nosuch", "of exact_match, number, regex:..., length:..."),
        ("", "regex:(", "cannot be used"),
        ("", "length:0", "cannot be used"),
        ("", "regex", "there is no such function"),
        ("", "number:3", "there is no such function"),
        ("def number(): pass\n", "number,{path}:number", "two functions are called number"),
    ],
)
def test_invalid_reward_functions_are_named_before_training(tmp_path: Path, text: str, word: str, said: str) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace("[", r"\[")):
        load_rewards(word.format(path=path).split(","))


def test_a_reward_file_is_imported_once_and_weights_match(tmp_path: Path) -> None:
    path, log = tmp_path / "own.py", tmp_path / "log"
    path.write_text(f"open({str(log)!r}, 'a').write('x')\ndef a(**k): ...\ndef b(**k): ...\n")
    found = load_rewards([f"{path}:a", f"{path}:b=-0.5", "length:20=1e-2"])
    assert [(reward.name, reward.weight) for reward in found] == [("a", 1), ("b", -0.5), ("length", 0.01)]
    assert log.read_text() == "x"


def scored(function: Any, *, zero: bool = False, seconds: float = 60) -> list[float | None]:
    batch = {"prompts": ["?"] * 3, "completions": list("abc"), "completion_ids": [[1]] * 3, "answer": [1, 0, 2]}
    scorer = Scorer([Reward("mine", 1.0, function)], zero_on_error=zero, seconds=seconds)
    return scorer.score(batch, [7, 7, 9])["mine"]


def divide(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [1 / each for each in answer]


def test_failing_reward_functions_are_named_with_their_row(lines: list[str]) -> None:
    with pytest.raises(RolloutError, match="mine failed at row 7 of the dataset: ZeroDivisionError"):
        scored(divide)
    assert scored(divide, zero=True) == [1, 0, 0.5] and "1 answers count as 0" in lines[-1]
    with pytest.raises(RolloutError, match="row 7, 9 of the dataset: ValueError: it returned 2 values for 1 answers"):
        scored(lambda **_: [1, 2])
    with pytest.raises(RolloutError, match="it returned nan"):
        scored(lambda completions, **_: [math.nan] * len(completions))
    with pytest.raises(RolloutError, match="TypeError"):
        scored(lambda **_: 3)
    with pytest.raises(RolloutError, match=r"row 7, 9 .* did not return within 0.5 s \(--hang_minutes\)"):
        scored(lambda **_: time.sleep(30), seconds=0.5)
    assert scored(lambda **_: time.sleep(30), zero=True, seconds=0.5) == [0, 0, 0]
    assert scored(lambda completions, **_: [None] * len(completions)) == [None] * 3


def test_timeout_raised_by_a_reward_function_is_its_own_error() -> None:
    def ask(**_: Any) -> list[float]:
        raise TimeoutError("the judge does not answer")

    with pytest.raises(RolloutError, match="TimeoutError: the judge does not answer"):
        scored(ask)


def test_reward_functions_get_their_own_copy() -> None:
    def spoil(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.reverse()
        return [float(ids.pop()) for ids in completion_ids]

    batch = {"prompts": ["?"], "completions": ["a", "b"], "completion_ids": [[1, 2], [3]]}
    found = Scorer([Reward("mine", 1.0, spoil)], zero_on_error=False, seconds=60).score(batch, [1, 1])
    assert found["mine"] == [2, 3]
    assert batch == {"prompts": ["?"], "completions": ["a", "b"], "completion_ids": [[1, 2], [3]]}


def test_rewards_that_only_work_one_by_one_are_logged(lines: list[str]) -> None:
    def one_by_one(completions: list[str], **_: Any) -> list[float]:
        [said] = completions
        return [float(said == "b")]

    assert scored(one_by_one) == [0, 1, 0] and "for all answers together, and for none alone" in lines[-1]


def test_advantages_are_by_group_batch_or_difference() -> None:
    rewards = [[1.0, 0.0, 0.5], [2.0, 2.0, 2.0], [1.0, math.nan, 3.0], [math.nan] * 3]
    known = [[value for value in group if not math.isnan(value)] for group in rewards]
    all_of_them = statistics.stdev([value for group in known for value in group])
    for scale in ("group", "batch", "none"):
        found = advantages(np.array(rewards), scale)
        for place, group in enumerate(known):
            for at, value in enumerate(rewards[place]):
                difference = 0.0 if math.isnan(value) else value - statistics.fmean(group)
                spread = all_of_them if scale == "batch" else statistics.stdev(group) if len(group) > 1 else 0
                divisor = 1 if scale == "none" else spread + 1e-4
                assert found[place, at] == pytest.approx(difference / divisor, abs=1e-12)


def rollout(**changed: Any) -> Rollout:
    usual = {"step": 1, "version": 0, "row": 1, "prompt": "?", "text": "a", "completion": Completion([5, 6], True)}
    reward = changed.get("reward", 1.0)
    usual |= {"reward": reward, "rewards": {"mine": reward}, "advantage": 0.0, "prompt_ids": [3]}
    return Rollout(**usual | changed)


def test_a_rollout_is_the_line_that_runs_before_wrote() -> None:
    names = "step version row prompt completion finish reward rewards advantage prompt_ids token_ids"
    made = rollout(reward=None, completion=Completion([5], False, [-1.0]), old_logps=[-2.0])
    assert list(rollout().to_json()) == names.split()
    assert list(made.to_json()) == [*names.split(), "sampled_logps", "old_logps"]
    assert made.to_json()["finish"] == "length" and Rollout.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_metrics_of_answers_have_trls_names_and_values() -> None:
    rewards, tokens, is_done = (1, 0, 1, None), (2, 4, 3, 4), (True, False, True, False)
    made = [Completion([0] * number, done) for number, done in zip(tokens, is_done, strict=True)]
    found = metrics_of([rollout(reward=reward, completion=each) for reward, each in zip(rewards, made, strict=True)], 2)
    assert found["reward"] == found["rewards/mine/mean"] == pytest.approx(2 / 3)
    assert found["reward_std"] == found["rewards/mine/std"] == pytest.approx(statistics.stdev([1, 0, 1]))
    lengths = {kind: found[f"completions/{kind}_length"] for kind in ("mean", "min", "max", "mean_terminated")}
    assert lengths == {"mean": 3.25, "min": 2, "max": 4, "mean_terminated": 2.5}
    assert found["completions/clipped_ratio"] == 0.5 and found["frac_reward_zero_std"] == 0


def test_truncating_rollouts_keeps_whole_lines_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    assert truncate_rollouts(path, 3) == []
    for step in (1, 3, 5):
        append_rollouts(path, [rollout(step=step, text="a\u2028b"), rollout(step=step, text="c")])
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:5]) + whole[5][:9])  # a kill in the middle of a line
    assert [record["completion"] for record in truncate_rollouts(path, 6)] == ["a\u2028b"]
    assert path.read_bytes() == b"".join(whole[:5])
    assert [record["step"] for record in truncate_rollouts(path, 4)] == [3, 3]
    assert path.read_bytes() == b"".join(whole[:4])
    assert truncate_rollouts(path, 0) == [] and not path.read_bytes()


def test_non_finite_rewards_are_recorded_and_then_refused(tmp_path: Path) -> None:
    append_rollouts(tmp_path / "rollouts.jsonl", [rollout(old_logps=[math.nan, -math.inf])])
    [record] = truncate_rollouts(tmp_path / "rollouts.jsonl", 1)
    assert math.isnan(record["old_logps"][0]) and record["old_logps"][1] == -math.inf
