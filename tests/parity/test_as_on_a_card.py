"""Packed bytes survive a card's arithmetic: sharded runs end with the bytes of the same runs without it."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_qlora.commands.expand import expand_model
from fsdp_qlora.config.train_types import TRAIN_TYPES
from tests.card import answer_as_a_card
from tests.tiny import _free_port, flags, make_rows, on_ranks, write_rows

Models = Callable[..., Path]
# Every row of TRAIN_TYPES once, by its first name.
CASES: dict[str, dict[str, Any]] = {
    name: {"train_type": name} for name in dict(reversed([(row, name) for name, row in TRAIN_TYPES.items()])).values()
}
CASES["hqq 3"] = {"train_type": "hqq_lora", "n_bits": 3, "group_size": 32}
CASES["single quantization"] = {"train_type": "qlora", "double_quant": False, "sharding_strategy": "shard_grad_op"}


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


def test_a_card_changes_nans_of_16_bits_and_no_bytes(tmp_path: Path) -> None:
    statuses, output = on_ranks(1, _copy_patterns, (), tmp_path)
    assert statuses == [0], output


def _gather_patterns() -> int:
    from tests.gpu.programs import patterns

    answer_as_a_card()
    return patterns.main([])


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_patterns_of_16_bits_survive_a_gather(ranks: int, tmp_path: Path) -> None:
    statuses, output = on_ranks(ranks, _gather_patterns, (), tmp_path)
    assert statuses == [0] * ranks, output
    assert output.count(" 0 words changed") == ranks * 4 * 2 * 4


def _train_twice(commands: list[list[str]], ports: list[int]) -> int:
    import train

    for argv, port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # another one, so that no rank meets those of the run before
        if argv is commands[1]:
            answer_as_a_card()
        if status := train.main(argv):
            return status
    return 0


@pytest.mark.parametrize("precision, offload", [("bf16", False), ("fp16", True)])
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_run_is_the_same_on_a_card(
    case: str, precision: str, offload: bool, models: Models, tmp_path: Path
) -> None:
    model, options = models("llama"), CASES[case]
    if TRAIN_TYPES[options["train_type"]].trains_new_blocks:
        expand_model(str(model), tmp_path / "expanded", expansion_rate=0.5)
        model = tmp_path / "expanded"
    common = {"model_name": model, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8)), "quant_cache": "off"}
    common |= {"batch_size": 2, "lr": 1e-3, "precision": precision, "use_cpu_offload": offload, "log_to": "stdout"}
    outputs = [tmp_path / "cpu", tmp_path / "card"]
    commands = [flags(**common, **options, output_dir=output) for output in outputs]
    statuses, output = on_ranks(2, _train_twice, (commands, [_free_port(), _free_port()]), tmp_path / "logs")
    assert statuses == [0, 0], output[-6000:]
    honest, found = [sorted(folder.glob("*.safetensors")) for folder in outputs]
    assert honest
    for one, other in itertools.zip_longest(honest, found):
        assert (one.name, one.read_bytes()) == (other.name, other.read_bytes())
