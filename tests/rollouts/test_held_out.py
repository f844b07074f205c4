"""Scores of answers to held-out prompts: what they measure, choose and never change."""

import json
import math
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.held_out import held_out_prompts
from fsdp_qlora.data.run_data import read_rows as read_data
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.run.facts import describe_result
from fsdp_qlora.training.reward_gap import RewardGap
from fsdp_qlora.training.rl.advantages import reward_metrics, sums_of_rewards
from fsdp_qlora.utils.errors import ENDINGS
from tests.chaos.harness import adapter, numbers, run, status
from tests.helpers.metrics import metrics_of, read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, train_ok
from tests.helpers.tokenizers import make_tokenizer
from tests.rollouts.runs import inputs
from tests.rollouts.test_runs import kill_at

# It counts its calls and draws numbers: in the process of the training's functions it would give
# these other values.
STATEFUL = """
import random, pathlib
calls = 0
def short(completions, prompts, **_):
    global calls
    calls += 1
    with open(pathlib.Path(__file__).with_suffix(".txt"), "a") as file:
        print(*prompts, sep=";", file=file)
    return [random.Random(calls).random() - len(said) / 10 for said in completions]
def tokens(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]
"""
SCORED = {"eval_steps": 2, "max_completion_length": 8}


def sft_inputs(models: Models, folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "own.py").write_text(STATEFUL)
    rows = write_rows(folder / "rows.jsonl", make_rows(21))
    options = {"model_name": models(), "dataset": rows, "precision": "fp32", "lora_rank": 4}
    options |= {"lora_dropout": 0.1, "lr": 3e-3, "max_steps": 4, "eval_fraction": 0.2}
    return {**options, "eval_steps": 2, "quant_cache": "off", "save_every": 1, **changes}


def grpo_inputs(models: Models, folder: Path, **changes: Any) -> dict[str, Any]:
    held_out = [{"question": f"name {number}", "answer": number % 3} for number in range(5)]
    file = write_rows(folder / "held_out.jsonl", held_out)  # type: ignore[arg-type]
    options = inputs(models, folder, function=STATEFUL, gradient_accumulation_steps=4)
    return {**options, "max_steps": 4, "eval_dataset": file, **SCORED, **changes}


def scored_by(folder: Path) -> dict[str, Any]:
    return {"eval_rewards": f"{folder / 'own.py'}:short=0.5,{folder / 'own.py'}:tokens"}


