"""Packed bytes survive a card's arithmetic: sharded runs end with the bytes of the same runs
without it.
"""

from typing import Any

import pytest
import torch

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.export.expand import expand_model
from stand_in.environment import free_port
from tests.helpers.card import answer_as_a_card
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks
from tests.parity.test_combinations import train_each

# Every row of TRAIN_TYPES once, by its first name.
CASES: dict[str, dict[str, Any]] = {
    name: {"train_type": name}
    for name in dict(reversed([(row, name) for name, row in TRAIN_TYPES.items()])).values()
}
CASES["hqq 3"] = {"train_type": "hqq_lora", "n_bits": 3, "group_size": 32}
CASES["single quantization"] = {
    "train_type": "qlora",
    "double_quant": False,
    "sharding_strategy": "shard_grad_op",
}
# Rows whose quantizer is in others, and those without one.
ALIKE = (
    "hqq_llama_pro",
    "hqq_dora",
    "bnb_dora",
    "lora",
    "full",
    "dora",
    "hqq_lora",
    "bnb_llama_pro",
)


def _copy_patterns() -> int:
    answer_as_a_card()
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        copy = torch.empty_like(patterns).view(dtype)
        torch._foreach_copy_([copy], [patterns.view(dtype)])
        changed = copy.view(torch.int16) != patterns
        assert changed.sum() == patterns.view(dtype).isnan().sum() - 1  # 0x7fff stays
        assert (copy.view(torch.int16)[changed] == 0x7FFF).all()
    as_bytes = torch.empty(2**17, dtype=torch.uint8)
    torch._foreach_copy_([as_bytes], [patterns.view(torch.uint8)])
    return int(not torch.equal(as_bytes.view(torch.int16), patterns))


def test_gpu_stand_in_changes_16_bit_nans_and_no_bytes(tmp_path):
    statuses, output = on_ranks(1, _copy_patterns, (), tmp_path)
    assert statuses == [0], output


def _gather_patterns() -> int:
    from tests.gpu.programs import patterns

    answer_as_a_card()
    return patterns.main([])


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_patterns_of_16_bits_survive_a_gather(ranks, tmp_path):
    statuses, output = on_ranks(ranks, _gather_patterns, (), tmp_path)
    assert statuses == [0] * ranks, output
    assert output.count(" 0 words changed") == ranks * 4 * 2 * 4


def _train_then_on_a_card(
    honest: list[list[str]], on_card: list[list[str]], ports: list[int]
) -> int:
    """All runs in one process, which is a card's from the second half on."""
    if status := train_each(honest, ports[: len(honest)]):
        return status
    answer_as_a_card()
    return train_each(on_card, ports[len(honest) :])


@pytest.mark.parametrize("case", all_slow_but("qlora", CASES, nightly=ALIKE))
def test_sharded_run_is_unchanged_by_gpu_nan_handling(case, models, tmp_path):
    model = models("llama")
    options = CASES[case]
    if TRAIN_TYPES[options["train_type"]].trains_new_blocks:
        expand_model(str(model), tmp_path / "expanded", expansion_rate=0.5)
        model = tmp_path / "expanded"
    common = {
        "model_name": model,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        "quant_cache": "off",
    }
    common |= {"batch_size": 2, "lr": 1e-3, "log_to": "stdout", **options}
    how = [{"precision": "bf16"}, {"precision": "fp16", "use_cpu_offload": True}]
    outputs = [
        [tmp_path / f"{place}_{each['precision']}" for each in how] for place in ("cpu", "card")
    ]
    commands = [
        [flags(**common, **each, output_dir=out) for each, out in zip(how, place, strict=True)]
        for place in outputs
    ]
    statuses, output = on_ranks(
        2, _train_then_on_a_card, (*commands, [free_port() for _ in range(4)]), tmp_path
    )
    assert statuses == [0, 0], output[-6000:]
    for honest, found in zip(*outputs, strict=True):
        names = [path.name for path in sorted(honest.glob("*.safetensors"))]
        assert names and names == [path.name for path in sorted(found.glob("*.safetensors"))]
        assert all((honest / name).read_bytes() == (found / name).read_bytes() for name in names)
