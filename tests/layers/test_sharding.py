"""How a model is cut into FSDP2 groups, seen from a training run on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from tests.tiny import flags, make_rows, on_ranks, write_rows

Models = Callable[..., Path]


def options(model: Path, folder: Path, **changed: object) -> list[str]:
    rows = write_rows(folder / "rows.jsonl", make_rows(8))
    chosen = {"batch_size": 2, "max_steps": 2, "save_model": False, "quant_cache": "off", "log_to": "stdout"}
    return flags(model_name=model, dataset=rows, output_dir=folder / "out", **{**chosen, **changed})


def _train_with_arguments(argv: list[str]) -> int:
    import train

    calls = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, FSDPModule) and not isinstance(module, PreTrainedModel):
            calls.append(bool(args))

    register_module_forward_pre_hook(look)
    status = train.main(argv)
    return 9 if not calls or not all(calls) else status


@pytest.mark.parametrize("train_type", ["bnb_dora", "experts"])
def test_every_module_that_fsdp2_gathers_is_called_with_an_argument(
    models: Models, tmp_path: Path, train_type: str
) -> None:
    # FSDP2 of torch 2.11 moves the first argument to the GPU, and fails where there is none.
    if train_type == "experts":
        model = models("mixtral", num_local_experts=4, num_experts_per_tok=2)
        argv = options(model, tmp_path, train_type="qlora", lora_target_parameters="gate_up_proj,down_proj")
    else:
        argv = options(models("llama"), tmp_path, train_type=train_type)
    statuses, output = on_ranks(1, _train_with_arguments, (argv,), tmp_path / "logs")
    assert statuses == [0], output[-3000:]