def of_steps(output_dir: Path) -> list[dict[str, Any]]:
    return [record for record in numbers(output_dir) if "loss" in record]


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_change_no_byte_of_training_on_texts(ranks, models, tmp_path):
    options = sft_inputs(models, tmp_path)
    scores = scored_by(tmp_path) | {"max_completion_length": 8}
    said = train_ok(ranks, tmp_path / "with", **options, **scores)
    train_ok(ranks, tmp_path / "without", **options)
    assert adapter(tmp_path / "with") == adapter(tmp_path / "without")
    assert of_steps(tmp_path / "with") == of_steps(tmp_path / "without")
    losses = [read_metrics(tmp_path / name, "eval_loss") for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert f"answers to 4 held-out prompts, of {4 // ranks} on a rank" in said
    for record in metrics_of(tmp_path / "with"):
        if "eval_loss" in record:
            means = [record[f"eval_rewards/{name}/mean"] for name in ("short", "tokens")]
            assert record["eval_reward"] == pytest.approx(0.5 * means[0] + means[1])
            assert means[1] == record["eval_completions/mean_length"] > 0
    # Each evaluation asks the same held-out prompts.
    asked = (tmp_path / "own.txt").read_text().splitlines()
    assert len(asked) == 3 and len(set(asked)) == 1


def test_scores_change_no_byte_of_training_on_rewards(models, tmp_path):
    options = grpo_inputs(models, tmp_path)
    said = train_ok(2, tmp_path / "with", **options, **scored_by(tmp_path))
    without = {name: value for name, value in options.items() if not name.startswith("eval_")}
    train_ok(2, tmp_path / "without", **without)
    assert adapter(tmp_path / "with") == adapter(tmp_path / "without")
    assert of_steps(tmp_path / "with") == of_steps(tmp_path / "without")
    found = [record for record in metrics_of(tmp_path / "with") if "eval_reward" in record]
    assert [record["step"] for record in found] == [0, 2, 4]
    assert not any("eval_loss" in record or "loss" in record for record in found)
    names = [*of_steps(tmp_path / "with")[0]]
    assert names.index("reward_std") + 1 == names.index("frac_reward_zero_std")
    assert "answers to 5 held-out prompts, of 3 on a rank" in said and "held-out score" in said
    # Greedy answers to the same prompts are those of one rank.
    train_ok(
        1, tmp_path / "one", **options | {"gradient_accumulation_steps": 8}, **scored_by(tmp_path)
    )
    lengths = [
        read_metrics(tmp_path / name, "eval_completions/mean_length") for name in ("with", "one")
    ]
    assert lengths[0] == lengths[1]


LENGTHS = """
def tokens(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]
def short(completions, answer, **_):
    return [a - len(said) / 10 for said, a in zip(completions, answer)]
def rare(completions, **_):
    return [None for _ in completions]
"""


@pytest.mark.parametrize("phase", ["rows", pytest.param("save", marks=pytest.mark.slow)])
def test_a_killed_run_chooses_the_same_best_by_a_score(phase, models, tmp_path):
    options = grpo_inputs(models, tmp_path, num_epochs=2, max_steps=6, eval_steps=1)
    (tmp_path / "own.py").write_text(LENGTHS)
    options |= {"eval_rewards": f"{tmp_path / 'own.py'}:short", "best_by": "short"}
    options |= {"early_stopping": 3, "save_every": 2, "gradient_accumulation_steps": 4}
    run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "logs")
    out = tmp_path / "killed"
    options["output_dir"] = out
    fault = partial(kill_at, phase, {"rows": 60, "save": 260}[phase])
    run(options, tmp_path / "first", [-signal.SIGKILL] * 2, fault=fault)
    assert status(out)["state"] == "running"
    assert "Resuming at step" in run(options, tmp_path / "second")
    assert numbers(out) == numbers(tmp_path / "whole")
    for folder in (tmp_path / "whole", out):
        scores = read_metrics(folder, "eval_rewards/short/mean")[1:]
        best = scores.index(max(scores)) + 1
        record = json.loads((folder / "best/training.json").read_text())
        assert (record["step"], record["losses"]["best_by"]) == (best, "short")
        assert record["losses"]["eval_score"] == max(scores)
        assert record["settings"]["best_by"] == "short"
    assert adapter(out / "best") == adapter(tmp_path / "whole/best")


def test_a_score_without_values_is_never_the_best(models, tmp_path):
    options = grpo_inputs(models, tmp_path, eval_steps=1, early_stopping=2, max_steps=4)
    (tmp_path / "own.py").write_text(LENGTHS)
    options |= {"eval_rewards": f"{tmp_path / 'own.py'}:rare"}
    said = train_ok(1, tmp_path / "out", **options)
    assert "Stopped early after step 2: 2 evaluations without a finite reward" in said
    assert not (tmp_path / "out/best").exists()
    assert read_metrics(tmp_path / "out", "eval_reward") == [None] * 3


def test_a_failing_function_of_an_evaluation_ends_the_run(models, tmp_path):
    options = sft_inputs(models, tmp_path, output_dir=tmp_path / "out")
    (tmp_path / "own.py").write_text("def f(completions, **_):\n    raise ValueError('no')\n")
    options |= {"eval_rewards": f"{tmp_path / 'own.py'}:f", "max_completion_length": 8}
    said = run(options, tmp_path / "logs", [1, 1])
    assert "The reward function f failed at row" in said
    assert "of the held-out dataset: ValueError: no" in said
    said = run({**options, "on_reward_error": "zero"}, tmp_path / "again")
    assert "answers count as 0" in said
    assert read_metrics(tmp_path / "out", "eval_reward") == [0, 0, 0]


# The second of three evaluations is the best; those that a stop ends do not come here.
SECOND = """
import pathlib
def f(completions, **_):
    calls = pathlib.Path(__file__).with_suffix(".calls")
    number = len(calls.read_text()) if calls.exists() else 0
    calls.write_text("x" * (number + 1))
    return [float(number % 3 == 1) for _ in completions]
"""


