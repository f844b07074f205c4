"""Reward functions: the ready ones, the user's own, their failures, and the advantages that follow
from them.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.advantages import advantages, metrics_of
from fsdp_qlora.training.rl.rewards import Scorer, check_answers, parse_rewards
from fsdp_qlora.training.rl.rollout_file import (
    Rollout,
    RolloutPrompt,
    append_rollouts,
    truncate_rollouts,
)
from fsdp_qlora.utils.errors import RolloutError, TrainingError, UserError

pytestmark = pytest.mark.quick

SAID = ["42", " 42\n", "it is $1,042.50.", "none", "6 x 7 = 42"]


def values_of(word: str, completions: list[Any] = SAID, **columns: Any) -> list[float | None]:
    """What the ready function says of the answers, as a run calls it."""
    ids = [list(range(len(said))) for said in completions]
    batch = {
        "prompts": ["?"] * len(ids),
        "completions": completions,
        "completion_ids": ids,
        **columns,
    }
    with contextlib.closing(Scorer([word], zero_on_error=False, seconds=60)) as scorer:
        [values] = scorer.score(batch, range(len(ids))).values()
    return values


def test_builtin_rewards_score_text_and_messages():
    assert values_of("exact_match", answer=["42"] * 5) == [1, 1, 0, 0, 0]
    assert values_of("number", answer=["40 + 2\n#### 42"] * 5) == [1, 1, 0, 0, 1]
    assert values_of("number", solution=["1042.5"] * 4 + [None]) == [0, 0, 1, 0, None]
    assert values_of("regex:<a>.*</a>", ["<a>\n1</a>", "x<a></a>", " <a></a> "]) == [1, 0, 1]
    assert values_of("length:2", ["", "ab", "abc", "abcd", "abcdefgh"]) == [0, 0, -0.5, -1, -1]
    messages = [[{"role": "assistant", "content": said}] for said in SAID]
    # weighed later
    assert values_of("exact_match=2", messages, answer=["42"] * 5) == [1, 1, 0, 0, 0]
    assert values_of("number") == [None] * 5  # nothing is known to be right


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        (None, "{path}:f", "cannot be read: No such file"),
        ("def f(:\n", "{path}:f", "own.py:1 cannot be run: SyntaxError"),
        ("import os\n\nx = os.nosuch\n", "{path}:f", "own.py:3 cannot be run: AttributeError"),
        ("import sys\nsys.exit(0)\n", "{path}:f", "own.py:2 cannot be run: SystemExit: 0"),
        ("import os\nos._exit(0)\n", "{path}:f", "own.py:f: its process has ended (status 0)"),
        ("while True: pass\n", "{path}:f", "own.py:f: it did not return within 2 s"),
        ("x = [0] * 10**10\n", "{path}:f", "MemoryError: it takes more than 4 GiB"),
        ("raise ValueError('\\ud800')\n", "{path}:f", r"ValueError: \ud800"),
        ("def g(): pass\n", "{path}:f", "has no function 'f'. It has: g."),
        ("f = 3\n", "{path}:f", "has no function 'f'"),
        ("", "/dev/zero/../zero.py:f", "cannot be read"),
        ("", "nosuch", "one of exact_match, number, regex:..., length:..."),
        ("", "regex:(", "cannot be used"),
        ("", "length:0", "cannot be used"),
        ("", "regex", "there is no such function"),
        ("", "number:3", "there is no such function"),
        ("", "number=1e400", "a finite number"),
        ("def number(): pass\n", "number,{path}:number", "two functions are called number"),
    ],
)
def test_invalid_reward_functions_are_named_before_training(tmp_path, text, word, said):
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        Scorer(
            word.format(path=path).split(","),
            zero_on_error=False,
            seconds=2 if "2 s" in said else 60,
        ).start()


IMPORTS = """
from __future__ import annotations
import multiprocessing, pathlib
from dataclasses import dataclass
from beside import ONE
pathlib.Path(__file__).with_name("log").open("a").write("x")
@dataclass
class Weight:
    value: float = ONE
