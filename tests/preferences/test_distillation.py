"""Distillation against a plain loop of PEFT with losses in float64: from a teacher beside the
student, and offline.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.chaos import harness
from tests.helpers.metrics import metrics_of
from tests.helpers.reference import encode, load_base, peft_model, step_plainly
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, all_slow_but, flags, on_ranks, run_ranks, train_ok
from tests.layers.test_divergence import divergence, grouped
from tests.rollouts.test_runs import kill_at

Encoded = list[tuple[torch.Tensor, torch.Tensor]]
STEPS = 5
LR = 0.5
RANK = 4
NEVER = math.log(1e-30)
OPTIONS: dict[str, Any] = {
    "objective": "distill",
    "train_type": "lora",
    "lora_rank": RANK,
    "lora_alpha": 8,
    "precision": "fp32",
    "optimizer": "sgd",
    "lr": LR,
    "lr_scheduler": "constant",
    "warmup": 0,
    "num_epochs": STEPS,
}
# name -> (ranks, options)
SELF: dict[str, tuple[int, dict[str, Any]]] = {
    "forward": (1, {"beta": 0.0, "batch_size": 8}),
    "jsd": (
        2,
        {"beta": 0.5, "batch_size": 2, "gradient_accumulation_steps": 2, "temperature": 1.5},
    ),
    "reverse": (
        2,
        {"beta": 1.0, "batch_size": 4, "sft_weight": 0.3, "temperature": 0.7, "recompute": "none"},
    ),
}


def taught_rows(count: int) -> list[dict[str, str]]:
    """Rows whose teacher is told the answer; some of them also by a longer text."""
    return [
        {**row, "teacher_prompt": f"{row['instruction']} with {'sort ' * (i % 3)}{row['output']}"}
        for i, row in enumerate(make_rows(count))
    ]


def of_teacher(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "instruction": row["teacher_prompt"]} for row in rows]


def learned_logits(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits[0, :-1][labels[0, 1:] != -100].double()


Plain = tuple[list[float], list[float], dict[str, torch.Tensor]]


def taught(
    logits: torch.Tensor, temperature: float = 1.0, k: int = 0
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What a teacher says of tokens: ids, if only the likeliest are told, and log-probabilities, as
    they are stored.
    """
    logps = (logits / temperature).log_softmax(-1)
    best = logps.topk(k).indices if k else None
    return best, logps if best is None else grouped(logps, best).half().double().log_softmax(-1)


def distill_plainly(
    folder: Path, steps: Iterable[tuple[Encoded, list[Any]]], **options: Any
) -> Plain:
    """Full-batch steps of SGD: losses, gradient norms and the adapter. steps: rows, and what is
    `taught` of each.
    """
    torch.manual_seed(0)
    base = load_base(folder, four_bit=False)
    is_full = options.get("train_type") == "full"
    model = (base if is_full else peft_model(base, r=RANK, lora_alpha=8)).train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for name, parameter in trained.items() if not is_full else ():
        named = name.replace(".default", "")
        parameter.data.copy_(first_adapter_value(named, parameter.shape, seed=42))
    optimizer = torch.optim.SGD(trained.values(), lr=LR)
    losses = []
    norms = []
    for student, teachers in steps:
        total = torch.zeros((), dtype=torch.float64)
        count = sum(len(each) for _, each in teachers)
        for (ids, labels), (best, expected) in zip(student, teachers, strict=True):
            own = learned_logits(model, ids, labels)
            logps = (own / options.get("temperature", 1.0)).log_softmax(-1)
            # A token behind the vocabulary is one that the teacher alone knows.
            logps = logps if best is None else grouped(F.pad(logps, (0, 1), value=NEVER), best)
            total = total + divergence(logps, expected, options["beta"]).sum()
            targets = labels[0, 1:][labels[0, 1:] != -100]
            of_answers = F.cross_entropy(own, targets, reduction="sum")
            total = total + options.get("sft_weight", 0.0) * of_answers
        norms.append(step_plainly(optimizer, total / count))
        losses.append(total.item() / count)
    return losses, norms, model.state_dict() if is_full else get_peft_model_state_dict(model)


