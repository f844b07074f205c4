"""Preference objectives: their losses against formulas in float64 and against TRL's trainers."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_qlora.config.objectives import OBJECTIVES, LogProbs, LossInputs, LossSettings
from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.training.objective import Totals, make_objective
from tests.helpers.metrics import metrics_of
from tests.helpers.models import SIZES
from tests.helpers.rounding import rounding
from tests.helpers.run import train_ok
from tests.preferences.pairs import (
    CASES,
    LR,
    STEPS,
    make_labeled,
    make_pairs,
    options_of_a_run,
    sketch,
)

TRL = json.loads(Path(__file__).with_name("trl.json").read_text())
OFF = rounding(SIZES["vocab_size"])  # a log-probability's longest sum


def answers(*sides: tuple[float, float, float]) -> list[LogProbs]:
    return [LogProbs(*torch.tensor([side]).T) for side in sides]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


# log-probabilities and tokens
CHOSEN = (-12.0, -14.0, 4.0)
REJECTED = (-15.0, -13.0, 10.0)
MARGIN = 2.0 - -2.0
MEAN_MARGIN = 2.0 / 4 - -2.0 / 10
MEAN = (-12.0 / 4, -15.0 / 10)
ODDS = [math.log(math.exp(mean) / (1 - math.exp(mean))) for mean in MEAN]
# (objective, options, the loss of a pair with a reference of its own)
FORMULAS: list[tuple[str, dict[str, Any], float]] = [
    ("dpo", {}, -log_sigmoid(0.1 * MARGIN)),
    (
        "dpo",
        {"label_smoothing": 0.2},
        -0.8 * log_sigmoid(0.1 * MARGIN) - 0.2 * log_sigmoid(-0.1 * MARGIN),
    ),
    ("dpo", {"loss_type": "hinge", "beta": 0.2}, 1 - 0.2 * MARGIN),
    ("dpo", {"loss_type": "hinge", "beta": 1.0}, 0.0),
    (
        "dpo",
        {"loss_type": "robust", "label_smoothing": 0.2},
        (-0.8 * log_sigmoid(0.1 * MARGIN) + 0.2 * log_sigmoid(-0.1 * MARGIN)) / 0.6,
    ),
    ("dpo", {"loss_type": "sigmoid_norm"}, -log_sigmoid(0.1 * MEAN_MARGIN)),
    ("ipo", {"beta": 0.5}, (MEAN_MARGIN - 1) ** 2),
    ("cpo", {}, -log_sigmoid(0.1 * 3)),
    ("simpo", {"beta": 2.0, "simpo_gamma": 1.5}, -log_sigmoid(2 * (MEAN[0] - MEAN[1]) - 1.5)),
    ("orpo", {}, -0.1 * log_sigmoid(ODDS[0] - ODDS[1])),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "options", "expected"), FORMULAS)
def test_pair_losses_match_their_formulas(name, options, expected):
    row = OBJECTIVES[name]
    settings = LossSettings(**options)
    without = [(policy, 0.0, tokens) for policy, _, tokens in (CHOSEN, REJECTED)]
    chosen, rejected = answers(*((CHOSEN, REJECTED) if row.has_reference else without))
    assert row.loss is not None
    inputs = LossInputs(torch.zeros(1, 0), [], chosen, rejected, torch.zeros(0))
    assert row.loss(inputs, settings).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("desired", [0.0, 1.0])
def test_kto_loss_matches_its_formula(desired):
    objective = make_objective("kto", LossSettings(kto_weights=(2.0, 1.0)))
    totals = Totals(1, (int(desired), 1 - int(desired)), divergence=0.5)
    expected = (
        2 / (1 + math.exp(0.1 * (2.0 - 0.5))) if desired else 1 / (1 + math.exp(0.1 * (0.5 - 2.0)))
    )
    none = torch.zeros(1, 0, dtype=torch.int64)
    numbers = (torch.tensor([value]) for value in (4.0, desired, -14.0))
    batch = MicroBatch(none, none[0], none[0], [4], *numbers)
    sums = objective.measure(torch.full((1, 4), 3.0), batch, totals).tolist()
    assert sums[0] == pytest.approx(expected, rel=1e-6)
    metrics = objective.means(sums, totals)
    assert metrics["rewards/chosen" if desired else "rewards/rejected"] == pytest.approx(0.2)
    assert math.isnan(metrics["rewards/margins"]) and metrics["kl"] == 0.5


# Pairs with a reference, without one, and answers with labels are split over ranks in continuous
# integration.
SPLIT = {("dpo", 2), ("cpo", 2), ("kto", 4)}
SPLITS = [(case, 1) for case in CASES] + [
    pytest.param(*each, marks=pytest.mark.slow if each in SPLIT else pytest.mark.nightly)
    for each in itertools.product(CASES, (2, 4))
]


@pytest.mark.parametrize(("case", "ranks"), SPLITS)
def test_ten_preference_steps_match_trl(case, ranks, models, tmp_path):
    model_type, options = CASES[case]
    run = options_of_a_run(
        models(model_type), tmp_path, make_labeled() if case == "kto" else make_pairs()
    )
    # two micro-batches on one rank, one of them on each of two, a half on each of four
    size = 2 if ranks == 4 else 4
    split = {"batch_size": size, "gradient_accumulation_steps": 8 // size // ranks}
    train_ok(ranks, tmp_path / "out", **run, **options, **split, optimizer="sgd", lr=LR)
    found = metrics_of(tmp_path / "out")
    steps = TRL[case]["steps"]
    assert len(found) == len(steps) == STEPS
    for ours, trl in zip(found, steps, strict=True):
        # TRL's likelihood is that of the prompts too, so only the start is the same
        if case == "orpo":
            ours, trl = ({**each, "loss": each["loss"] - each["nll_loss"]} for each in (ours, trl))
            del trl["nll_loss"], trl["grad_norm"]
        assert {key: ours[key] for key in trl} == pytest.approx(trl, rel=OFF, abs=OFF)
        if case == "orpo":
            return
    assert sketch(tmp_path / "out") == pytest.approx(TRL[case]["adapter"], rel=OFF, abs=OFF)
