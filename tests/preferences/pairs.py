"""Pairs for the tests of preference objectives, and the cases that are compared with TRL."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.rows import write_rows
from tests.helpers.run import train_ok
from tests.helpers.tokenizers import WORDS

# of SGD: see tests/helpers/rounding.py
STEPS = 10
LR = 0.3
# Name -> (model family, options).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("llama", {"objective": "dpo"}),
    "dpo, hinge": ("qwen2", {"objective": "dpo", "loss_type": "hinge"}),
    "dpo, robust": ("llama", {"objective": "dpo", "loss_type": "robust", "label_smoothing": 0.2}),
    "dpo, sigmoid_norm": ("llama", {"objective": "dpo", "loss_type": "sigmoid_norm", "beta": 1.0}),
    "dpo and sft": ("qwen2", {"objective": "dpo", "sft_weight": 0.5}),
    "ipo": ("llama", {"objective": "ipo"}),
    "cpo": ("qwen2", {"objective": "cpo"}),
    "cpo, smoothed": ("llama", {"objective": "cpo", "label_smoothing": 0.1, "sft_weight": 0.3}),
    "simpo": ("llama", {"objective": "simpo", "beta": 2.0}),
    "orpo": ("llama", {"objective": "orpo"}),
    "kto": ("qwen2", {"objective": "kto", "kto_weights": "1,0.7", "beta": 0.5}),
}


def plain_sgd(folder: Path, *, steps: int, lr: float, batch_size: int) -> dict[str, Any]:
    """Options of TRL's trainers for a few steps of SGD on a CPU, each logged, with nothing saved or
    reported.
    """
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": batch_size,
        "max_steps": steps,
        "optim": "sgd",
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
    }


def make_pairs(count: int = 8, seed: int = 0) -> list[dict[str, str]]:
    """Prompts with answers of uneven lengths; the chosen ones begin with another word."""
    generator = torch.Generator().manual_seed(seed)

    def words(most: int) -> str:
        length = int(torch.randint(1, most, (1,), generator=generator))
        return "".join(
            f" {WORDS[i]}" for i in torch.randint(len(WORDS), (length,), generator=generator)
        )

    return [
        {
            "prompt": "question" + words(5),
            "chosen": " blue" + words(8),
            "rejected": " red" + words(6),
        }
        for _ in range(count)
    ]


def make_labeled(count: int = 8) -> list[dict[str, Any]]:
    """One answer of each pair, and whether it is the chosen one."""
    sides = [(pair, "chosen" if i % 3 else "rejected") for i, pair in enumerate(make_pairs(count))]
    return [
        {"prompt": pair["prompt"], "completion": pair[s], "label": s == "chosen"}
        for pair, s in sides
    ]


def options_of_a_run(base: Path, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All rows in each step, as in TRL's runs."""
    return {
        "model_name": base,
        "dataset": write_rows(folder / "rows.jsonl", rows),
        "train_type": "lora",
        "precision": "fp32",
        "lora_rank": 4,
        "lr_scheduler": "constant",
        "warmup": 0,
        "num_epochs": STEPS,
    }


def sketch(adapter: Path) -> list[float]:
    """A number of each tensor of an adapter or a model that changes with each of its values: the
    product with noise.
    """
    found = load_file(next(adapter.glob("*model.safetensors")))
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(found[name].shape, generator=generator, dtype=torch.float64)
        for name in sorted(found)
    }
    return [float((found[name] * values).sum()) for name, values in noise.items()]


def start_adapter(base: Path, output: Path) -> Path:
    """The adapter that a run starts from: one step at a vanishing rate."""
    output.parent.mkdir(parents=True, exist_ok=True)
    options = options_of_a_run(base, output.parent, make_pairs())
    train_ok(1, output, **options, objective="cpo", batch_size=8, max_steps=1, lr=1e-30)
    return output
