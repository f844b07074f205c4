"""A run that has less memory after its first step, on the stand-in for CUDA or a card."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import write_rows

Take = Callable[[int, int], None]  # bytes in use, bytes that a step needs on top


def long_rows(models: Callable[..., Path], folder: Path, *, ranks: int) -> dict[str, Any]:
    """Options of three steps of which activations need nearly all memory."""
    row = {"instruction": "write", "input": "", "output": "water river " * 700}
    return {
        "model_name": models(num_hidden_layers=8, intermediate_size=4096, max_position_embeddings=2048),
        "dataset": write_rows(folder / "rows.jsonl", [row] * 12 * ranks),
        **{"train_type": "qlora", "max_steps": 3, "batch_size": 2, "context_length": 2048, "precision": "bf16"},
        **{"gradient_accumulation_steps": 2, "quant_cache": "off", "log_to": "stdout", "save_minutes": 0},
    }


def build_with_less(build: Callable[..., Any], take: Take, *args: Any) -> Any:
    """`build_trainer`'s trainer, for which memory is taken away after the first step."""
    import torch

    trainer = build(*args)
    train_step = trainer.train_step

    def train_step_with_less(step: int, rows: Any) -> Any:
        if step == 1:
            used = torch.cuda.memory_allocated()
            needed = torch.cuda.max_memory_reserved() - used
            torch.cuda.empty_cache()
            take(used, needed)
        return train_step(step, rows)

    trainer.train_step = train_step_with_less
    return trainer
