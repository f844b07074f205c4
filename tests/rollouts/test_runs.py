"""Runs that learn from their own answers: on several ranks, killed, continued, failing, and whether
they learn.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from fsdp_qlora.__main__ import main
from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.utils.errors import ENDINGS
from tests.chaos.harness import adapter, numbers, run
from tests.helpers.metrics import read_metrics
from tests.helpers.models import make_model
from tests.helpers.rows import write_rows
from tests.helpers.run import ROOT, flags, train_ok
from tests.helpers.tokenizers import WORDS
from tests.rollouts.runs import OPTIONS, inputs, rollouts_of


def mismatch(output_dir: Path) -> list[float]:
    """The mean ratio of the trainer's to the sampled probabilities, and the largest mean difference
    of a step.
    """
    ratios = read_metrics(output_dir, "sampling/importance_sampling_ratio/mean")
    differences = read_metrics(output_dir, "sampling/sampling_logp_difference/mean")
    return [sum(ratios) / len(ratios), max(differences)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_old_probabilities_of_the_step_itself_are_compared_too(precision, models, tmp_path):
    changes = {"train_type": "qlora", "precision": precision, "temperature": 0.7}
    options = inputs(models, tmp_path, **changes, gradient_accumulation_steps=4, max_steps=2)
    train_ok(2, tmp_path / "out", **options)
    ratio, difference = mismatch(tmp_path / "out")
    if precision == "fp32":
        assert (ratio, difference) == pytest.approx((1, 0), abs=1e-5)
    else:
        assert 0.97 < ratio < 1.03 and 0 < difference < 0.05
    for line in rollouts_of(tmp_path / "out"):
        assert "old_logps" not in line and "sampled_logps" in line


@pytest.mark.parametrize(
    "shared", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["own rows", "shared rows"]
)
def test_answers_are_the_same_on_one_and_two_ranks(shared, models, tmp_path):
    options = inputs(models, tmp_path, num_iterations=2, max_steps=4)
    for ranks, size in ((1, 1), (2, shared)):
        split = {"gradient_accumulation_steps": 8 * size // ranks, "context_parallel_size": size}
        said = train_ok(ranks, tmp_path / str(ranks), **options, **split)
    assert "4 answers to each of 2 prompts for a step, of 4 on a rank 4 at a time" in said
    assert "weights stay gathered" in said
    one, two = (rollouts_of(tmp_path / ranks) for ranks in "12")
    assert len(one) == 16 and {line["version"] for line in one} == {0, 2}
    for first, second in zip(one, two, strict=True):
        for name in ("old_logps", "sampled_logps"):
            logps = [torch.tensor(line.pop(name)) for line in (first, second)]
            torch.testing.assert_close(*logps, atol=1e-5, rtol=1e-5)
        assert first == second
    for name in ("loss", "reward", "entropy", "grad_norm"):
        of_both = [torch.tensor(read_metrics(tmp_path / ranks, name)) for ranks in "12"]
        torch.testing.assert_close(*of_both, atol=1e-5, rtol=1e-4)
    # In float32 the trainer has the probabilities that the answers were drawn with.
    assert [mismatch(tmp_path / ranks) for ranks in "12"] == [pytest.approx([1, 0], abs=1e-5)] * 2
    # The second step on the same answers is of another policy.
    rewards = read_metrics(tmp_path / "1", "reward")
    assert rewards[::2] == rewards[1::2]


FAILING = """
def short(completions, answer, prompts, **_):
    if "sort 6" in prompts:
        answer = ["none" if asked == "sort 6" else a for a, asked in zip(answer, prompts)]
    return [a - len(said) / 10 for said, a in zip(completions, answer)]