def test_a_run_stops_while_held_out_prompts_are_answered(models, tmp_path):
    options = sft_inputs(models, tmp_path, output_dir=tmp_path / "out", save_total_limit=1)
    (tmp_path / "own.py").write_text(SECOND)
    options |= {"eval_rewards": f"{tmp_path / 'own.py'}:f", "max_completion_length": 8}
    options["best_by"] = "reward"
    preempted = [ENDINGS["preempted"].exit_code] * 2
    # At the first evaluation, and at the second one: a step beats once.
    for number, step in ((4, 0), (17, 2)):
        stopped = partial(kill_at, "rows", number, with_signal=signal.SIGTERM)
        said = run(options, tmp_path / f"stopped{step}", preempted, fault=stopped)
        assert f"Stopped in the evaluation after step {step} (SIGTERM)" in said
        assert (tmp_path / f"out/checkpoints/step_{step:06}").is_dir()
    run(options, tmp_path / "finished")
    run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "whole_logs")
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")
    for name in ("", "best"):
        assert adapter(tmp_path / "out" / name) == adapter(tmp_path / "whole" / name)
        records = []
        for folder in ("out", "whole"):
            records.append(json.loads((tmp_path / folder / name / "training.json").read_text()))
        assert records[0]["losses"] == records[1]["losses"]
        assert records[0]["step"] == records[1]["step"] == (2 if name else 4)


def test_evaluate_scores_as_the_run_did(models, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", make_rows(5, seed=7))
    options = sft_inputs(models, tmp_path, eval_fraction=0, eval_dataset=held_out)
    (tmp_path / "own.py").write_text(LENGTHS)
    words = f"{tmp_path / 'own.py'}:tokens=0.5,length:4"
    scores = {"eval_rewards": words, "max_completion_length": 8}
    train_ok(1, tmp_path / "out", **options, **scores)
    expected = [record for record in metrics_of(tmp_path / "out") if "eval_reward" in record][-1]
    argv = ["evaluate", str(tmp_path / "out"), "--dataset", str(held_out), "--json"]
    argv += flags(quant_cache="off", **scores)
    for objective in ("sft", "grpo"):
        logs = tmp_path / objective
        statuses, output = on_ranks(2, main, ([*argv, "--objective", objective],), logs)
        assert statuses == [0, 0], output[-6000:]
        printed = (logs / "rank0.log").read_text()
        [found] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0].values()
        assert found["rows"] == 5 and found["reward"] == pytest.approx(expected["eval_reward"])
        for name in ("rewards/tokens/mean", "rewards/length/mean", "completions/clipped_ratio"):
            assert found[name] == pytest.approx(expected[f"eval_{name}"])
        if objective == "sft":
            assert found["loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
        else:
            assert "loss" not in found


def test_evaluate_asks_the_rows_that_it_measures(models, tmp_path):
    (tmp_path / "own.py").write_text(STATEFUL)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(9))
    argv = [
        "evaluate",
        "--model_name",
        str(models()),
        "--train_type",
        "lora",
        "--dataset",
        str(rows),
    ]
    argv += flags(dataset_samples=2, eval_rewards=f"{tmp_path / 'own.py'}:short", precision="fp32")
    argv += ["--max_completion_length", "4", "--json"]
    statuses, output = on_ranks(1, main, (argv,), tmp_path / "logs")
    assert statuses == [0], output[-6000:]
    printed = (tmp_path / "logs/rank0.log").read_text()
    [found] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0].values()
    [asked] = (tmp_path / "own.txt").read_text().splitlines()
    assert found["rows"] == len(asked.split(";")) == 2


