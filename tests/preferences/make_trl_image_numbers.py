"""Writes trl_images.json: what TRL's trainers log in four steps on pairs with images from the same
adapter, and the adapter then.

In an environment that has TRL besides ours: python -m tests.preferences.make_trl_image_numbers
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.reference import load_base, peft_model
from tests.parity.test_images import LORA, PROCESSORS
from tests.preferences.image_pairs import (
    STEPS,
    TRL_CASES,
    TRL_LR,
    make_model_of_trl,
    rows_of_trl,
)
from tests.preferences.pairs import plain_sgd, sketch

TRAINERS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}
KEPT = ("loss", "kl", "grad_norm", "rewards/", "logps/")


def numbers(family: str, objective: str, folder: Path) -> dict[str, Any]:
    make_model_of_trl(folder, family)
    processor = PROCESSORS[family](folder)
    processor.chat_template = AutoTokenizer.from_pretrained(folder).chat_template
    model = peft_model(
        load_base(folder, four_bit=False, auto=AutoModelForImageTextToText),
        r=4,
        lora_alpha=6,
        target_modules=LORA,
    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = first_adapter_value(name.replace(".default", ""), parameter.shape, seed=5)
            parameter.data.copy_(value)
    rows = rows_of_trl(folder, objective)
    for row in rows:
        row["images"] = [Image.open(folder / name) for name in row["images"]]
    trainer_class, config_class = TRAINERS[objective]
    config = config_class(**plain_sgd(folder, steps=STEPS, lr=TRL_LR, batch_size=len(rows)))
    trainer = trainer_class(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=processor
    )
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    steps = [
        {key: value for key, value in record.items() if key.startswith(KEPT)} for record in logged
    ]
    trainer.model.save_pretrained(folder / "trained")
    return {"steps": steps, "adapter": sketch(folder / "trained")}


def main() -> None:
    found: dict[str, Any] = {"trl": trl.__version__}
    for family, objective in TRL_CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[f"{family}, {objective}"] = numbers(family, objective, Path(folder))
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(steps)}" for case, steps in found.items())
    Path(__file__).with_name("trl_images.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