"""


def steps_of_eight(last: int) -> list[int]:
    """The steps of a file with eight answers for each second one."""
    return [step for step in range(1, last + 1, 2) for _ in range(8)]


def test_a_failing_function_ends_every_rank_with_a_checkpoint(models, tmp_path):
    out = tmp_path / "out"
    mirror = tmp_path / "mirror"
    options = inputs(models, tmp_path, function=FAILING, output_dir=out, mirror=mirror)
    options |= {"save_every": "none", "log_to": "stdout"}
    options |= {"gradient_accumulation_steps": 4, "num_iterations": 2}
    said = run(options, tmp_path / "first", [1, 1])
    assert said.count("The reward function short failed at row 7 of the dataset: TypeError") == 2
    kept = [line["step"] for line in rollouts_of(mirror)]
    assert kept == steps_of_eight(kept[-1]) and 1 <= kept[-1] < 7
    assert list(checkpoint.published(out / "checkpoints")) == [kept[-1] + 1]
    # On another machine, with the mirror alone.
    shutil.rmtree(out)
    (tmp_path / "own.py").write_text(FAILING + "# changed\n")
    said = run({**options, "on_reward_error": "zero"}, tmp_path / "second")
    changed = r"reward functions were (.*) \(sha256 (\w+)\), and are now \1 \(sha256 (?!\2)"
    assert re.search(changed, said)[1] == "own.py:short=1"
    assert f"Resuming at step {kept[-1] + 1}" in said and "8 answers count as 0" in said
    assert [line["step"] for line in rollouts_of(out)] == steps_of_eight(7)
    zeros = [line["rewards"]["short"] == 0 for line in rollouts_of(out) if line["row"] == 7]
    assert zeros == [True] * 4


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_model(folder: Path, *, template: str = CHATML, ends: list[int] | None = None) -> Path:
    """A model whose turns end with a token that is not the tokenizer's end token; `ends` are those
    that it names.
    """
    model = make_model(folder, vocab_size=330, pad_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").unlink()
    if ends:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return model


@pytest.mark.parametrize("place", ["generation_config.json", "template"])
def test_sampled_answers_end_at_the_end_tokens_of_the_model(place, tmp_path):
    if place == "template":
        ending = CHATML.replace("<|im_end|>\n", "<|im_end|>\n</s>")
        model = make_chat_model(tmp_path / "model", template=ending)
        end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    else:
        end = 97
        model = make_chat_model(tmp_path / "model", ends=[end, 1])
    prompts = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS[:8]]
    rows = write_rows(tmp_path / "rows.jsonl", prompts)
    options = {**OPTIONS, "rewards": "length:4", "model_name": model, "dataset": rows}
    options |= {"context_length": 128, "max_completion_length": 64}
    train_ok(1, tmp_path / "out", **options, gradient_accumulation_steps=32, max_steps=1)
    answers = [line["token_ids"] for line in rollouts_of(tmp_path / "out")]
    ended = [ids for ids in answers if end in ids]
    assert len(ended) > 1 and all(ids.index(end) == len(ids) - 1 for ids in ended)
    assert not any("<|im_end|>" in line["completion"] for line in rollouts_of(tmp_path / "out"))


@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_the_end_of_a_templates_turn_is_saved_with_adapter_and_merge(objective, tmp_path, lines):
    model = make_chat_model(tmp_path / "model")
    out = tmp_path / "out"
    merged = tmp_path / "merged"
    turns = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": "blue"}]
        for word in WORDS[:8]
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": messages} for messages in turns])
    options = {"train_type": "lora", "precision": "fp32"}
    if objective == "grpo":
        options = {**OPTIONS, "rewards": "exact_match"}
    options |= {"gradient_accumulation_steps": 4, "max_steps": 1}
    said = train_ok(1, out, **options, model_name=model, dataset=rows)
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    assert "Answers end with <|im_end|>, not with the tokenizer's </s>" in said
    assert main(["merge", *flags(adapter=out, out=merged)]) == 0
    for folder in (out, merged):
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [1, end]
        assert "ends with `<|im_end|>`" in (folder / "README.md").read_text()
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [1, end]


def kill_at(phase: str, number: int, *, with_signal: int = signal.SIGKILL) -> None:
    """Kill this rank at a sign of life in a phase: each token, micro-batch, update and saved tensor
    gives one.
    """
    from fsdp_qlora.distributed.supervision.clock import Heartbeat

    left = iter(range(number, 0, -1))
    beat = Heartbeat.beat

    def counted(self: Heartbeat, step: int, now: str) -> None:
        if now == phase and next(left, 0) == 1:
            signal.raise_signal(with_signal)
        beat(self, step, now)

    Heartbeat.beat = counted  # type: ignore[method-assign]


STOPPING = """
import os, signal, time

def short(completions, **_):
    os.kill(os.getppid(), signal.SIGTERM)  # of rank 0
    time.sleep(600)
