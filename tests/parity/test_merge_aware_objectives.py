"""`--merge_aware` with pairs and with sampled answers, against plain loops that compare with the
base as it is and learn by the rounded weights.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import metrics_of, read_metrics
from tests.helpers.reference import load_base, step_plainly
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, on_ranks, train_ok
from tests.parity.test_merge_aware import RUN, Rounded, opened, save_base
from tests.preferences.pairs import make_pairs
from tests.rollouts.runs import inputs, rollouts_of

BETA = 0.5
OFF = 1e-5
Answer = tuple[list[int], list[int]]  # tokens of a prompt and of its completion


class RoundedModel:
    """The model of a plain loop, as a policy and as its reference."""

    def __init__(self, source: Path, folder: Path, form: str) -> None:
        self.model = load_base(source, four_bit=False).requires_grad_(False)
        self.layers: dict[str, Rounded] = {}
        self.weights: dict[str, nn.Linear] = {}
        stored = load_file(folder / "model.safetensors")
        for path, module in list(self.model.named_modules()):
            if not isinstance(module, nn.Linear) or "layers" not in path:
                continue
            self.layers[path] = Rounded(path, *opened(form, stored, f"{path}.weight"))
            self.weights[path] = module
            module.weight.copy_(self.layers[path].weight)
        trained = [each for layer in self.layers.values() for each in (layer.A, layer.B)]
        self.optimizer = torch.optim.SGD(trained, lr=RUN["lr"])

    def logps(self, answer: Answer) -> torch.Tensor:
        """Log-probabilities of the completion's tokens under the policy."""
        return self._logps(answer, self.layers)

    @torch.no_grad()
    def reference(self, answer: Answer) -> torch.Tensor:
        """The same under the base, whose weights are not rounded again."""
        return self._logps(answer, self.weights)

    def _logps(self, answer: Answer, layers: Mapping[str, nn.Module]) -> torch.Tensor:
        for path, layer in layers.items():
            self.model.set_submodule(path, layer)
        prompt, completion = answer
        ids = torch.tensor([prompt + completion])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(dim=-1)[torch.arange(len(completion)), completion]

    def adapter(self) -> dict[str, torch.Tensor]:
        found = {}
        for path, layer in self.layers.items():
            found[f"base_model.model.{path}.lora_A.weight"] = layer.A.detach()
            found[f"base_model.model.{path}.lora_B.weight"] = layer.B.detach()
        return found


def assert_equal_to(plain: RoundedModel, steps: list[tuple[float, float]], out: Path) -> None:
    """The losses, norms and adapter of a run are those of a plain loop."""
    losses, norms = zip(*steps, strict=True)
    assert read_metrics(out) == pytest.approx(losses, rel=OFF, abs=OFF)
    assert read_metrics(out, "grad_norm") == pytest.approx(norms, rel=OFF, abs=OFF)
    torch.testing.assert_close(
        load_file(out / "adapter_model.safetensors"), plain.adapter(), rtol=OFF, atol=OFF
    )


def evaluated(folder: Path, **options: object) -> dict[str, Any]:
    """The numbers that `evaluate` prints, on two ranks."""
    argv = ["evaluate", str(folder), "--json", *flags(**options)]
    logs = folder.with_name(f"{folder.name}_logs")
    statuses, output = on_ranks(2, main, (argv,), logs)
    assert statuses == [0, 0], output[-3000:]
    printed = (logs / "rank0.log").read_text()
    content, _ = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))
    [found] = content.values()
    return found  # type: ignore[no-any-return]


def tokenized(source: Path) -> Callable[[dict[str, str], str], Answer]:
    tokenizer = AutoTokenizer.from_pretrained(source)

    def answer(pair: dict[str, str], side: str) -> Answer:
        completion = tokenizer(pair[side], add_special_tokens=False)["input_ids"]
        return tokenizer(pair["prompt"])["input_ids"], [*completion, tokenizer.eos_token_id]

    return answer


def dpo_loss(plain: RoundedModel, answers: list[tuple[Answer, Answer]]) -> torch.Tensor:
    losses = []
    for pair in answers:
        chosen, rejected = (plain.logps(each).sum() - plain.reference(each).sum() for each in pair)
        losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("form", ["nvfp4", pytest.param("nf4", marks=pytest.mark.slow)])