def scored(said): return len(said) * Weight().value
def a(completions, **_):
    with multiprocessing.Pool(2) as pool: return pool.map(scored, completions)
def b(completions, **_): return [None] * len(completions)
"""


def test_a_reward_file_runs_once_with_its_neighbours_and_pools(tmp_path):
    path = tmp_path / "own.py"
    log = tmp_path / "log"
    path.write_text(IMPORTS)
    (tmp_path / "beside.py").write_text("ONE = 1.0")
    words = [f"{path}:a", f"{path}:b=-0.5", "length:20=1e-2"]
    with contextlib.closing(Scorer(words, zero_on_error=False, seconds=60)) as s:
        assert [(reward.name, reward.weight) for reward in s.rewards] == [
            ("a", 1),
            ("b", -0.5),
            ("length", 0.01),
        ]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        assert s.start()[1:] == [f"own.py:b=-0.5 (sha256 {digest})", "length:20=0.01"]
        for _ in range(2):
            assert s.score(BATCH, [7, 7, 9])["a"] == [1, 2, 3]
        assert log.read_text() == "x"


BATCH = {
    "prompts": ["?"] * 3,
    "completions": ["a", "bb", "ccc"],
    "completion_ids": [[1]] * 3,
    "answer": [1, 0, 2],
}
CALLS = (
    "import math, os, pathlib, re, time\ncalls = []\ndef f(completions, answer, **_):\n    "
    "calls.append(0)\n    "
)
# What a function does -> what is said, and the values where errors count as zero.
FAILING: dict[str, tuple[str, str, list[float]]] = {
    "an error": (
        "return [1 / each for each in answer]",
        "row 7 of the dataset: ZeroDivisionError",
        [0, 0, 0],
    ),
    "once": (
        "if len(calls) == 1: raise ConnectionError('busy')\n    return [sorted(answer).index(a) "
        "for a in answer]",
        "row 7, 9 of the dataset: ConnectionError: busy",
        [0, 0, 0],
    ),
    "its own timeout": (
        "raise TimeoutError('no judge')",
        "row 7 of the dataset: TimeoutError: no judge",
        [0, 0, 0],
    ),
    "too few": (
        "return [1.0]",
        "row 7, 9 of the dataset: it returned 1 values for 3 answers",
        [0, 0, 0],
    ),
    "too many": ("return [1.0] * 9", "it returned 9 values for 3 answers", [0, 0, 0]),
    "without an end": (
        "import itertools; return itertools.repeat(1.0)",
        "it returned 4 values for 3",
        [0, 0, 0],
    ),
    "nan": ("return [1, math.nan, 3]", "row 7 of the dataset: it returned nan", [1, 0, 3]),
    "a text": (
        "return '1' * len(completions)",
        "row 7 of the dataset: TypeError: it returned a str",
        [0, 0, 0],
    ),
    "texts": ("return [1, 2, '3']", "row 9 of the dataset: it returned '3'", [1, 2, 0]),
    "a set": ("return {1.0, 2.0, 3.0}", "TypeError: it returned a set", [0, 0, 0]),
    "bytes": ("return [1, 2, b'3']", "row 9 of the dataset: it returned b'3'", [1, 2, 0]),
    "a number": ("return 3", "TypeError", [0, 0, 0]),
    "an exit": ("raise SystemExit(0)", "SystemExit: 0", [0, 0, 0]),
    "a hard exit": ("os._exit(0)", r"row 7, 9 .* its process has ended \(status 0\)", [0, 0, 0]),
    "memory": (
        "x = [bytes(2**26) for _ in range(999)]",
        "MemoryError: it takes more than 4 GiB",
        [0, 0, 0],
    ),
    "sleep": (
        "time.sleep(60)",
        r"row 7, 9 .* did not return within 1 s \(--hang_minutes\)",
        [0, 0, 0],
    ),
    "backtracking": (
        "re.fullmatch('(?:.|.|.)*#', 'a' * 99)",
        "did not return within 1 s",
        [0, 0, 0],
    ),
    "words of its own": ("raise ValueError('\\ud800')", r"ValueError: \\ud800", [0, 0, 0]),
}


@pytest.mark.parametrize("kind", FAILING)
def test_failing_reward_functions_are_named_with_their_row(kind, tmp_path, lines):
    does, said, values = FAILING[kind]
    path = tmp_path / "own.py"
    path.write_text(CALLS + does)
    for zero in (False, True):
        seconds = 1 if "return within" in said else 60
        with contextlib.closing(
            Scorer([f"{path}:f"], zero_on_error=zero, seconds=seconds)
        ) as scorer:
            if zero:
                assert scorer.score(BATCH, [7, 7, 9]) == {"f": values}
                assert f"{sum(not value for value in values)} answers count as 0" in lines[-1]
                continue
            with pytest.raises(RolloutError, match=f"The reward function f failed at .*{said}"):
                scorer.score(BATCH, [7, 7, 9])


def test_reward_functions_get_a_copy_and_their_prints_are_no_answers(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import sys\ndef f(completions, completion_ids, day, **_):\n    print('{}'); "
        "completions.reverse()\n"
        "    assert not sys.stdin.read() and day == ['2024-05-06', None]\n"
        "    return [float(ids.pop()) for ids in completion_ids]\n"
    )
    day = [datetime.date(2024, 5, 6), None]  # JSON has no dates
    batch = {
        "prompts": ["?"] * 2,
        "completions": ["a", "b"],
        "completion_ids": [[1, 2], [3]],
        "day": day,
    }
    with contextlib.closing(Scorer([f"{path}:f"], zero_on_error=False, seconds=60)) as scorer:
        assert [scorer.score(batch, [1, 1]) for _ in range(2)] == [{"f": [2, 3]}] * 2
    assert batch["completions"] == ["a", "b"] and batch["completion_ids"] == [[1, 2], [3]]


def test_rewards_without_a_right_answer_are_refused_with_the_columns():
    rows = [
        {"prompt": "sort", "ground_truth": "blue"},
        {"prompt": "list", "other": 1, "answer": None},
    ]
    with pytest.raises(
        UserError,
        match=r"have: prompt, ground_truth, other, answer\..* --columns answer=ground_truth",
    ):
        check_answers(parse_rewards(["length:3", "exact_match"]), rows)
    check_answers(parse_rewards(["length:3"]), rows)
    check_answers(parse_rewards(["number"]), [*rows, {"solution": "3"}])


def test_advantages_are_by_group_batch_or_difference():
    rewards = [[1.0, 0.0, 0.5], [2.0, 2.0, 2.0], [1.0, math.nan, 3.0], [math.nan] * 3]
    known = [[value for value in group if not math.isnan(value)] for group in rewards]
    all_of_them = statistics.stdev([value for group in known for value in group])
    for scale in ("group", "batch", "none"):
        found = advantages(np.array(rewards), scale)
        for place, group in enumerate(known):
            for at, value in enumerate(rewards[place]):
                difference = 0.0 if math.isnan(value) else value - statistics.fmean(group)
                spread = (
                    all_of_them
                    if scale == "batch"
                    else statistics.stdev(group)
                    if len(group) > 1
                    else 0
                )
                divisor = 1 if scale == "none" else spread + 1e-4
                assert found[place, at] == pytest.approx(difference / divisor, abs=1e-12)


def rollout(**changed: Any) -> Rollout:
    usual = {
        "step": 1,
        "version": 0,
        "row": 1,
        "prompt": RolloutPrompt("?", [3]),
        "text": "a",
        "completion": Completion([5, 6], True),
    }
    reward = changed.get("reward", 1.0)
    usual |= {"reward": reward, "rewards": {"mine": reward}, "advantage": 0.0}
    return Rollout(**usual | changed)


def test_a_rollout_is_the_line_that_runs_before_wrote():
    names = (
        "step version row prompt completion finish reward rewards advantage prompt_ids token_ids"
    )
    made = rollout(reward=None, completion=Completion([5], False, [-1.0]), old_logps=[-2.0])
    assert list(rollout().to_json()) == names.split()
    assert list(made.to_json()) == [*names.split(), "sampled_logps", "old_logps"]
    assert (
        made.to_json()["finish"] == "length"
        and Rollout.from_json(json.loads(json.dumps(made.to_json()))) == made
    )


def test_metrics_of_answers_have_trls_names_and_values():
    rewards = (1, 0, 1, None)
    tokens = (2, 4, 3, 4)
    is_done = (True, False, True, False)
    made = [Completion([0] * number, done) for number, done in zip(tokens, is_done, strict=True)]
    found = metrics_of(
        [
            rollout(reward=reward, completion=each)
            for reward, each in zip(rewards, made, strict=True)
        ],
        2,
    )
    assert found["reward"] == found["rewards/mine/mean"] == pytest.approx(2 / 3)
    assert (
        found["reward_std"]
        == found["rewards/mine/std"]
        == pytest.approx(statistics.stdev([1, 0, 1]))
    )
    lengths = {
        kind: found[f"completions/{kind}_length"]
        for kind in ("mean", "min", "max", "mean_terminated")
    }
    assert lengths == {"mean": 3.25, "min": 2, "max": 4, "mean_terminated": 2.5}
    assert found["completions/clipped_ratio"] == 0.5 and found["frac_reward_zero_std"] == 0


def test_truncating_rollouts_keeps_whole_lines_up_to_a_step(tmp_path):
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


# What becomes of a file's lines of steps 1, 3 and 5 -> the lines that are left at step 3.
DAMAGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a letter": (lambda lines: [lines[0], b"x" + lines[1][1:], *lines[2:]], 4),
    "a blank line": (lambda lines: [lines[0], b"\n", *lines[2:]], 4),
    "a later step": (lambda lines: [lines[0], lines[5], *lines[2:]], 4),
    "nothing but zeros": (lambda lines: [*lines[:4], b"\0" * 99], 4),
    "the last line": (lambda lines: [*lines[:3], b"x\n", *lines[4:]], 4),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_line_removes_no_line_behind_it(kind, tmp_path, lines):
    path = tmp_path / "rollouts.jsonl"
    for step in (1, 3, 5):
        append_rollouts(path, [rollout(step=step), rollout(step=step)])
    damage, left = DAMAGED[kind]
    damaged = damage(path.read_bytes().splitlines(keepends=True))
    path.write_bytes(b"".join(damaged))
    last = truncate_rollouts(path, 3)
    assert [record["step"] for record in last] == [3] * (1 if kind == "the last line" else 2)
    assert path.read_bytes() == b"".join(damaged[:left])
    assert any("damaged lines" in line for line in lines) == (
        kind not in ("a later step", "nothing but zeros")
    )


def test_rollouts_that_are_no_file_are_refused(tmp_path):
    folder, pipe, link = (tmp_path / name for name in ("folder", "pipe", "link"))
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "other")
    for path in (folder, pipe, link):
        with pytest.raises(TrainingError, match=r"cannot be continued: (it is|Is a)"):
            truncate_rollouts(path, 3)


def test_a_full_disk_makes_room_for_rollouts_or_ends_the_run(tmp_path, monkeypatch):
    path = tmp_path / "rollouts.jsonl"
    full = iter([True, True, False])
    append_rollouts(path, [rollout()])

    def flush(_: int) -> None:
        if next(full, True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fsdp_qlora.checkpoint.result.os.fsync", flush)
    for step in (1, 2, 3):
        (tmp_path / "checkpoints" / f"step_{step:06}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step:06}" / "manifest.json").write_text("{}")
    append_rollouts(path, [rollout(step=2)])
    assert [record["step"] for record in map(json.loads, path.read_text().splitlines())] == [1, 2]
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
    with pytest.raises(RolloutError, match="cannot be written: No space left on device"):
        append_rollouts(path, [rollout(step=3)])


def test_non_finite_rewards_are_recorded_and_then_refused(tmp_path):
    append_rollouts(tmp_path / "rollouts.jsonl", [rollout(old_logps=[math.nan, -math.inf])])
    [record] = truncate_rollouts(tmp_path / "rollouts.jsonl", 1)
    assert math.isnan(record["old_logps"][0]) and record["old_logps"][1] == -math.inf
