"""Writes trl_grpo.json: what TRL's GRPOTrainer logs in five steps on the same answers, and the
adapter then.

In an environment that has TRL besides ours: python -m tests.preferences.make_grpo_numbers
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.helpers.models import make_model
from tests.preferences.answers import (
    ANSWERS,
    CASES,
    LONGEST,
    LR,
    PROMPTS,
    STEPS,
    Answer,
    answers,
    make_adapter,
)
from tests.preferences.pairs import plain_sgd, sketch

KEPT = ("loss", "kl", "grad_norm", "entropy", "clip_ratio/", "reward", "frac_", "completions/")
KEPT += ("sampling/importance_sampling_ratio/mean", "cispo_clip_ratio")
LEFT_OUT = ("clip_ratio/low_min", "clip_ratio/high_max")


class Fixed:
    """Gives the answers of one generation after the other in place of an engine,
    and their rewards.
    """

    __name__ = "fixed"

    def __init__(self) -> None:
        self.generation = 0
        self.given: list[Answer] = []
        self.advantages: list[list[float]] = []

    def roll_out(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        self.take_advantages(trainer)
        self.given = answers(self.generation)
        assert [f"{i}" for i in range(PROMPTS) for _ in range(ANSWERS)] == prompts
        self.generation += 1
        names = {"prompt_ids": "prompt", "completion_ids": "completion", "logprobs": "logps"}
        return {
            theirs: [getattr(each, ours) for each in self.given] for theirs, ours in names.items()
        }

    def take_advantages(self, trainer: GRPOTrainer) -> None:
        """Keep those of the last answers, before the trainer forgets them."""
        self.advantages += [list(trainer._logs["advantages"])] * (self.generation > 0)

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert completion_ids == [each.completion for each in self.given]
        return [each.reward for each in self.given]


def numbers(options: dict[str, Any], model_type: str, folder: Path) -> dict[str, Any]:
    base = make_model(folder / model_type, model_type)
    adapter = make_adapter(base, folder / f"{model_type}_start")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    )
    options = dict(options)
    corrects = options.pop("rollout_url", None)
    if "epsilon" in options:
        low, _, high = str(options["epsilon"]).partition(",")
        options |= {"epsilon": float(low), "epsilon_high": float(high or low)}
    if options.get("loss_type") == "gspo":
        options |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    config = GRPOConfig(
        **options,
        **plain_sgd(folder, steps=STEPS, lr=LR, batch_size=PROMPTS * ANSWERS),
        num_generations=ANSWERS,
        max_completion_length=LONGEST,
        vllm_importance_sampling_mode="token_truncate",
        shuffle_dataset=False,
    )
    fixed = Fixed()
    prompts = Dataset.from_list([{"prompt": f"{i}"} for i in range(PROMPTS)])
    trainer = GRPOTrainer(
        model,
        fixed,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        rollout_func=fixed.roll_out,
    )
    if corrects:  # vLLM itself is asked for nothing
        trainer.use_vllm = True
        trainer._last_loaded_step = -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    fixed.take_advantages(trainer)
    steps = [
        {
            key: value
            for key, value in record.items()
            if key.startswith(KEPT) and key not in LEFT_OUT
        }
        for record in trainer.state.log_history
        if "grad_norm" in record
    ]
    trainer.model.save_pretrained(folder / "trained")
    return {"steps": steps, "advantages": fixed.advantages, "adapter": sketch(folder / "trained")}


def main() -> None:
    found: dict[str, Any] = {"trl": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for case, (model_type, options) in CASES.items():
            found[case] = numbers(
                options, model_type, Path(folder) / case.replace(" ", "_").replace(",", "")
            )
            print(case, *found[case]["steps"], file=sys.stderr, sep="\n")
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(values)}" for case, values in found.items()
    )
    Path(__file__).with_name("trl_grpo.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
