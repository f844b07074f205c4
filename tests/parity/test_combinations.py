"""Recompute, placement and both offloads change no number: combinations of them against the plain
run.

The plain run shards fully, recomputes every block and offloads nothing. Compared are the losses and
gradient norms of all steps, and the adapter after them: to the bit, or by the largest difference
relative to the plain run's (of the adapter: of a tensor, by norm).

Replicas differ by rounding: ranks that share the head add up the gradient of its input in parts of
the vocabulary and each replica adds up all of it. With several ranks the optimizer is SGD, which
makes no more of such differences.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from stand_in.environment import free_port
from tests.helpers.metrics import read_metrics
from tests.helpers.models import SIZES, make_model
from tests.helpers.rounding import SGD, rounding
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks

TOLERANCE = rounding(SIZES["vocab_size"])
BLOCKS = 3
AT_ONCE = 12
COMMON = {
    "num_epochs": 20,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "lr": 1e-3,
    "precision": "fp32",
}
COMMON |= {"quant_cache": "off", "log_to": "jsonl", "save_every": "none"}

# What is trained. The mixture's experts have adapters too, which takes no dropout.
CASES: dict[str, dict[str, Any]] = {
    "qlora": {"train_type": "qlora", "lora_dropout": 0.2},
    "lora": {"train_type": "lora", "lora_dropout": 0.2},
    "bnb_dora": {"train_type": "bnb_dora"},
    "hqq_lora": {"train_type": "hqq_lora"},
    "mixture": {
        "train_type": "qlora",
        "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
    },
}

Combination = Mapping[str, Any]  # options of train.py

_CHOICES: dict[str, Sequence[Any]] = {
    "recompute": ("all", 1, "none", "offload"),
    "sharding_strategy": ("full_shard", "ddp", "shard_grad_op"),
    "use_cpu_offload": (False, True, 2),
}
PLAIN: Combination = {name: choices[0] for name, choices in _CHOICES.items()}
BLOCKS_ALONE: list[Combination] = [{**PLAIN, "recompute": 1}, {**PLAIN, "recompute": "none"}]
OFFLOAD = {**PLAIN, "use_cpu_offload": True}
BOTH = {**OFFLOAD, "recompute": "offload"}
TOGETHER: list[Combination] = [
    dict(zip(PLAIN, values, strict=True))
    for values in (
        ("offload", "full_shard", 2),
        ("none", "ddp", 2),
        ("none", "full_shard", True),
        ("offload", "shard_grad_op", True),
    )
]


def pairwise() -> list[Combination]:
    """A few combinations in which every two choices of two options occur together, if they may."""

    def pairs(chosen: Combination) -> set[Any]:
        return set(itertools.combinations(chosen.items(), 2))

    everything = [
        dict(zip(_CHOICES, values, strict=True)) for values in itertools.product(*_CHOICES.values())
    ]
    found: list[Combination] = []
    left = set().union(*map(pairs, everything))
    while left:
        found.append(max(everything, key=lambda chosen: len(left & pairs(chosen))))
        left -= pairs(found[-1])
    return found


class Result(NamedTuple):
    """What a run did."""

    losses: list[float]
    grad_norms: list[float]
    adapter: dict[str, torch.Tensor]

    @classmethod
    def read(cls, output_dir: Path) -> "Result":
        adapter = load_file(output_dir / "adapter_model.safetensors")
        return cls(read_metrics(output_dir), read_metrics(output_dir, "grad_norm"), adapter)

    def difference(self, other: "Result") -> float:
        """The largest, relative; 0 where all bits are the same."""
        assert self.adapter.keys() == other.adapter.keys()
        assert len(set(self.losses)) > len(self.losses) // 2 and all(
            value.any() for value in self.adapter.values()
        )
        numbers = zip(
            (*self.losses, *self.grad_norms), (*other.losses, *other.grad_norms), strict=True
        )
        adapters = (
            float((other.adapter[name] - own).norm() / own.norm())
            for name, own in self.adapter.items()
        )
        return max(*(abs(b - a) / abs(a) for a, b in numbers), *adapters)


def train_each(commands: list[list[str]], ports: list[int]) -> int:
    """Train one after the other in this rank."""
    import train

    for argv, port in zip(commands, ports, strict=True):
        # another one, so that no rank meets those of the run before
        os.environ["MASTER_PORT"] = str(port)
        if status := train.main(argv):
            return status
    return 0


def differences(
    case: str, ranks: int, chosen: Sequence[Combination], folder: Path, steps: int, **shape: Any
) -> Iterator[tuple[Combination, float]]:
    """Train the plain run and each of `chosen`, some in a process; gives each one's difference from
    the plain run.
    """
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2} if case == "mixture" else shape
    model = make_model(
        folder / "model",
        "mixtral" if case == "mixture" else "llama",
        num_hidden_layers=BLOCKS,
        **shape,
    )
    options = (
        COMMON
        | CASES[case]
        | (SGD if ranks > 1 else {})
        | {"model_name": model, "max_steps": steps}
    )
    options["dataset"] = write_rows(folder / "rows.jsonl", make_rows(16))
    plain = None
    for first in range(0, 1 + len(chosen), AT_ONCE):
        runs = [PLAIN, *chosen][first : first + AT_ONCE]
        outputs = [folder / str(first + number) for number in range(len(runs))]
        commands = [
            flags(output_dir=output, **options, **each)
            for output, each in zip(outputs, runs, strict=True)
        ]
        ports = [free_port() for _ in commands]
        statuses, output = on_ranks(ranks, train_each, (commands, ports), folder / f"{first}-logs")
        assert not any(statuses), output[-5000:]
        for each, path in zip(runs, outputs, strict=True):
            plain = plain or Result.read(path)
            yield each, plain.difference(Result.read(path))


EVERY = [(case, ranks, pairwise(), {}, 20) for case in CASES for ranks in (1, 2)]


@pytest.mark.parametrize(
    ("case", "ranks", "chosen", "shape", "steps"),
    [
        ("qlora", 2, [*TOGETHER[:2], BLOCKS_ALONE[0]], {}, 5),
        ("qlora", 1, [*BLOCKS_ALONE, OFFLOAD, BOTH, {**OFFLOAD, "recompute": "none"}], {}, 5),
        ("bnb_dora", 1, BLOCKS_ALONE, {}, 5),
        pytest.param(
            "lora",
            1,
            [*BLOCKS_ALONE, OFFLOAD, {**PLAIN, "use_cpu_offload": 2}],
            {"tie_word_embeddings": True},
            5,
            marks=pytest.mark.nightly,
        ),
        pytest.param("hqq_lora", 1, [*BLOCKS_ALONE, BOTH], {}, 5, marks=pytest.mark.slow),
        pytest.param("mixture", 1, [*BLOCKS_ALONE, *TOGETHER[1:]], {}, 5, marks=pytest.mark.slow),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in EVERY),
    ],
)
def test_combinations_train_as_the_plain_run_does(case, ranks, chosen, shape, steps, tmp_path):
    for each, difference in differences(case, ranks, chosen, tmp_path, steps, **shape):
        is_exact = ranks == 1 or each["sharding_strategy"] != "ddp"
        assert difference <= (0.0 if is_exact else TOLERANCE), each
