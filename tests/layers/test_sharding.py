"""How a model is cut into FSDP2 groups, seen from a training run on the CPU."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
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


def _train_with_kinds(argv: list[str], expected: set[tuple[bool, bool]]) -> int:
    import train

    kinds = set()

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, FSDPModule) and isinstance(module, PreTrainedModel):
            kinds.update((each.requires_grad, isinstance(each, DTensor)) for each in module.parameters())

    register_module_forward_pre_hook(look)
    status = train.main(argv)
    return 9 if kinds != expected else status


@pytest.mark.parametrize(
    "ranks, changed, frozen_is_sharded",
    [
        (1, {}, False),
        (1, {"train_type": "lora", "precision": "bf16"}, False),
        (1, {"use_cpu_offload": True}, False),
        (2, {"use_cpu_offload": True}, True),
        (2, {}, True),
        (2, {"sharding_strategy": "ddp"}, False),
    ],
)
def test_frozen_weights_that_a_rank_has_whole_are_not_kept_twice(
    models: Models, tmp_path: Path, ranks: int, changed: dict[str, object], frozen_is_sharded: bool
) -> None:
    # FSDP2 keeps a gathered copy beside the shard, even where that is all of the weight.
    argv = options(models("llama"), tmp_path, **{"train_type": "qlora", "max_steps": 1, **changed})
    expected = {(True, True), (False, frozen_is_sharded)}
    statuses, output = on_ranks(ranks, _train_with_kinds, (argv, expected), tmp_path / "logs")
    assert statuses == [0] * ranks, output[-3000:]


def _train_and_count_gathers(argv: list[str], gathers: dict[str, int]) -> int:
    import train
    from fsdp_qlora.training import trainer

    counts, train_step = {}, trainer.Trainer.train_step

    def step(self: Any, number: int, rows: Any) -> dict[str, Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            record = train_step(self, number, rows)
        counts.update({e.key: e.count for e in profile.key_averages() if "FSDP::all_gather (" in e.key})
        return record

    trainer.Trainer.train_step = step  # type: ignore[method-assign]
    status = train.main(argv)
    print(counts)
    return status if all(counts.get(f"FSDP::all_gather ({name})", 0) == count for name, count in gathers.items()) else 9


@pytest.mark.parametrize(
    ("trained", "gathers"),
    [("nothing", {"model.embed_tokens": 0, "lm_head": 0}), ("lm_head", {"model.embed_tokens": 0, "lm_head": 1})],
)
def test_what_no_gradient_passes_through_is_not_gathered_for_the_backward_pass(
    models: Models, tmp_path: Path, trained: str, gathers: dict[str, int]
) -> None:
    # In one step. FSDP2 gathers the group before the one at work, and nothing uses the embeddings then; frozen ones
    # are not gathered at all. With padding nothing is tried before. The head's gradients are computed with the loss.
    changed = {} if trained == "nothing" else {"modules_to_save": trained}
    argv = options(models("llama"), tmp_path, train_type="qlora", max_steps=1, padding=True, **changed)
    gathers = {"model.layers.1": 2, **gathers}
    statuses, output = on_ranks(2, _train_and_count_gathers, (argv, gathers), tmp_path / "logs")
    assert statuses == [0, 0], output[-3000:]


def _train_and_order_gathers(argv: list[str], expected: list[str]) -> int:
    import train
    from fsdp_qlora.training import trainer

    events, train_step = [], trainer.Trainer.train_step

    def step(self: Any, number: int, rows: Any) -> dict[str, Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            record = train_step(self, number, rows)
        events.extend(profile.events())
        return record

    trainer.Trainer.train_step = step  # type: ignore[method-assign]
    status = train.main(argv)
    seen = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        found = re.match(r"FSDP::(all_gather|pre_forward|pre_backward) \(model\.layers\.(\d)(.*)\)", event.name)
        if found and not (found[3] and found[1] != "all_gather"):
            kind = {"all_gather": "gather", "pre_forward": "forward", "pre_backward": "backward"}[found[1]]
            seen.append(f"{kind} {'adapters' if found[3] else 'block'} {found[2]}")
    print(seen)
    return status if seen == expected else 9


def test_the_next_blocks_weights_are_gathered_when_a_block_starts_its_adapters_first(
    models: Models, tmp_path: Path
) -> None:
    argv = options(models("llama"), tmp_path, train_type="qlora", max_steps=1, lora_target_modules="q_proj,v_proj")
    order = ["gather adapters 0", "gather block 0", "forward block 0", "gather adapters 1", "gather block 1"]
    order += ["forward block 1", "gather block 1", "backward block 1", "gather block 0", "backward block 0"]
    statuses, output = on_ranks(2, _train_and_order_gathers, (argv, order), tmp_path / "logs")
    assert statuses == [0, 0], output[-3000:]


def _train_with_wrong_expert(argv: list[str], where: float) -> int:
    import train
    from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitExperts

    load = Bnb4bitExperts.load_shard

    def load_wrongly(self: Bnb4bitExperts, values: torch.Tensor, mesh: Any) -> None:
        load(self, values, mesh)
        local = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        local.view(torch.uint8).view(-1)[int(local.numel() * local.element_size() * where)] ^= 1

    Bnb4bitExperts.load_shard = load_wrongly  # type: ignore[method-assign]
    return train.main(argv)


@pytest.mark.parametrize("where", [None, 0.99])
def test_the_self_test_looks_at_an_expert(models: Models, tmp_path: Path, where: float | None) -> None:
    model = models("mixtral", num_local_experts=4, num_experts_per_tok=2)
    argv = options(model, tmp_path, train_type="qlora", max_steps=1)
    target, args = (_train, (argv,)) if where is None else (_train_with_wrong_expert, (argv, where))
    statuses, output = on_ranks(2, target, args, tmp_path / "logs")
    if where is None:
        assert statuses == [0, 0], output[-3000:]
        assert "Self-test: expert 3 of model.layers.0.mlp.experts.gate_up_proj" in output
    else:
        assert 0 not in statuses
        assert "Self-test failed: expert 3 of" in output


def _train(argv: list[str]) -> int:
    import train

    return train.main(argv)


def _train_after_a_trial(argv: list[str]) -> int:
    import train
    from fsdp_qlora.training import trainer

    calls, train_step, loss = [], trainer.Trainer.train_step, trainer.Trainer._loss

    def record(self: Any, micro_batch: Any) -> torch.Tensor:
        calls.append(any(parameter.grad is not None for parameter in self.model.parameters()))
        return loss(self, micro_batch)

    def step(self: Any, number: int, rows: Any) -> dict[str, Any]:
        trainer.Trainer._loss = record  # type: ignore[method-assign]
        self.try_longest(rows)
        trainer.Trainer._loss = loss  # type: ignore[method-assign]
        return train_step(self, number, rows)

    trainer.Trainer.train_step = step  # type: ignore[method-assign]
    status = train.main(argv)
    return status if calls[:2] == [False, True] else 9


def test_what_is_tried_first_adds_up_gradients_as_the_steps_do(models: Models, tmp_path: Path) -> None:
    changed = {"train_type": "full", "gradient_accumulation_steps": 2, "max_steps": 1}
    argv = options(models("llama"), tmp_path, **changed)
    statuses, output = on_ranks(1, _train_after_a_trial, (argv,), tmp_path / "logs")
    assert statuses == [0], output[-3000:]
