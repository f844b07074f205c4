"""The cases of distillation that are compared with TRL's trainers."""

from typing import Any

# four rows a step
STEPS = 5
ROWS = 20
# with a higher one the roundings of five full steps grow
LR = 0.5
FULL_LR = 0.1
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
TEACHER: dict[str, Any] = {"num_hidden_layers": 3}
# Name -> (trainer, options).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"gkd, {beta}": ("gkd", {"beta": beta}) for beta in (0.0, 0.5, 1.0)},
    "gkd, full, warm": ("gkd", {"beta": 0.5, "train_type": "full", "temperature": 0.9}),
    "0.5": ("distillation", {"beta": 0.5}),
    **{
        f"{beta}, warm": ("distillation", {"beta": beta, "temperature": 0.9})
        for beta in (0.0, 0.5, 1.0)
    },
    **{
        f"{beta}, full": ("distillation", {"beta": beta, "train_type": "full"})
        for beta in (0.0, 0.5, 1.0)
    },
    "0.3, full, hot": ("distillation", {"beta": 0.3, "train_type": "full", "temperature": 2.0}),
    "server, top 7": ("server", {"beta": 0.0, "top_k": 7}),
}
