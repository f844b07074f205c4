"""On-policy distillation against a plain loop of PEFT on the same completions: from the base
itself, and a server.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.metrics import metrics_of
from tests.helpers.models import Models
from tests.helpers.reference import encode, load_base
from tests.helpers.rows import write_rows
from tests.helpers.run import all_slow_but, flags, run_ranks, train_ok
from tests.preferences.test_distillation import (
    NEVER,
    STEPS,
    Encoded,
    check_same,
    distill_plainly,
    learned_logits,
    of_teacher,
    run_options,
    taught,
    taught_rows,
)
from tests.rollouts.lora_server import LoraServer, Sampler

K = 7
LONGEST = 6


class TeacherServer(LoraServer):
    """Gives prompt log-probabilities as vLLM does: of the likeliest tokens, and of the prompt's
    own.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), lambda *_: ([], []), 1)
        self.model = load_base(folder, four_bit=False)

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids = body["prompt"]
        k = body["prompt_logprobs"]
        with self.lock, torch.no_grad():
            logps = self.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        found: list[dict[str, Any] | None] = [None]
        for token, of_token in zip(ids[1:], logps, strict=False):
            named = {*of_token.topk(k).indices.tolist(), token}
            found.append(
                {str(each): {"logprob": float(of_token[each]), "rank": 1} for each in named}
            )
        return 200, {
            "model": self.base,
            "choices": [{"prompt_logprobs": found, "finish_reason": "length"}],
        }


@pytest.fixture
def served(models: Models) -> Iterator[Callable[..., TeacherServer]]:
    with contextlib.ExitStack() as servers:
        yield lambda **changed: servers.enter_context(TeacherServer(models("llama", **changed)))


def on_policy(model: Path, rows: Path, **changed: Any) -> dict[str, Any]:
    options = {
        "objective": "distill_on_policy",
        "max_completion_length": LONGEST,
        "num_epochs": 1,
        "max_steps": STEPS,
    }
    return run_options(model, rows, **{**options, "context_length": 512, **changed})


def sampled(output: Path, prompt: str) -> list[Encoded]:
    """The completions of each step behind their prompts, as (input_ids, labels)."""
    steps: dict[int, Encoded] = {}
    for line in map(json.loads, (output / "rollouts.jsonl").read_text().splitlines()):
        asked = line.get(prompt, line["prompt_ids"])
        ids = torch.tensor([asked + line["token_ids"]])
        labels = torch.cat([torch.full((1, len(asked)), -100), ids[:, len(asked) :]], dim=1)
        steps.setdefault(line["step"], []).append((ids, labels))
    return [*steps.values()]


SELF: dict[str, tuple[int, dict[str, Any]]] = {
    "reverse": (
        2,
        {"beta": 1.0, "batch_size": 2, "gradient_accumulation_steps": 2, "temperature": 1.3},
    ),
    "jsd": (1, {"beta": 0.5, "batch_size": 8}),
    "forward": (2, {"beta": 0.0, "batch_size": 4}),
}


@pytest.mark.parametrize("case", all_slow_but("reverse", SELF, nightly=["jsd", "forward"]))
def test_five_steps_on_own_answers_match_a_plain_loop(case, models, tmp_path):
    model = models("llama")
    (ranks, options) = SELF[case]
    rows = taught_rows(40)
    train_ok(
        ranks,
        tmp_path / "out",
        **on_policy(model, write_rows(tmp_path / "rows.jsonl", rows), **options),
    )
    first = json.loads((tmp_path / "out/rollouts.jsonl").read_text().partition("\n")[0])
    [(asked, labels)] = encode(model, of_teacher([rows[first["row"] - 1]]))
    assert first["teacher_prompt_ids"] == asked[labels == -100].tolist()
    base = load_base(model, four_bit=False)
    seen = sampled(tmp_path / "out", "teacher_prompt_ids")
    with torch.no_grad():
        teachers = [
            [taught(learned_logits(base, *each), options.get("temperature", 1.0)) for each in e]
            for e in seen
        ]
    students = sampled(tmp_path / "out", "prompt_ids")
    check_same(
        tmp_path / "out", distill_plainly(model, zip(students, teachers, strict=True), **options)
    )
    last = metrics_of(tmp_path / "out")[-1]
    assert last["completions/mean_length"] <= LONGEST and not [
        name for name in last if "reward" in name
    ]


