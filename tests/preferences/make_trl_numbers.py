"""Writes trl.json: what TRL's trainers log in ten steps from the same adapter on the same pairs,
and the adapter then.

In an environment that has TRL besides ours: python -m tests.preferences.make_trl_numbers
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.helpers.models import make_model
from tests.preferences.pairs import (
    CASES,
    LR,
    STEPS,
    make_labeled,
    make_pairs,
    plain_sgd,
    sketch,
    start_adapter,
)

# Case -> TRL's trainer and configuration, and its names of the case's options.
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, {}),
    "dpo, hinge": (DPOTrainer, DPOConfig, {"loss_type": ["hinge"]}),
    "dpo, robust": (DPOTrainer, DPOConfig, {"loss_type": ["robust"], "label_smoothing": 0.2}),
    "dpo, sigmoid_norm": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid_norm"], "beta": 1.0}),
    "dpo and sft": (
        DPOTrainer,
        DPOConfig,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}),
    "cpo": (CPOTrainer, CPOConfig, {}),
    "cpo, smoothed": (CPOTrainer, CPOConfig, {"label_smoothing": 0.1, "cpo_alpha": 0.3}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {"undesirable_weight": 0.7, "beta": 0.5}),
}
KEPT = ("loss", "kl", "grad_norm", "nll_loss", "rewards/", "logps/")


def numbers(case: str, model_type: str, folder: Path) -> dict[str, list[Any]]:
    trainer_class, config_class, options = TRAINERS[case]
    base = make_model(folder / model_type, model_type)
    adapter = start_adapter(base, folder / f"{model_type}_start")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True
    )
    pairs = make_labeled() if case == "kto" else make_pairs()
    config = config_class(**options, **plain_sgd(folder, steps=STEPS, lr=LR, batch_size=len(pairs)))
    trainer = trainer_class(
        model=model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer
    )
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    # A likelihood of weight 0 is not computed, and is logged as 0.
    steps = [
        {
            key: value
            for key, value in record.items()
            if key.startswith(KEPT) and (key, value) != ("nll_loss", 0)
        }
        for record in logged
    ]
    trainer.model.save_pretrained(folder / "trained")
    return {"steps": steps, "adapter": sketch(folder / "trained")}


def main() -> None:
    assert TRAINERS.keys() == CASES.keys()
    found: dict[str, Any] = {"trl": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for case, (model_type, _) in CASES.items():
            found[case] = numbers(
                case, model_type, Path(folder) / case.replace(" ", "_").replace(",", "")
            )
            print(case, found[case]["steps"][-1], file=sys.stderr)
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(steps)}" for case, steps in found.items())
    Path(__file__).with_name("trl.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
