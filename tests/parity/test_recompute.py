"""How many blocks recompute changes no number: to the bit, with dropout, for every kind of base and adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.all_combinations import CASES
from tests.tiny import flags, make_rows, on_ranks, read_metrics, write_rows

Models = Callable[..., Path]


def _train_each(commands: list[list[str]]) -> int:
    import train

    return max(train.main(argv) for argv in commands)


@pytest.mark.parametrize(("ranks", "case"), [*((1, case) for case in CASES), (2, "qlora")])
def test_every_number_of_blocks_with_recompute_gives_the_same_adapter(
    ranks: int, case: str, models: Models, tmp_path: Path
) -> None:
    model = models("mixtral", num_local_experts=4, num_experts_per_tok=2) if case == "mixture" else models()
    common = CASES[case] | {"model_name": model, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8))}
    common |= {"max_steps": 20, "num_epochs": 20, "batch_size": 2, "lr": 1e-3, "quant_cache": "off", "log_to": "jsonl"}
    how: dict[str, dict[str, Any]] = {
        "all": {"recompute": "all"},
        "one": {"recompute": 1},
        "none": {"use_gradient_checkpointing": False},
    }
    if ranks == 2:
        del how["none"]
    commands = [flags(output_dir=tmp_path / name, **common, **options) for name, options in how.items()]
    # One after the other, several ranks could meet those of the run before.
    for together in [commands] if ranks == 1 else [[command] for command in commands]:
        statuses, output = on_ranks(ranks, _train_each, (together,), tmp_path / "logs")
        assert statuses == [0] * ranks, output[-3000:]
    first, *others = [
        (
            read_metrics(tmp_path / name),
            read_metrics(tmp_path / name, "grad_norm"),
            (tmp_path / name / "adapter_model.safetensors").read_bytes(),
        )
        for name in how
    ]
    assert len(set(first[0])) > 10 and others == [first] * len(others) != []