def run_options(model: Path, rows: Path, **changed: Any) -> dict[str, Any]:
    return {**OPTIONS, "model_name": model, "dataset": rows, **changed}


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [record for record in metrics_of(output) if "grad_norm" in record]


def refused(folder: Path, **options: Any) -> str:
    """What a run says that does not begin."""
    argv = flags(output_dir=folder, log_to="stdout", **options)
    statuses, said = run_ranks(1, argv, folder.parent / f"{folder.name}_logs")
    assert statuses == [2], said[-4000:]
    return said


def check_same(output: Path, expected: Plain) -> None:
    losses, norms, adapter = expected
    steps = steps_of(output)
    assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-5)
    found = load_file(next(output.glob("*model.safetensors")))
    assert found.keys() == adapter.keys()
    for name, values in found.items():
        assert (values - adapter[name]).norm() <= 1e-5 * adapter[name].norm(), name


@pytest.mark.parametrize("case", all_slow_but("jsd", SELF))
def test_five_steps_from_its_own_base_match_a_plain_loop(case, models, tmp_path):
    model = models("llama")
    rows = taught_rows(8)
    (ranks, options) = SELF[case]
    base = load_base(model, four_bit=False)
    with torch.no_grad():
        logits = [learned_logits(base, *encoded) for encoded in encode(model, of_teacher(rows))]
    teachers = [taught(each, options.get("temperature", 1.0)) for each in logits]
    expected = distill_plainly(model, [(encode(model, rows), teachers)] * STEPS, **options)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    train_ok(ranks, tmp_path / "out", **run_options(model, file, **options))
    check_same(tmp_path / "out", expected)
    last = metrics_of(tmp_path / "out")[-1]
    assert 0 < last["agreement"] < 1 and ("nll_loss" in last) == ("sft_weight" in options)


def test_rows_have_the_same_answer_behind_both_prompts(models, tmp_path):
    """Of formats that ask; a row without a teacher's prompt is left out."""
    text = {"prompt": "sort", "completion": " blue river", "teacher_prompt": "please sort"}
    asked = [{"role": "system", "content": "name"}, {"role": "user", "content": "sort"}]
    chat = {
        "messages": [*asked, {"role": "assistant", "content": "blue"}],
        "teacher_system": "river",
    }
    shown = {"question": ("list", "blue</s>"), "text": ("please sort", " blue river</s>")}
    shown |= {"system": ("river\n", " blue"), "both": ("list", " blue")}
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [text, {**text, "teacher_prompt": ""}],
        "system": [chat],
        "both": [{**chat, "teacher_prompt": "list"}],
        "question": [{"question": "sort", "answer": "blue", "teacher_prompt": "list"}],
    }
    for name, (prompt, answer) in shown.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        template = "plain" if name in ("text", "question") else "user_assistant"
        own = {"prompt_template": template, "max_bad_rows": 0.8, "dry_run": "samples"}
        options = run_options(models("llama"), file, **own, context_length=64)
        argv = flags(output_dir=tmp_path / name, **options)
        statuses, said = run_ranks(1, argv, tmp_path / name)
        assert statuses == [0], said
        assert ("nor teacher_system is filled" in said) == (name == "text"), said
        student, teacher = (part.split("--- learned") for part in said.split(", teacher, ")[-2:])
        assert prompt in teacher[0] and prompt not in student[0] and "name" not in teacher[0]
        for learned in (student[1], teacher[1]):
            assert learned.partition("---\n")[2].startswith(answer)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"teacher_adapter": "there"}, "--teacher_adapter only works with --teacher NAME"),
    ({"beta": 1.5}, "--beta must be between 0"),
    ({"batching": "padded"}, "leave out --batching padded"),
    ({"precompute_reference": True}, "leave out --precompute_reference"),
    ({"train_type": "full"}, "trains an adapter on a frozen model"),
]


