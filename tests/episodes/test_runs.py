"""Runs whose answers are episodes: on several ranks, in 16 bits, killed, and with environments that
fail.
"""

import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from fsdp_qlora.utils.errors import ENDINGS
from tests.chaos.harness import adapter, run
from tests.episodes.runs import inputs
from tests.helpers.metrics import read_metrics
from tests.helpers.run import train_ok
from tests.rollouts.runs import rollouts_of
from tests.rollouts.test_runs import kill_at


def is_count_kept(line: dict[str, Any]) -> bool:
    """Whether the tool's answers, and the reward, are those of the calls of the episode."""
    said = [m["content"] for m in line["episode"]["messages"] if m["role"] == "tool"]
    count = int(line["prompt"][0]["content"].removeprefix("count "))
    is_right = said == ["more" if 1 + number < count else "done" for number in range(len(said))]
    # The last turn's calls are made, too, where the episode ends with them.
    taken = line["episode"]["num_calls"]
    return is_right and line["reward"] == float(taken == count)


def compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare the lines of two runs.

    The sampled log-probabilities are equal but for rounding: a round may have had other episodes.
    """
    assert len(found) == len(expected) > 0
    for first, second in zip(found, expected, strict=True):
        logps = [torch.tensor(line["sampled_logps"]) for line in (first, second)]
        torch.testing.assert_close(*logps, atol=1e-5, rtol=1e-5)
        assert first | {"sampled_logps": None} == second | {"sampled_logps": None}


def test_episodes_are_the_same_on_one_and_two_ranks(agent, tmp_path):
    options = inputs(tmp_path, agent, max_steps=2, num_epochs=2)
    for ranks in (1, 2):
        train_ok(ranks, tmp_path / str(ranks), **options, gradient_accumulation_steps=16 // ranks)
    one, two = (rollouts_of(tmp_path / ranks) for ranks in "12")
    assert len(one) == 32 and all(map(is_count_kept, one))
    compare(one, two)
    for name in ("loss", "reward", "grad_norm", "tools/call_frequency"):
        of_both = [torch.tensor(read_metrics(tmp_path / ranks, name)) for ranks in "12"]
        torch.testing.assert_close(*of_both, atol=1e-5, rtol=1e-4)
    turns = [line["episode"]["num_turns"] for line in one]
    assert 1 in turns and max(turns) > 2
    # What is trained is what was sampled: nothing was tokenized again.
    tokenizer = AutoTokenizer.from_pretrained(agent)
    for line in one:
        for start, end in line["episode"]["environment_spans"]:
            written = tokenizer.decode(line["token_ids"][start:end])
            assert "more" in written or "done" in written
            assert written.endswith("<|im_start|>assistant\n")
            assert set(line["sampled_logps"][start:end]) == {0.0} if "sampled_logps" in line else 1


@pytest.mark.parametrize("train_type", ["qlora", "lora"])
def test_episodes_in_16_bits_are_trained_in_micro_batches_on_two_ranks(train_type, agent, tmp_path):
    changes = {"train_type": train_type, "precision": "bf16", "batch_size": 4}
    options = inputs(tmp_path, agent, **changes, gradient_accumulation_steps=2, max_steps=1)
    train_ok(2, tmp_path / "out", **options)
    found = rollouts_of(tmp_path / "out")
    assert len(found) == 16 and all(map(is_count_kept, found))
    ratio = read_metrics(tmp_path / "out", "sampling/importance_sampling_ratio/mean")[0]
    assert 0.97 < ratio < 1.03


BROKEN = '''
import os

class Broken:
    def reset(self, count, **row):
        self.count = count
        if "{where}" == "reset":
            os._exit(3)

    def take(self) -> str:
        """Take one."""
        if self.count > 2:
            os._exit(3)
        return "0 left"

    def get_reward(self):
        return float(self.count)
'''


def broken(folder: Path, where: str) -> str:
    (folder / "broken.py").write_text(BROKEN.replace("{where}", where))
    return f"{folder / 'broken.py'}:Broken"


def test_an_environment_that_ends_costs_its_episode_alone(agent, tmp_path):
    options = inputs(tmp_path, agent, environment=broken(tmp_path, "take"), max_steps=1)
    train_ok(2, tmp_path / "out", **options, gradient_accumulation_steps=8)
    found = rollouts_of(tmp_path / "out")
    failed = [line for line in found if line["episode"]["end"] == "failed"]
    assert failed and all(line["row"] > 2 and line["reward"] is None for line in failed)
    assert all("status 3" in line["episode"]["problem"] for line in failed)
    assert all(line["advantage"] == 0 for line in failed)
    assert read_metrics(tmp_path / "out", "episodes/failed") == [len(failed)]


def test_too_many_failed_environments_end_the_run_in_a_sentence(agent, tmp_path):
    options = inputs(
        tmp_path, agent, environment=broken(tmp_path, "reset"), output_dir=tmp_path / "o"
    )
    said = run({**options, "gradient_accumulation_steps": 8}, tmp_path / "logs", [1, 1])
    assert "The environment failed in" in said and "No weight was updated" in said


STOPPING = '''
import time

class Stopping:
    def reset(self, **row):
        pass

    def take(self) -> str:
        """Take one."""
        time.sleep(600)
        return ""

    def get_reward(self):
        return 1.0
'''


@pytest.mark.slow
def test_a_run_stops_while_an_environment_works(agent, tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPING)
    options = inputs(tmp_path, agent, environment=f"{tmp_path / 'stopping.py'}:Stopping")
    options |= {"gradient_accumulation_steps": 8, "output_dir": tmp_path / "out"}
    stopped = partial(kill_at, "rows", 60, with_signal=signal.SIGTERM)
    preempted = [ENDINGS["preempted"].exit_code] * 2
    said = run(options, tmp_path / "logs", preempted, fault=stopped)
    assert "Stopped while step 1 waited for answers (SIGTERM)" in said
    assert '"end": "failed"' not in (tmp_path / "out" / "episodes.jsonl").read_text()


# "rows" is while turns are generated and tools work, too.
MOMENTS = {"rows": (20, 120), "compute": (6, 12), "save": (60, 120), "update": (1, 2)}


@pytest.mark.slow
def test_killed_at_any_moment_episodes_give_the_same_bytes(agent, tmp_path):
    options = inputs(tmp_path, agent, gradient_accumulation_steps=8, num_epochs=3)
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    run({**options, "output_dir": whole}, tmp_path / "reference")
    choose = random.Random(7)
    for phase, numbers_of in MOMENTS.items():
        killed = {"fault": kill_at, "arguments": (phase, choose.randint(*numbers_of))}
        run({**options, "output_dir": out}, tmp_path / phase, [-9, -9], **killed)
    run({**options, "output_dir": out}, tmp_path / "last")
    compare(rollouts_of(out), rollouts_of(whole))
    assert adapter(out) == adapter(whole)
    for name in ("loss", "reward", "grad_norm", "episodes/mean_turns"):
        assert read_metrics(out, name) == read_metrics(whole, name)
