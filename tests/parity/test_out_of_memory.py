"""A step in which a rank runs out of memory is repeated with more recompute, the same to the bit."""

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
from tests.tiny import flags, make_rows, on_ranks, read_metrics, run_ranks, write_rows

Models = Callable[..., Path]
BLOCKS, MICRO_BATCHES, STEPS = 5, 2, 6
# Step -> where memory runs out in it: in a block's forward pass, in its backward pass, where it is recomputed, or where
# its gradients are reduced.
FAULTS = {1: "forward", 2: "backward", 3: "recomputed", 4: "reduced"}


class Faults:
    """Runs out of memory in the last micro-batches of FAULTS, once in each."""

    def __init__(self, trainer: Any) -> None:
        from fsdp_qlora.models import find_blocks
        from fsdp_qlora.sharding.recompute import adapter_owners

        self.heartbeat, self.step, self.calls = trainer.heartbeat, -1, 0
        self.left = set(FAULTS)
        self.failed: Callable[[], torch.Tensor | None] = lambda: None
        first, second, third, *_ = find_blocks(trainer.model)
        first.get_submodule("mlp.up_proj").register_forward_hook(self.passed_first)
        # Gradients of the block behind it are reduced when its backward pass fails.
        third.get_submodule("mlp.down_proj").register_forward_hook(self.passed_third)
        for module in adapter_owners(second)[:1] or [second]:
            self.group = module._get_fsdp_state()._fsdp_param_group
            self.wait, self.group._wait_for_post_backward = self.group._wait_for_post_backward, self.reduce_second

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

    def reduce_second(self) -> None:
        if self.is_at("reduced"):
            self.fail(torch.empty(0))
        self.wait()

    def is_at(self, where: str) -> bool:
        return FAULTS.get(self.step) == where and self.calls == MICRO_BATCHES and self.step in self.left

    def fail(self, output: torch.Tensor) -> None:
        self.left.remove(self.step)
        self.failed = weakref.ref(output)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _train_with_faults(argv: list[str]) -> int:
    """Train with a trainer as a trial on a GPU leaves it, and faults on the last rank."""
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
        if trainer.ranks.rank == trainer.ranks.world_size - 1:
            faults.append(Faults(trainer))
        return trainer

    with mock.patch.object(fsdp_qlora.run, "build_trainer", build):
        status = train.main(argv)
    assert not any(each.left for each in faults)
    return status


@pytest.mark.parametrize(
    ("ranks", "case", "options"),
    [
        # Gradients add up in float32 beside FSDP2's 16-bit ones.
        (1, "qlora", {"precision": "bf16"}),
        (1, "lora", {"use_cpu_offload": True}),
        # On the last rank alone.
        (2, "qlora", {"precision": "bf16"}),
        (2, "bnb_dora", {"use_cpu_offload": True, "lora_dropout": 0.2}),
        # Gradients are reduced in each micro-batch.
        (2, "full", {"train_type": "full", "sharding_strategy": "ddp"}),
    ],
)
def test_a_step_that_runs_out_of_memory_is_repeated_as_if_it_had_not(
    ranks: int, case: str, options: dict[str, Any], models: Models, tmp_path: Path
) -> None:
    common = CASES.get(case, {}) | options | {"model_name": models(num_hidden_layers=BLOCKS)}
    common |= {"dataset": write_rows(tmp_path / "rows.jsonl", make_rows(16)), "max_steps": STEPS, "num_epochs": STEPS}
    common |= {"batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES, "lr": 1e-3, "save_minutes": 0}
    common |= {"quant_cache": "off", "log_to": "jsonl"}
    argv = flags(output_dir=tmp_path / "none", recompute=len(FAULTS) + 1, **common)
    statuses, output = run_ranks(ranks, argv, tmp_path / "logs_none")
    assert statuses == [0] * ranks, output[-3000:]
    argv = flags(output_dir=tmp_path / "faults", recompute="auto", **common)
    statuses, output = on_ranks(ranks, _train_with_faults, (argv,), tmp_path / "logs_faults")
    assert statuses == [0] * ranks, output[-3000:]
    lines = [
        f"Rank {ranks - 1} ran out of GPU memory in step {step + 1}, which is repeated: more blocks recompute their "
        f"activations, {number} of {BLOCKS}."
        for number, step in enumerate(FAULTS, start=2)
    ]
    assert [line for line in output.splitlines() if "which is repeated" in line] == lines
    found, expected = (
        (
            read_metrics(tmp_path / name),
            read_metrics(tmp_path / name, "grad_norm"),
            [path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))],
        )
        for name in ("faults", "none")
    )
    assert len(set(expected[0])) == STEPS and expected[2] and found == expected