def told(logits: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a server tells of tokens: those of its k likeliest that the student knows, and the mass
    of all others.
    """
    logps = logits.log_softmax(-1)
    best = logits.topk(K).indices
    known = best < vocabulary
    of_known = logps.gather(-1, best).where(known, NEVER)
    return best.where(known, vocabulary), torch.cat(
        [of_known, (1 - of_known.exp().sum(-1, keepdim=True)).log()], -1
    )


SERVED: dict[str, tuple[int, dict[str, Any]]] = {
    "reverse": (
        2,
        {
            "beta": 1.0,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "context_parallel_size": 2,
        },
    ),
    "jsd": (1, {"beta": 0.5, "batch_size": 4, "batching": "padded"}),
    "forward": (2, {"beta": 0.0, "batch_size": 2}),
}


@pytest.mark.parametrize("case", all_slow_but("jsd", SERVED, nightly=["forward"]))
def test_five_steps_from_a_server_match_a_plain_loop(case, served, models, tmp_path):
    model = models("llama")
    (ranks, options) = SERVED[case]
    server = served(num_hidden_layers=3, vocab_size=330)
    rows = taught_rows(20)
    rows = [row if i % 2 else {**row, "teacher_prompt": ""} for i, row in enumerate(rows)]
    run = on_policy(
        model, write_rows(tmp_path / "rows.jsonl", rows), teacher=server.base, top_k=K, **options
    )
    train_ok(ranks, tmp_path / "out", teacher_url=server.url, **run)
    with torch.no_grad():
        seen = sampled(tmp_path / "out", "teacher_prompt_ids")
        teachers = [
            [told(learned_logits(server.model, *each), 320) for each in of_step] for of_step in seen
        ]
    students = sampled(tmp_path / "out", "prompt_ids")
    check_same(
        tmp_path / "out", distill_plainly(model, zip(students, teachers, strict=True), **options)
    )


@pytest.mark.nightly
def test_a_server_answers_what_another_one_scores(served, models, tmp_path):
    """Two ranks; the server that answers gets each step's adapter, which is found to be used."""
    model = models("llama")
    teacher = served(num_hidden_layers=3)
    rows = taught_rows(20)
    sampler = Sampler(str(model))
    run = on_policy(
        model, write_rows(tmp_path / "rows.jsonl", rows), beta=1.0, batch_size=2, top_k=K
    )
    with LoraServer(str(model), sampler, sampler.end) as server:
        run |= {"rollout_url": server.url, "teacher": teacher.base, "teacher_url": teacher.url}
        said = train_ok(2, tmp_path / "out", **run)
    assert said.count("The server uses the adapter") <= 2 and "ignores" not in said
    with torch.no_grad():
        seen = sampled(tmp_path / "out", "teacher_prompt_ids")
        teachers = [
            [told(learned_logits(teacher.model, *each), 320) for each in of_step]
            for of_step in seen
        ]
    students = sampled(tmp_path / "out", "prompt_ids")
    check_same(
        tmp_path / "out", distill_plainly(model, zip(students, teachers, strict=True), beta=1.0)
    )


def test_what_a_teacher_of_own_answers_cannot_do_is_refused(served, models, tmp_path):
    server = served(num_hidden_layers=3)
    rows = write_rows(tmp_path / "rows.jsonl", taught_rows(4))
    there = {"teacher": server.base, "teacher_url": server.url}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"teacher": server.base}, "needs --teacher on a server"),
        ({"teacher_url": server.url}, "--teacher_url only works with --teacher NAME"),
        ({**there, "temperature": 0.7}, "leave out --temperature"),
        ({**there, "teacher": models("llama")}, "has the model"),
        ({"eval_fraction": 0.5}, "generates its rows during training"),
        ({"batching": "padded"}, "joins two texts: leave out"),
    ]
    for number, (changed, words) in enumerate(refused):
        argv = flags(
            output_dir=tmp_path / str(number),
            log_to="stdout",
            **on_policy(models("llama"), rows, **changed),
        )
        statuses, said = run_ranks(1, argv, tmp_path / f"{number}_logs")
        assert statuses == [2] and words in said, said[-2000:]
