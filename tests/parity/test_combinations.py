"""Recompute, placement and both offloads change no number; all_combinations.py has all of them, with 20 steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.all_combinations import PLAIN, TOLERANCE, Combination, combinations, pairwise, train_combinations

BLOCKS: list[Combination] = [{**PLAIN, "recompute": 1}, {**PLAIN, "recompute": "none"}]
OFFLOAD = {**PLAIN, "use_cpu_offload": True}
BOTH = {**OFFLOAD, "use_activation_cpu_offload": True}
TOGETHER: list[Combination] = [
    dict(zip(PLAIN, values, strict=True))
    for values in (
        (1, "full_shard", 2, True),
        ("none", "ddp", 2, False),
        ("none", "full_shard", True, False),
        ("all", "shard_grad_op", True, True),
    )
]


@pytest.mark.parametrize(
    ("case", "ranks", "chosen", "shape"),
    [
        ("qlora", 2, [*TOGETHER[:2], BLOCKS[0]], {}),
        ("qlora", 1, [*BLOCKS, OFFLOAD, BOTH, {**OFFLOAD, "recompute": "none"}], {}),
        ("lora", 1, [*BLOCKS, OFFLOAD, {**PLAIN, "use_cpu_offload": 2}], {"tie_word_embeddings": True}),
        ("bnb_dora", 1, BLOCKS, {}),
        ("hqq_lora", 1, [*BLOCKS, BOTH], {}),
        ("mixture", 1, [*BLOCKS, *TOGETHER[1:]], {}),
    ],
)
def test_combinations_train_as_the_plain_run_does(
    case: str, ranks: int, chosen: list[Combination], shape: dict[str, Any], tmp_path: Path
) -> None:
    found = list(train_combinations(case, ranks, chosen, tmp_path, steps=5, **shape))
    assert len(found) == len(chosen)
    for each, difference in found:
        # Replicas add up norms in another order than shards.
        is_exact = ranks == 1 or each["sharding_strategy"] != "ddp"
        assert difference.most <= (0.0 if is_exact else TOLERANCE), (each, difference)


def test_every_two_choices_are_in_a_few_combinations() -> None:
    few, everything = pairwise(), list(combinations())
    assert len(few) < len(everything) / 4
    for one in everything:
        for name, other in (("recompute", "use_cpu_offload"), ("sharding_strategy", "use_activation_cpu_offload")):
            assert any(each[name] == one[name] and each[other] == one[other] for each in few)
