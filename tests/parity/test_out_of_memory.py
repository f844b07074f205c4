"""A step that runs out of memory on a rank alone is repeated with more recompute, and gives the same to the bit."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.parity.all_combinations import CASES
from tests.tiny import flags, make_rows, on_ranks, read_metrics, write_rows

Models = Callable[..., Path]
BLOCKS, MICRO_BATCHES, STEPS = 4, 2, 5
# Step -> where memory runs out in it: in a block's forward pass, in its backward pass, or where it is recomputed.
FAULTS = {1: "forward", 2: "backward", 3: "recomputed"}


class Faults:
    """Runs out of memory in the last micro-batches of FAULTS, once in each."""

    def __init__(self, trainer: Any) -> None:
        from fsdp_qlora.models import find_blocks

        self.heartbeat, self.step, self.calls = trainer.heartbeat, -1, 0
        self.left = set(FAULTS)
        self.failed: Callable[[], torch.Tensor | None] = lambda: None
        first, _, third, _ = find_blocks(trainer.model)
        first.get_submodule("mlp.up_proj").register_forward_hook(self.passed_first)
        # Gradients of the block behind it are reduced when its backward pass fails.
        third.get_submodule("mlp.down_proj").register_forward_hook(self.passed_third)

    def passed_first(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.heartbeat.step != self.step:
            self.step, self.calls = self.heartbeat.step, 0
        is_again = torch._C._current_graph_task_id() != -1
        self.calls += not is_again
        assert self.failed() is None  # so the whole pass can be gone
        if is_again and self.is_at("recomputed"):
            self.fail(output)

    def passed_third(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if self.is_at("forward"):
            self.fail(output)
        if self.is_at("backward"):
            self.failed = weakref.ref(output)
            output.register_hook(self.fail)

    def is_at(self, where: str) -> bool:
        return FAULTS.get(self.step) == where and self.calls == MICRO_BATCHES and self.step in self.left

    def fail(self, output: torch.Tensor) -> None:
        self.left.remove(self.step)
        self.failed = weakref.ref(output)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _train_each(with_faults: list[str], without: list[str]) -> int:
    """Train twice, first with a trainer as a trial on a GPU leaves it."""
    import fsdp_qlora.run
    import train
    from fsdp_qlora.load_model import build_trainer
    from fsdp_qlora.sharding.recompute import set_recompute
    from fsdp_qlora.training.fit_recompute import MemoryWatch

    faults = []

    def build(*args: Any) -> Any:
        trainer = build_trainer(*args)
        set_recompute(trainer.model, 1)
        trainer.memory_watch = MemoryWatch(trainer.model, 1, most=math.inf)
        faults.append(Faults(trainer))
        return trainer

    with mock.patch.object(fsdp_qlora.run, "build_trainer", build):
        status = train.main(with_faults)
    assert [each.left for each in faults] == [set()]
    return max(status, train.main(without))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        # Gradients add up in float32 beside FSDP2's 16-bit ones.
        ("qlora", {"precision": "bf16"}),
        ("bnb_dora", {"lora_dropout": 0.2}),
        ("full", {"train_type": "full"}),
        ("lora", {"use_cpu_offload": True}),
    ],
)
def test_a_step_that_runs_out_of_memory_is_repeated_as_if_it_had_not(
    case: str, options: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    common = CASES.get(case, {}) | options | {"model_name": models(num_hidden_layers=BLOCKS)}
    common |= {"dataset": write_rows(tmp_path / "rows.jsonl", make_rows(16)), "max_steps": STEPS, "num_epochs": STEPS}
    common |= {"batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES, "lr": 1e-3, "save_minutes": 0}
    common |= {"quant_cache": "off", "log_to": "jsonl"}
    commands = [
        flags(output_dir=tmp_path / name, recompute=number, **common)
        for name, number in (("faults", "auto"), ("none", len(FAULTS) + 1))
    ]
    statuses, output = on_ranks(1, _train_each, tuple(commands), tmp_path / "logs")
    assert statuses == [0], output[-3000:]
    for number in (2, 3, 4):
        line = "Out of GPU memory in a step, which is repeated: more blocks recompute their activations, "
        assert output.count(f"{line}{number} of {BLOCKS}.") == 1
    found, expected = (
        (
            read_metrics(tmp_path / name),
            read_metrics(tmp_path / name, "grad_norm"),
            [path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))],
        )
        for name in ("faults", "none")
    )
    assert len(set(expected[0])) == STEPS and expected[2] and found == expected
