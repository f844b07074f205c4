"""What is learned of sampled answers: steps against TRL's GRPOTrainer, gradients against formulas
in float64.
"""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsdp_qlora.config.objectives import LossSettings
from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.clock import Heartbeat
from fsdp_qlora.training.forward import token_logprobs
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.objective import Totals, make_objective
from fsdp_qlora.training.rl.advantages import advantages, metrics_of
from fsdp_qlora.training.rl.rollout_file import Rollout, RolloutPrompt
from tests.helpers.models import Models
from tests.helpers.run import on_ranks
from tests.preferences.answers import (
    ANSWERS,
    CASES,
    END,
    LONGEST,
    LR,
    STEPS,
    answers,
    learn,
    make_adapter,
    run_on,
    table_of,
)
from tests.preferences.pairs import sketch

TRL = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
OFF = 1e-5
ONE = Ranks(0, 0, 1, 1, torch.device("cpu"))
OF_ANSWERS = ("reward", "frac_", "completions/")


@pytest.fixture(scope="module")
def starts(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """Family -> a model and the adapter to start from."""
    folder = tmp_path_factory.mktemp("starts")
    families = {family for family, _ in CASES.values()}
    return {
        family: (models(family), make_adapter(models(family), folder / family))
        for family in families
    }


def gains(scale_rewards: str) -> list[list[float]]:
    """The advantages of the answers of each generation."""
    rewards = [
        np.array([each.reward for each in answers(number)]).reshape(-1, ANSWERS)
        for number in range(STEPS)
    ]
    return [advantages(each, scale_rewards).ravel().tolist() for each in rewards]


def numbers(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output / "metrics.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_five_grpo_steps_match_trl(ranks, starts, tmp_path):
    runs = []
    for number, (case, (family, options)) in enumerate(CASES.items()):
        # Two micro-batches on one rank, one or two on each of two.
        split = {
            "batch_size": 6 // (1 + number % 2),
            "gradient_accumulation_steps": 2 * (1 + number % 2) // ranks,
        }
        batching = {"batching": ("padding_free", "padded", "packed")[number % 3]}
        runs.append(run_on(*starts[family], tmp_path / case, **split, **batching, **options))
    ours_of_cases = [gains(options.get("scale_rewards", "group")) for _, options in CASES.values()]
    statuses, said = on_ranks(ranks, learn, (runs, ours_of_cases), tmp_path / "logs")
    assert statuses == [0] * ranks, said[-5000:]
    for case in CASES:
        found = numbers(tmp_path / case)
        assert len(found) == len(TRL[case]["steps"]) == STEPS
        for ours, theirs in zip(found, TRL[case]["steps"], strict=True):
            expected = {
                key: value for key, value in theirs.items() if not key.startswith(OF_ANSWERS)
            }
            assert {key: ours[key] for key in expected} == pytest.approx(
                expected, rel=OFF, abs=OFF
            ), case
        assert sketch(tmp_path / case) == pytest.approx(TRL[case]["adapter"], rel=OFF, abs=OFF), (
            case
        )


@pytest.mark.parametrize("case", CASES)
def test_advantages_and_metrics_of_answers_are_those_of_trl(case):
    scale = CASES[case][1].get("scale_rewards", "group")
    theirs = TRL[case]["advantages"]
    for ours, expected in zip(gains(scale), theirs, strict=False):
        assert ours == pytest.approx(expected, abs=OFF)
    steps = [step for step in TRL[case]["steps"] if "reward" in step]
    assert len(steps) == len(theirs) > 2
    for generation, step in enumerate(steps):
        rollouts = [
            Rollout(
                step=1,
                version=0,
                row=1,
                prompt=RolloutPrompt("", []),
                text="",
                advantage=0.0,
                completion=Completion(each.completion, is_done=each.completion[-1] == END),
                reward=each.reward,
                rewards={"fixed": each.reward},
            )
            for each in answers(generation)
        ]
        expected = {key: value for key, value in step.items() if key.startswith(OF_ANSWERS)}
        assert metrics_of(rollouts, ANSWERS) == pytest.approx(expected, rel=OFF)


# --- all at once, in plain torch ---

ALL = {
    "loss_type": "dr_grpo",
    "beta": 0.2,
    "temperature": 0.7,
    "num_iterations": 2,
    "epsilon": "0.05,0.1",
}
ALL |= {"rollout_url": "http://localhost:1"}
ADVANTAGES = [[(-1) ** i * (0.3 + 0.1 * i) for i in range(12)] for _ in range(STEPS)]


def in_float64(base: Path, start: Path) -> list[dict[str, float]]:
    """The steps of ALL, one answer after the other, with nothing of ours."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), start, is_trainable=True
    ).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    begin = [parameter.detach().clone() for parameter in trained]

    def distributions(answer: Any) -> torch.Tensor:
        ids = torch.tensor([answer.prompt + answer.completion])
        logits = model(input_ids=ids).logits[0, len(answer.prompt) - 1 : -1] / ALL["temperature"]
        return logits.log_softmax(dim=-1)

    def logps(answer: Any) -> torch.Tensor:
        return distributions(answer)[torch.arange(len(answer.completion)), answer.completion]

    @torch.no_grad()
    def under(values: list[torch.Tensor], found: list[Any]) -> list[torch.Tensor]:
        now = [parameter.clone() for parameter in trained]
        for parameter, value in zip(trained, values, strict=True):
            parameter.copy_(value)
        logps_of_all = [logps(each) for each in found]
        for parameter, value in zip(trained, now, strict=True):
            parameter.copy_(value)
        return logps_of_all

    steps = []
    for step in range(STEPS):
        found = answers(step // 2)
        if step % 2 == 0:
            old = under(trained, found)
        reference = under(begin, found)
        loss = 0.0
        kls = []
        ratios = []
        weights = []
        entropies = []
        pairs = [
            pair
            for own, each in zip(old, found, strict=True)
            for pair in zip(own.tolist(), each.logps, strict=True)
        ]
        for answer, advantage, before, known in zip(
            found, ADVANTAGES[0], old, reference, strict=True
        ):
            spread = distributions(answer)
            entropies += (-(spread.exp() * spread).sum(dim=-1)).tolist()
            for i, token in enumerate(answer.completion):
                ratio = (spread[i, token] - before[i]).exp()
                better = ratio * advantage
                clipped = ratio.clamp(0.95, 1.1) * advantage
                weight = min(3.0, float((before[i] - answer.logps[i]).exp()))
                kl = ratio * (
                    (known[i] - spread[i, token]).exp() - (known[i] - spread[i, token]) - 1
                )
                loss = loss - min(better, clipped) * weight + 0.2 * kl
                kls.append(kl.item())
                ratios.append((ratio.item(), advantage))
                weights.append(weight)
        loss = loss / (len(found) * LONGEST)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        with torch.no_grad():
            for parameter in trained:
                parameter -= LR * parameter.grad
                parameter.grad = None
        means = {
            "kl": kls,
            "entropy": entropies,
            "sampling/importance_sampling_ratio/mean": weights,
        }
        means["sampling/sampling_logp_difference/mean"] = [
            abs(before - sampled) for before, sampled in pairs
        ]
        means["clip_ratio/low_mean"] = [
            ratio < 0.95 and advantage < 0 for ratio, advantage in ratios
        ]
        means["clip_ratio/high_mean"] = [
            ratio > 1.1 and advantage > 0 for ratio, advantage in ratios
        ]
        found_means = {name: sum(values) / len(values) for name, values in means.items()}
        steps.append({"loss": loss.item(), "grad_norm": norm.item(), **found_means})
    return steps


def test_all_policy_options_together_match_float64_formulas(starts, tmp_path):
    run = run_on(*starts["llama"], tmp_path / "out", **ALL)
    in_fp16 = {**run, "precision": "fp16_autocast", "output_dir": tmp_path / "fp16"}
    statuses, said = on_ranks(1, learn, ([run, in_fp16], [ADVANTAGES] * 2), tmp_path / "logs")
    assert statuses == [0], said[-5000:]
    expected = in_float64(*starts["llama"])
    assert all(
        max(step[f"clip_ratio/{side}_mean"] for step in expected) > 0 for side in ("low", "high")
    )
    for ours, exact in zip(numbers(tmp_path / "out"), expected, strict=True):
        assert {name: ours[name] for name in exact} == pytest.approx(exact, rel=OFF, abs=OFF)
    scaled = numbers(tmp_path / "fp16")
    assert {step["loss_scale"] for step in scaled} == {2.0**16}
    for ours, exact in zip(scaled, expected, strict=True):
        assert [ours[key] for key in ("loss", "grad_norm", "kl")] == pytest.approx(
            [exact[key] for key in ("loss", "grad_norm", "kl")], rel=2e-2
        )


# --- however the answers of a step are split ---

# Name -> (ranks, options).
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "one by one": (1, {"batch_size": 1, "gradient_accumulation_steps": 12, "recompute": "none"}),
    "whole logits": (1, {"batch_size": 3, "gradient_accumulation_steps": 4}),
    "two ranks": (2, {"batch_size": 3, "gradient_accumulation_steps": 2, "use_cpu_offload": True}),
    "shared rows": (
        2,
        {"batch_size": 4, "gradient_accumulation_steps": 3, "context_parallel_size": 2},
    ),
    "a rank without rows": (5, {"batch_size": 3, "batching": "padded"}),
    "shared by two": (
        4,
        {"batch_size": 3, "gradient_accumulation_steps": 2, "context_parallel_size": 2},
    ),
}


@pytest.mark.parametrize(
    ("options", "most_ranks"),
    [
        (ALL, 2),
        ({**ALL, "loss_type": "gspo", "epsilon": "0.005,0.01"}, 2),
        pytest.param({"loss_type": "grpo", "beta": 0.04}, 5, marks=pytest.mark.slow),
        *(pytest.param(each, 5, marks=pytest.mark.nightly) for each in (ALL, {})),
    ],
)
def test_numbers_do_not_depend_on_the_split_of_answers(
    options, most_ranks, starts, models, tmp_path
):
    splits = {name: split for name, (ranks, split) in SPLITS.items() if ranks <= most_ranks}
    for ranks in {SPLITS[name][0] for name in splits}:
        runs = []
        for name in [name for name in splits if SPLITS[name][0] == ranks]:
            base, start = starts["llama"]
            base = models("llama", logit_unknown=2.0) if name == "whole logits" else base
            runs.append(run_on(base, start, tmp_path / name, **options, **splits[name]))
        statuses, said = on_ranks(
            ranks, learn, (runs, [ADVANTAGES] * len(runs)), tmp_path / f"logs_{ranks}"
        )
        assert statuses == [0] * ranks, said[-5000:]
        assert ranks > 1 or said.count("computed from whole logits") == 1
    whole = numbers(tmp_path / "whole")
    kept = {"loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean"} & whole[0].keys()
    for name in splits:
        for ours, expected in zip(numbers(tmp_path / name), whole, strict=True):
            assert [ours[key] for key in kept] == pytest.approx(
                [expected[key] for key in kept], rel=OFF, abs=OFF
            ), name


def test_answers_without_sampled_probabilities_are_weighed_by_1():
    objective = make_objective("grpo", LossSettings(loss_type="dapo", beta=0.0))
    # of the second step on older answers
    logps = torch.tensor([-1.0, -2.0])
    old = torch.tensor([-1.5, -1.5])
    values = {"old_logps": old, "advantages": torch.ones(2)}
    batch: Any = SimpleNamespace(target_values=values, targets=torch.tensor([3, 4]))
    measured = objective.measure(
        torch.stack([-logps, torch.zeros(2)]), batch, Totals(2, num_targets=2)
    )
    means = objective.means(measured.tolist(), Totals(2, num_targets=2))
    found = [
        means[f"sampling/{name}/mean"]
        for name in ("importance_sampling_ratio", "sampling_logp_difference")
    ]
    assert found == [1, 0]


@pytest.mark.parametrize("batching", ["padded", "padding_free"])
def test_old_probabilities_come_from_the_micro_batches_of_the_step(batching):
    table = table_of(answers(0), ADVANTAGES[0])
    sizes = {"num_rows": 12, "global_batch_size": 12, "data_size": 2, "batch_size": 2}
    schedule = Schedule(**sizes, num_epochs=1, max_steps=-1, seed=0, batching=batching)
    of_step = Collator(schedule, pad_token_id=1).lay_out_step(table, np.arange(12))
    seen = list[torch.Tensor]()

    def token_losses(batch: Any, *_: Any, **__: Any) -> Any:
        seen.append(batch.input_ids)
        return torch.zeros(1, len(batch.targets)), batch

    usual = {
        "attending": contextlib.nullcontext,
        "heartbeat": Heartbeat(),
        "token_losses": token_losses,
    }
    forward: Any = SimpleNamespace(
        **usual, collator=of_step.collator, model=torch.nn.Module(), ranks=ONE
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    token_logprobs(forward, table)
    dist.destroy_process_group()
    expected = [batch.input_ids for batch in of_step]
    assert len(seen) == len(expected) == 3 and all(map(torch.equal, seen, expected))