"""


def test_a_run_stops_while_answers_are_generated_or_scored(models, tmp_path):
    out = tmp_path / "out"
    options = inputs(models, tmp_path, gradient_accumulation_steps=4, output_dir=out)
    preempted = [ENDINGS["preempted"].exit_code] * 2
    stopped = partial(kill_at, "rows", 4, with_signal=signal.SIGTERM)
    said = run(options, tmp_path / "generating", preempted, fault=stopped)
    assert "Stopped while step 1 waited for answers (SIGTERM)" in said
    (tmp_path / "own.py").write_text(STOPPING)
    said = run(options, tmp_path / "scoring", preempted)
    assert "Stopped while step 1 waited for answers (SIGTERM)" in said
    assert not (out / "rollouts.jsonl").exists()


# "rows" is while answers are generated, too.
MOMENTS = {"rows": (10, 30), "compute": (6, 20), "save": (90, 200), "update": (1, 3)}
MOMENTS |= {"exchange": (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", ["grpo", pytest.param("distill_on_policy", marks=pytest.mark.nightly)]
)
def test_killed_at_any_moment_a_run_gives_the_same_bytes(objective, models, tmp_path):
    options = inputs(models, tmp_path, prompts=6, gradient_accumulation_steps=4, num_epochs=2)
    if objective == "grpo":
        options["num_iterations"] = 2
    else:
        rows = [{"prompt": f"sort {i}", "teacher_prompt": f"sort {i} now"} for i in range(48)]
        dataset = write_rows(tmp_path / "taught.jsonl", rows)
        options |= {"objective": objective, "dataset": dataset, "precision": "bf16"}
        del options["rewards"], options["num_generations"]
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    run({**options, "output_dir": whole}, tmp_path / "reference")
    choose = random.Random(5)
    said = ""
    for phase, numbers_of in MOMENTS.items():
        killed = {"fault": kill_at, "arguments": (phase, choose.randint(*numbers_of))}
        said += run({**options, "output_dir": out}, tmp_path / phase, [-9, -9], **killed)
    said += run({**options, "output_dir": out}, tmp_path / "last")
    # In the middle of a generation.
    assert objective != "grpo" or re.search(r"Resuming at step \d*[13579]\b", said)
    assert (out / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    assert adapter(out) == adapter(whole) and numbers(out) == numbers(whole)


def make_letters(folder: Path) -> dict[str, Any]:
    """A tiny model of eight letters, four digits and a stop, and prompts that ask for 1 to 4
    letters.
    """
    tokens = ["<s>", "</s>", *"abcdefgh1234."]
    sizes = {"vocab_size": len(tokens), "max_position_embeddings": 64, "pad_token_id": None}
    model = make_model(folder / "model", **sizes)
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    named = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(model)
    write_rows(folder / "rows.jsonl", [{"prompt": f"{n}.", "letters": n} for n in range(1, 5)])  # type: ignore[dict-item]
    (folder / "own.py").write_text(
        "def as_many(completions, letters, **_):\n"
        "    said = [''.join(said.split()) for said in completions]\n"
        "    return [float(len(s) == n and s.isalpha()) for s, n in zip(said, letters)]\n"
    )
    return {
        "model_name": model,
        "dataset": folder / "rows.jsonl",
        "rewards": f"{folder / 'own.py'}:as_many",
    }


@pytest.mark.nightly
def test_grpo_teaches_a_tiny_model_an_answer_length(tmp_path):
    options = {"objective": "grpo", "train_type": "lora", "precision": "fp32", "lr": 3e-3}
    options |= {"num_generations": 32, "max_completion_length": 6, "batch_size": 64}
    options |= {"scale_rewards": "none", "num_epochs": 64, "quant_cache": "off"}
    options |= {**make_letters(tmp_path), "output_dir": tmp_path / "out", "log_to": "jsonl"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += [str(ROOT / "train.py"), *flags(**options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    rewards = read_metrics(tmp_path / "out", "reward")
    assert rewards[0] < 0.1 and sum(rewards[-8:]) / 8 > 0.9, rewards
    page = (tmp_path / "out" / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    [of_run] = data["runs"]
    shown = of_run["steps"]["reward"]
    assert shown[-1] == pytest.approx(rewards[-1]) and len(shown) == 64
    samples = of_run["samples"]
    assert [sample["step"] for sample in samples] == sorted({1, samples[1]["step"], 64})
    assert len(samples) == 3
    assert all("reward" in sample["text"] for sample in samples)


@pytest.mark.nightly
def test_the_demo_model_answers_questions_to_the_end(tmp_path):
    program = str(ROOT / "scripts" / "demo_model.py")
    command = [sys.executable, program, *flags(output_dir=tmp_path / "model")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    rows = [
        {
            "question": f"Anna has {n} apples and buys {n + 3} more. How many apples has she now?",
            "answer": f"{n} + {n + 3} = {2 * n + 3}\n#### {2 * n + 3}",
        }
        for n in range(2, 34)
    ]
    # The first answers are wrong and cut, but differ in their letters.
    (tmp_path / "own.py").write_text(
        "def brief(completions, **_): return [-len(said['content']) for [said] in completions]"
    )
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    options = {**OPTIONS, "model_name": tmp_path / "model", "dataset": dataset}
    options |= {"rewards": f"number,{tmp_path / 'own.py'}:brief=0.1", "max_completion_length": 16}
    options |= {"context_length": 256, "gradient_accumulation_steps": 4, "max_steps": 3, "lr": 1e-5}
    options |= {"train_type": "qlora", "save_every": "none"}
    train_ok(2, tmp_path / "out", **options)
    assert len(read_metrics(tmp_path / "out", "rewards/number/mean")) == 3
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = base(torch.arange(5, 25)[None]).logits
    tuned = PeftModel.from_pretrained(base, tmp_path / "out")
    assert not torch.equal(tuned(torch.arange(5, 25)[None]).logits, before)