@pytest.mark.quick
def test_held_out_prompts_are_the_rows_of_the_held_out_loss(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    first = write_rows(tmp_path / "a.jsonl", make_rows(30))
    # A row that cannot be used keeps its number.
    second = write_rows(
        tmp_path / "b.jsonl", [{"instruction": "", "output": "x"}, *make_rows(20, seed=3)]
    )
    config = TrainConfig(
        dataset=(str(first), str(second)),
        eval_fraction=0.3,
        context_length=256,
        max_completion_length=8,
        max_bad_rows=0.5,
    )
    options = pick_data(config)
    data = read_data(tokenizer, options, vocab_size=len(tokenizer))
    sets = held_out_prompts(tokenizer, options, data, vocab_size=len(tokenizer), longest=None)
    rows = [data.evaluation[int(row)] for row in data.eval_sets[""]]
    assert [*sets] == [""] and len(sets[""]) == len(rows) == 15
    for prompt, row in zip(sets[""], rows, strict=True):
        text = tokenizer.decode(prompt.ids) + prompt.columns["output"]
        assert tokenizer.decode(row.input_ids, skip_special_tokens=True) in text
        assert prompt.ids == row.input_ids[: len(prompt.ids)].tolist()


@pytest.mark.quick
def test_pairs_are_asked_their_prompts(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [{"prompt": f"sort {n}", "chosen": "blue", "rejected": "river"} for n in range(4)]
    file = str(write_rows(tmp_path / "pairs.jsonl", rows))
    usual = {"objective": "dpo", "context_length": 32, "dataset_format": "preference"}
    usual["max_completion_length"] = 8
    config = TrainConfig(dataset=(file,), eval_dataset=(f"held={file}",), **usual)
    options = pick_data(config)
    data = read_data(tokenizer, options, vocab_size=len(tokenizer))
    sets = held_out_prompts(tokenizer, options, data, vocab_size=len(tokenizer), longest=64)
    assert [*sets] == ["held"] and [prompt.content for prompt in sets["held"]] == [
        row["prompt"] for row in rows
    ]
    assert sets["held"][0].for_rewards["chosen"] == "blue"


@pytest.mark.quick
def test_scores_are_those_that_trl_logs():
    """GRPOTrainer._generate_and_score_completions of TRL 1.16, with PyTorch's functions."""
    values = {"a": [1.0, None, 0.25, None], "b": [0.0, 2.0, 3.0, None]}
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    per_function = torch.tensor(
        [[np.nan if v is None else v for v in row] for row in values.values()]
    ).T
    rewards = (per_function * weights).nansum(dim=1)
    rewards[torch.isnan(per_function).all(dim=1)] = torch.nan
    expected = {"reward": rewards, "rewards/a": per_function[:, 0], "rewards/b": per_function[:, 1]}
    found = reward_metrics(sums_of_rewards(values, weights.tolist()), values)
    for name, tensor in expected.items():
        mean, std = (name, name + "_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
        assert found[mean] == pytest.approx(torch.nanmean(tensor).item())
        assert found[std] == pytest.approx(tensor[~tensor.isnan()].std().item())
    assert len(found) == 6


@pytest.mark.quick
def test_a_reward_that_rises_while_the_score_falls_is_told_once():
    gap = RewardGap()
    told = []
    # Rewards of the two steps before an evaluation, and its score.
    script = [((), 0.5), ((0.1, 0.3), 0.5), ((0.3, 0.3), 0.4), ((0.5, 0.3), 0.3)]
    script += [((0.6, 0.6), 0.2), ((0.7, 0.7), 0.1), ((0.6, 0.6), 0.05), ((0.7, 0.9), 0.0)]
    for rewards, score in script:
        for reward in rewards:
            gap.stepped({"reward": reward})
        told.append(gap.evaluated(score))
        state = json.loads(json.dumps(gap.state()))
        gap = RewardGap()
        gap.load_state(state)
    assert [text is not None for text in told] == [False] * 4 + [True] + [False] * 3
    assert "rose (to 0.6000) and the held-out score fell (to 0.2000)" in str(told[4])
    gap.stepped({"reward": math.nan})
    gap.stepped({"loss": 1.0})
    assert gap.evaluated(0.0) is None and gap.evaluated(math.nan) is None


@pytest.mark.quick
def test_the_highest_score_is_the_best_and_nan_never():
    progress = Progress(best_by="reward")
    scores = [9.0, math.nan, 0.5, 0.25, math.nan, 0.75]
    best = [progress.add_evaluation(step, 1.0 / (step + 1), s) for step, s in enumerate(scores)]
    assert best == [False, False, True, False, False, True]
    assert (progress.best_eval_score, progress.best_eval_step) == (0.75, 5)
    assert progress.best_eval_loss is None and progress.num_evals_without_best == 0
    again = Progress.from_dict(json.loads(json.dumps(progress.to_dict())))
    assert not again.add_evaluation(6, 0.0, 0.7) and again.num_evals_without_best == 1


@pytest.mark.quick
def test_a_run_resumed_at_its_end_tells_the_same_scores(tmp_path):
    progress = Progress(best_by="reward", step=3, loss=1.0)
    ends = []
    for step, score in enumerate((math.nan, 0.5, 0.25, math.nan)):
        progress.add_evaluation(step, None, score)
        again = Progress.from_dict(json.loads(json.dumps(progress.to_dict())))
        assert again.summary() == progress.summary()
        ends.append(describe_result(again.summary(), tmp_path, 1.0, saved=True))
    told = "held-out score 0.5000 -> 0.2500, highest trained 0.5000 at step 1"
    assert told in ends[2] and "score" not in ends[0] + ends[3]
