"""How a model is cut into FSDP2 groups, seen from a training run on the CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoConfig, PreTrainedModel

from benchmarks.aligned_gathers import parts_of_gathers, sharded_model
from fsdp_qlora.data.batches.schedule import RowsInMemory, StepRows
from fsdp_qlora.data.longest_rows import longest_of_table
from fsdp_qlora.distributed.shards import local_part
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks


def options(model: Path, folder: Path, **changed: object) -> list[str]:
    rows = write_rows(folder / "rows.jsonl", make_rows(8))
    chosen = {
        "batch_size": 2,
        "max_steps": 2,
        "save_model": False,
        "quant_cache": "off",
        "log_to": "stdout",
    }
    return flags(model_name=model, dataset=rows, output_dir=folder / "out", **{**chosen, **changed})


def _train_and_look(argv: list[str], frozen_is_sharded: bool, adapters_are_sharded: bool) -> int:
    import train

    has_arguments = set()
    kinds = set()

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, FSDPModule) and isinstance(module, PreTrainedModel):
            named = [each for name, each in module.named_parameters() if "magnitude" not in name]
            kinds.update((each.requires_grad, isinstance(each, DTensor)) for each in named)
        elif isinstance(module, FSDPModule):
            has_arguments.add(bool(args))

    register_module_forward_pre_hook(look)
    status = train.main(argv)
    return (
        status
        if kinds == {(True, adapters_are_sharded), (False, frozen_is_sharded)}
        and has_arguments == {True}
        else 9
    )


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "ranks, changed, frozen_is_sharded",
    [
        (1, {}, False),
        (1, {"train_type": "lora", "precision": "bf16"}, False),
        (1, {"use_cpu_offload": True}, False),
        (2, {"use_cpu_offload": True}, True),
        (2, {}, True),
        (2, {"sharding_strategy": "ddp"}, False),
        (1, {"train_type": "bnb_dora"}, False),
        (1, {"lora_target_parameters": "gate_up_proj,down_proj"}, False),
    ],
)
def test_whole_frozen_weights_are_not_kept_twice(
    models, tmp_path, ranks, changed, frozen_is_sharded
):
    # FSDP2 keeps a gathered copy beside the shard, even where that is all of the weight. Before a
    # forward pass it moves the first argument to the GPU; in torch 2.11 it fails where there is
    # none.
    model = models("mixtral", **EXPERTS) if "lora_target_parameters" in changed else models("llama")
    argv = options(model, tmp_path, **{"train_type": "qlora", "max_steps": 1, **changed})
    statuses, output = on_ranks(
        ranks, _train_and_look, (argv, frozen_is_sharded, ranks > 1), tmp_path / "logs"
    )
    assert statuses == [0] * ranks, output[-3000:]


def _train_and_order_gathers(argv: list[str], expected: list[str]) -> int:
    import train
    from fsdp_qlora.training import trainer

    events = []
    train_step = trainer.Trainer.train_step

    def step(self: Any, rows: StepRows) -> dict[str, Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            record = train_step(self, rows)
        events[:] = sorted(profile.events(), key=lambda event: event.time_range.start)
        return record

    trainer.Trainer.train_step = step  # type: ignore[method-assign]
    status = train.main(argv)
    kinds = {"all_gather": "gather", "pre_forward": "forward", "pre_backward": "backward"}
    seen = []
    for event in events:
        found = re.match(
            r"FSDP::(\w+) \((?:model\.)?(embed_tokens|lm_head|layers\.\d)(.*)\)",
            event.name,
        )
        if found and found[1] in kinds and (not found[3] or found[1] == "all_gather"):
            name = found[2].replace("layers.", "adapters " if found[3] else "block ")
            seen.append(f"{kinds[found[1]]} {name}")
    print(seen)
    return status if seen == expected else 9


FORWARD = [
    "gather adapters 0",
    "gather block 0",
    "forward block 0",
    "gather adapters 1",
    "gather block 1",
]
BACKWARD = ["gather block 1", "backward block 1", "gather block 0", "backward block 0"]
HEAD = ["gather lm_head", "forward lm_head", "backward lm_head"]


@pytest.mark.parametrize(
    ("changed", "order"),
    [
        ({}, [*FORWARD, "forward block 1", *BACKWARD]),
        ({"modules_to_save": "lm_head"}, [*FORWARD, "forward block 1", *HEAD, *BACKWARD]),
    ],
)
def test_a_starting_block_prefetches_the_next_one(models, tmp_path, changed, order):
    # In one step. FSDP2 gathers the group before the one at work, and nothing uses the embeddings
    # then; frozen ones are not gathered at all. With padding nothing is tried before. The head's
    # gradients are computed with the loss.
    changed = {
        "train_type": "qlora",
        "max_steps": 1,
        "batching": "padded",
        "lora_target_modules": "q_proj,v_proj",
        **changed,
    }
    argv = options(models("llama"), tmp_path, **changed)
    statuses, output = on_ranks(2, _train_and_order_gathers, (argv, order), tmp_path / "logs")
    assert statuses == [0, 0], output[-3000:]


def _train_with_wrong_expert(argv: list[str], where: float | None) -> int:
    import train
    from fsdp_qlora.model.quantizers.table import QUANTIZERS

    kind: Any = QUANTIZERS["bnb_4bit"].experts
    load = kind.load_shard

    def load_wrongly(self: Any, values: torch.Tensor, mesh: Any) -> None:
        load(self, values, mesh)
        local = local_part(self.weight).view(torch.uint8).view(-1)
        local[int(local.numel() * where)] ^= 1

    if where is not None:
        kind.load_shard = load_wrongly
    return train.main(argv)


@pytest.mark.parametrize("where", [None, 0.99])
def test_the_self_test_compares_an_expert(models, tmp_path, where):
    argv = options(
        models("mixtral", **EXPERTS), tmp_path, train_type="qlora", max_steps=1, verbose=True
    )
    statuses, output = on_ranks(2, _train_with_wrong_expert, (argv, where), tmp_path / "logs")
    if where is None:
        assert statuses == [0, 0], output[-3000:]
        assert "Self-test: expert 3 of model.layers.0.mlp.experts.gate_up_proj" in output
    else:
        assert 0 not in statuses and "Self-test failed: expert 3 of" in output


def _train_after_a_trial(argv: list[str]) -> int:
    import train
    from fsdp_qlora.training import trainer

    has_gradients = []
    train_step = trainer.Trainer.train_step
    loss = trainer.Trainer._loss

    def note(self: Any, *args: Any) -> torch.Tensor:
        has_gradients.append(
            any(parameter.grad is not None for parameter in self.model.parameters())
        )
        return loss(self, *args)

    def step(self: Any, rows: StepRows) -> dict[str, Any]:
        in_memory = RowsInMemory(rows.table, rows.rows)
        self.try_longest(longest_of_table(in_memory, self.collator))
        assert has_gradients[:2] == [False, True]
        return train_step(self, rows)

    # type: ignore[method-assign]
    trainer.Trainer._loss = note
    trainer.Trainer.train_step = step
    return train.main(argv)


def test_a_probe_accumulates_gradients_like_a_step(models, tmp_path):
    changed = {"train_type": "full", "gradient_accumulation_steps": 2, "max_steps": 1}
    argv = options(models("llama"), tmp_path, **changed)
    statuses, output = on_ranks(1, _train_after_a_trial, (argv,), tmp_path / "logs")
    assert statuses == [0], output[-3000:]


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize(
    "train_type", ["qlora", "lora", "bnb_dora", "hqq_lora", "int8_lora", "full"]
)
def test_every_all_gather_input_is_a_multiple_of_16_bytes(train_type, num_ranks):
    # No size of this model is a multiple of 16. NCCL copies other parts byte by byte.
    sizes = {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    }
    config = AutoConfig.for_model(
        "llama", **sizes, num_hidden_layers=2, vocab_size=101, head_dim=12
    )
    model, before = sharded_model(config, num_ranks, train_type=train_type, lora_rank=3)
    parts = [part for part, _ in parts_of_gathers(model)]
    assert len(parts) > 4 and not any(part % 16 for part in parts), parts
    # loading and saving find nothing new
    assert [name for name, _ in model.named_parameters()] == before
