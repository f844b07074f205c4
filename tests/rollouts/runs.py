"""Options of short runs that learn from their own answers, and what these runs write."""

from pathlib import Path
from typing import Any

from tests.helpers.models import Models
from tests.helpers.rows import read_rows, write_rows

OPTIONS: dict[str, Any] = {
    "objective": "grpo",
    "train_type": "lora",
    "lora_rank": 4,
    "precision": "fp32",
    "lr": 1e-2,
    "num_generations": 4,
    "max_completion_length": 8,
    "context_length": 64,
    "quant_cache": "off",
    "save_every": 1,
}
SHORT = """
def short(completions, answer, **_):
    return [a - len(said) / 10 for said, a in zip(completions, answer)]
"""


def inputs(
    models: Models, folder: Path, *, prompts: int = 8, function: str = SHORT, **changes: Any
) -> dict[str, Any]:
    """Options of a run on a tiny model, prompts and a reward function of its own."""
    rows = [{"question": f"sort {number}", "answer": number % 3} for number in range(prompts)]
    (folder / "own.py").write_text(function)
    dataset = write_rows(folder / "rows.jsonl", rows)  # type: ignore[arg-type]
    rewards = f"{folder / 'own.py'}:short"
    return {**OPTIONS, "model_name": models(), "dataset": dataset, "rewards": rewards, **changes}


def rollouts_of(output_dir: Path) -> list[dict[str, Any]]:
    return read_rows(output_dir / "rollouts.jsonl")