def test_what_a_teacher_beside_the_student_cannot_do_is_refused(models, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    unknown = models("llama", logit_unknown=2.0)
    of_chunks = "in chunks of tokens, but its config has"
    cases: list[tuple[dict[str, Any], str]] = [
        *REFUSED,
        ({}, "needs texts with a teacher_prompt or a teacher_system"),
        ({"model_name": models("falcon_h1")}, "a teacher's tokens cannot follow"),
        ({"model_name": unknown}, of_chunks),
        ({"teacher": unknown}, of_chunks),
    ]
    for number, (changed, words) in enumerate(cases):
        if "model_name" in changed:
            file = write_rows(tmp_path / "taught.jsonl", taught_rows(4))
        options = run_options(models("llama"), file, **changed)
        said = refused(tmp_path / str(number), **options)
        assert words in said, said[-2000:]
        assert "in chunks" not in words or "Proof: " not in said


# name -> (ranks, options of the run)
OFFLINE: dict[str, tuple[int, dict[str, Any]]] = {
    "forward": (2, {"beta": 0.0, "batch_size": 2, "gradient_accumulation_steps": 2}),
    "jsd": (1, {"beta": 0.5, "batch_size": 8, "batching": "padded", "temperature": 1.5}),
    "reverse": (2, {"beta": 1.0, "batch_size": 4, "sft_weight": 0.3, "batching": "packed"}),
    "shared": (2, {"beta": 0.5, "batch_size": 8, "context_parallel_size": 2}),
    "full": (2, {"beta": 0.0, "batch_size": 4, "train_type": "full"}),
}
K = 7


@pytest.mark.parametrize(
    "case", all_slow_but("reverse", OFFLINE, nightly=["jsd", "shared", "full"])
)
def test_five_steps_from_a_larger_teacher_match_a_plain_loop(case, models, tmp_path):
    model = models("llama")
    teacher = models("llama", num_hidden_layers=3, vocab_size=330)
    rows = make_rows(8)
    (ranks, options) = OFFLINE[case]
    base = load_base(teacher, four_bit=False)
    with torch.no_grad():
        logits = [learned_logits(base, *encoded)[:, :320] for encoded in encode(model, rows)]
    teachers = [taught(each, options.get("temperature", 1.0), K) for each in logits]
    expected = distill_plainly(model, [(encode(model, rows), teachers)] * STEPS, **options)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    run = run_options(model, file, teacher=teacher, top_k=K, **options)
    run = {name: value for name, value in run.items() if case != "full" or "lora" not in name}
    assert f"{6 * K + 2} bytes each" in train_ok(ranks, tmp_path / "out", **run)
    check_same(tmp_path / "out", expected)
    if case == "reverse":  # again, on another number of ranks
        assert ("probabilities are read") in train_ok(
            1, tmp_path / "again", **{**run, "batch_size": 8}
        )
        check_same(tmp_path / "again", expected)


def test_a_teacher_with_another_tokenizer_is_refused(models, tmp_path):
    teacher = tmp_path / "teacher"
    file = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    shutil.copytree(models("llama"), teacher)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refused(tmp_path / "out", **run_options(models("llama"), file, teacher=teacher))
    assert "has another tokenizer than" in said, said[-2000:]


@pytest.mark.nightly
def test_an_adapted_teacher_in_16_bits_teaches_a_quantized_student(models, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    changes = {"train_type": "qlora", "batch_size": 4, "lr": 1.0, "precision": "bf16"}
    run = run_options(models("llama"), file, **changes)
    adapter = tmp_path / "adapter"
    train_ok(2, adapter, **{**run, "objective": "sft", "lora_rank": 8, "num_epochs": 20})
    taught = {"teacher": models("llama"), "teacher_adapter": adapter, "num_epochs": 30}
    train_ok(2, tmp_path / "out", **{**run, **taught})
    first, *_, last = steps_of(tmp_path / "out")
    assert last["divergence"] < first["divergence"] / 2, (first, last)
    assert last["agreement"] > first["agreement"]


@pytest.mark.nightly
def test_a_student_comes_within_a_tenth_of_its_teacher(models, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    run = run_options(models("llama"), file, batch_size=16)
    run |= {"optimizer": "adamw", "lr": 5e-3, "num_epochs": 60, "lora_rank": 16}
    adapter = tmp_path / "adapter"
    train_ok(1, adapter, **{**run, "objective": "sft"})
    taught = {"teacher": models("llama"), "teacher_adapter": adapter, "num_epochs": 120}
    for beta, name in ((0.0, "forward"), (0.5, "jsd"), (1.0, "reverse")):
        train_ok(1, tmp_path / name, **{**run, **taught, "beta": beta})
        steps = [step["divergence"] for step in steps_of(tmp_path / name)]
        assert steps[-1] < steps[0] / 10, name


@pytest.mark.nightly
def test_a_student_killed_at_any_moment_ends_with_the_same_bytes(models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(16))
    teacher = models("llama", num_hidden_layers=3)
    options = run_options(models("llama"), rows, teacher=teacher, precision="bf16", batch_size=2)
    options |= {"gradient_accumulation_steps": 2, "lora_dropout": 0.1}
    options |= {"context_length": 512, "save_every": 1}
    harness.run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "reference")
    options["output_dir"] = tmp_path / "out"
    for phase, number in (("compute", 10), ("update", 2), ("save", 30), ("exchange", 2)):
        killed = {"fault": kill_at, "arguments": (phase, number)}
        harness.run(options, tmp_path / phase, [-9, -9], **killed)
    said = harness.run(options, tmp_path / "last")
    assert "Resuming at step" in said and "probabilities are read" in said
    for compared in (harness.adapter, harness.numbers):
        assert compared(tmp_path / "out") == compared(tmp_path / "whole")


@pytest.mark.nightly
def test_a_killed_teacher_continues_and_ends_with_the_same_bytes(models, tmp_path):
    """kill -9 between two files; a file that is damaged afterwards is made again, and the others
    are kept.
    """
    file = write_rows(tmp_path / "rows.jsonl", make_rows(1200))
    teacher = models("llama", num_hidden_layers=3)
    run = run_options(models("llama"), file, teacher=teacher, batch_size=8, max_steps=3)
    run |= {"nproc_per_node": 2, "device": "cpu", "context_length": 256, "quant_cache": "off"}

    def start(name: str) -> tuple[subprocess.Popen[bytes], Path]:
        cache = tmp_path / name / "cache"
        own = flags(**run, output_dir=tmp_path / name / "out", log_to="stdout")
        argv = [sys.executable, ROOT / "train.py", *own]
        environment = {**os.environ, "FSDP_QLORA_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(argv, env=environment, start_new_session=True), cache / "taught"

    whole, expected = start("whole")
    assert whole.wait(300) == 0
    killed, folder = start("killed")
    while killed.poll() is None and not list(folder.rglob("*.safetensors")):
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert 0 < len(kept) < 5
    again, _ = start("killed")
    assert again.wait(300) == 0
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    of_killed, of_whole = (
        {path.name: path.read_bytes() for path in each.rglob("*.safetensors")}
        for each in (folder, expected)
    )
    assert len(of_killed) == 5 and of_killed == of_whole
    adapters = [tmp_path / name / "out/adapter_model.safetensors" for name in ("whole", "killed")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_teachers_pass_by_two_ranks_is_read_by_one_without_the_teacher(models, tmp_path):
    """In the folder that `teach` wrote; of rows that it lacks, or another temperature, the run does
    not start.
    """
    teacher = tmp_path / "teacher"
    file = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    shutil.copytree(models("llama", num_hidden_layers=3), teacher)
    run = run_options(models("llama"), file, teacher=teacher, batch_size=4, context_length=512)
    train_ok(2, tmp_path / "whole", **run)
    argv = ["teach", *flags(output_dir=tmp_path / "taught", **run)]
    statuses, said = on_ranks(2, main, (argv,), tmp_path / "logs")
    assert statuses == [0, 0] and "Done. Train with --teacher" in said, said[-4000:]
    shutil.rmtree(teacher)
    run |= {"teacher": tmp_path / "taught", "quant_cache": "off"}
    train_ok(1, tmp_path / "read", **{**run, "batch_size": 8})
    losses = [
        [record["loss"] for record in metrics_of(tmp_path / name)[:STEPS]]
        for name in ("whole", "read")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    others = write_rows(tmp_path / "others.jsonl", make_rows(9))
    cases = {"lacks 1 of the 1 files of these rows": {"dataset": others}}
    cases["temperature 1.0, not 2.0"] = {"temperature": 2.0}
    for words, changed in cases.items():
        said = refused(tmp_path / "refused", **{**run, **changed})
        assert words in said, said[-4000:]
