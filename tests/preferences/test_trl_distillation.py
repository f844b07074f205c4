"""Distillation beside TRL's own trainers, which learn on the same rows in the same order: see
taught.py.
"""

import json
from pathlib import Path

import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, train_ok
from tests.preferences.pairs import sketch
from tests.preferences.taught import CASES, FULL_LR, LORA, LR, ROWS, STEPS, TEACHER

TRL = json.loads(Path(__file__).with_name("trl_distillation.json").read_text())
# In full, the rounding of a float32 weight of 0.1 is 1e-5 of what five steps change.
OFF = 1e-5
OFF_FULL = 3e-5
OFF_UNROUNDED = 3e-4
OFTEN = "0.5, warm"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", all_slow_but("", CASES, nightly=CASES.keys() - {OFTEN}))
def test_five_steps_of_distillation_match_trls_trainers(case, ranks, models, tmp_path):
    """To rounding where TRL's teacher is rounded as it is stored, and nearly so where it is not."""
    name, options = CASES[case]
    is_full = options.get("train_type") == "full"
    own = (
        {}
        if is_full
        else {"train_type": "lora", "lora_rank": LORA["r"], "lora_alpha": LORA["lora_alpha"]}
    )
    own |= {"top_k": 320, **options} | ({"temperature": 1.0} if name == "gkd" else {})
    run = {
        "objective": "distill",
        "teacher": models("llama", **TEACHER),
        "precision": "fp32",
        "optimizer": "sgd",
    }
    run |= {
        "lr": FULL_LR if is_full else LR,
        "lr_scheduler": "constant",
        "warmup": 0,
        "batch_size": 2 // ranks,
    }
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(ROWS))
    output = tmp_path / "out"
    train_ok(
        ranks,
        output,
        model_name=models("llama"),
        dataset=rows,
        gradient_accumulation_steps=2,
        **run,
        **own,
    )
    losses = read_metrics(output)[:STEPS]
    norms = read_metrics(output, "grad_norm")
    expected = TRL[case]
    off = {
        "losses": [a / b["loss"] - 1 for a, b in zip(losses, expected["steps"], strict=True)],
        "norms": [a / b["grad_norm"] - 1 for a, b in zip(norms, expected["steps"], strict=True)],
        "weights": [a - b for a, b in zip(sketch(output), expected["sketch"], strict=True)],
        "unrounded": [
            a / b - 1 for a, b in zip(losses, expected.get("exact", losses), strict=True)
        ],
    }
    most = {name: max(map(abs, values)) for name, values in off.items()}
    print(f"| {case} | {ranks} |", *(f"{value:.1e} |" for value in most.values()))
    assert most["unrounded"] <= OFF_UNROUNDED, most
    assert max(most["losses"], most["norms"], most["weights"]) <= (OFF_FULL if is_full else OFF), (
        most
    )