def test_pairs_are_compared_with_the_base_as_it_is(form, models, tmp_path):
    base = save_base(models, tmp_path / "base", form)
    pairs = make_pairs()
    held_out = write_rows(tmp_path / "held_out.jsonl", make_pairs(6, seed=1))
    out = tmp_path / "out"
    objective = {"objective": "dpo", "beta": BETA}
    options = RUN | objective | {"dataset": write_rows(tmp_path / "rows.jsonl", pairs)}
    train_ok(2, out, model_name=base, eval_dataset=held_out, batch_size=4, **options)

    plain = RoundedModel(models("llama"), base, form)
    answer = tokenized(models("llama"))
    answers = [(answer(pair, "chosen"), answer(pair, "rejected")) for pair in pairs]
    steps = []
    for _ in range(RUN["max_steps"]):
        loss = dpo_loss(plain, answers)
        steps.append((loss.item(), step_plainly(plain.optimizer, loss)))
    assert_equal_to(plain, steps, out)
    assert steps[-1][0] < steps[0][0]
    last = [record for record in metrics_of(out) if "eval_loss" in record][-1]
    merged = tmp_path / "merged"
    assert main(["merge", str(out), "--out", str(merged)]) == 0
    measure = {"dataset": held_out, "context_length": 512, "batch_size": 4, "precision": "fp32"}
    # A merged model alone has no reference, so `evaluate` measures it without one.
    of_merged = evaluated(merged, **measure, objective="cpo", train_type="qlora")
    for side in ("chosen", "rejected"):
        assert of_merged[f"logps/{side}"] == last[f"logps/{side}"]


def grpo_steps(plain: RoundedModel, out: Path) -> list[tuple[float, float]]:
    """The steps of two passes over each answer of a run, with the KL to the base as it is."""
    steps = []
    for first in range(0, RUN["max_steps"], 2):
        lines = [each for each in rollouts_of(out) if each["step"] == first + 1]
        answers = [(each["prompt_ids"], each["token_ids"]) for each in lines]
        with torch.no_grad():
            old = [plain.logps(each) for each in answers]
        # The answers were drawn from the rounded weights.
        for line, logps in zip(lines, old, strict=True):
            assert line["sampled_logps"] == pytest.approx(logps.tolist(), rel=OFF, abs=OFF)
        for _ in range(min(2, RUN["max_steps"] - first)):
            terms = []
            for line, answer, before in zip(lines, answers, old, strict=True):
                logps = plain.logps(answer)
                ratio = (logps - before).exp()
                away = plain.reference(answer) - logps
                kl = ratio * (away.exp() - away - 1)
                gain = line["advantage"]
                better = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                terms.append(BETA * kl - better)
            loss = torch.cat(terms).mean()
            steps.append((loss.item(), step_plainly(plain.optimizer, loss)))
    return steps


@pytest.mark.parametrize("form", ["nvfp4", pytest.param("nf4", marks=pytest.mark.slow)])
def test_answers_are_drawn_from_the_rounded_weights(form, models, tmp_path):
    base = save_base(models, tmp_path / "base", form)
    options = inputs(models, tmp_path, num_iterations=2, beta=BETA) | RUN
    held_out = [{"question": f"name {number}", "answer": number % 3} for number in range(5)]
    scores = {
        "eval_dataset": write_rows(tmp_path / "held_out.jsonl", held_out),  # type: ignore[arg-type]
        "eval_rewards": options["rewards"],
    }
    options |= {"model_name": base, "train_type": "qlora", **scores}
    for ranks in (1, 2):
        split = {"gradient_accumulation_steps": 8 // ranks}
        train_ok(ranks, tmp_path / f"out{ranks}", **options, **split)
    plain = RoundedModel(models("llama"), base, form)
    steps = grpo_steps(plain, tmp_path / "out2")
    assert_equal_to(plain, steps, tmp_path / "out2")
    for name in ("loss", "grad_norm", "kl"):
        one, two = (read_metrics(tmp_path / f"out{ranks}", name) for ranks in (1, 2))
        assert two == pytest.approx(one, rel=OFF, abs=OFF)
    merged = tmp_path / "merged"
    assert main(["merge", str(tmp_path / "out2"), "--out", str(merged)]) == 0
    scores["dataset"] = scores.pop("eval_dataset")
    measure = {"objective": "grpo", "context_length": 64, "max_completion_length": 8}
    found = evaluated(merged, **measure, **scores, precision="fp32", train_type="qlora")
    last = [record for record in metrics_of(tmp_path / "out2") if "eval_reward" in record][-1]
    assert found["reward"] == last["eval_reward"]
