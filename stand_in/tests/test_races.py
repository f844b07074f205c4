"""No part of the program races with another: streams, collectives, the host and freed memory
(races.py).

The table of README.md comes from

    python -m pytest --nightly stand_in/tests/test_races.py -rP | grep '^|'
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from stand_in.environment import run
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags

PROGRAMS = ROOT / "stand_in/programs"
COMMON: Mapping[str, object] = {
    "train_type": "qlora",
    "max_steps": 2,
    "num_epochs": 20,
    "batch_size": 2,
    "context_length": 256,
    "log_to": "stdout",
    "quant_cache": "off",
    "recompute": "all",
    "sharding_strategy": "full_shard",
}
OFFLOAD = {"use_cpu_offload": True}


class Case(NamedTuple):
    """A run on some ranks, and the faults of programs/with_races.py that it reaches."""

    ranks: int
    options: Mapping[str, object]
    faults: tuple[str, ...]
    command: str = "train"
    # of the model, where they are not the usual ones
    sizes: Mapping[str, object] = MappingProxyType({})
    # whether it computes by the ways that a card would choose
    by_chosen: bool = False
    # whether it keeps what attention gives for documents of any length
    keeps_attention: bool = False


EVERYDAY = Case(1, OFFLOAD, ("no_wait_for_copies",))
CASES = {
    "full_shard": Case(
        2,
        {"gradient_accumulation_steps": 2},
        ("fsdp2_waits_for_no_stream", "no_wait_for_collectives"),
    ),
    "CPU offload": Case(2, OFFLOAD, ("no_event", "fsdp2_waits_for_no_event")),
    "activation offload": Case(
        1, {"recompute": "offload"}, ("no_wait_for_computation", "no_wait_before_memory_is_freed")
    ),
    "attention's output on the host": Case(
        2,
        {"recompute": "offload", "gradient_accumulation_steps": 2},
        ("no_wait_for_computation", "no_wait_before_memory_is_freed"),
        keeps_attention=True,
    ),
    # wide enough that gates and queries go to the host
    "activations on the host": Case(
        2,
        {"recompute": "host", "gradient_accumulation_steps": 2},
        ("no_event", "no_wait_for_computation", "no_wait_before_memory_is_freed"),
        sizes={"intermediate_size": 2048, "hidden_size": 512},
    ),
    "activations and weights on the host": Case(
        1,
        {"recompute": "host", **OFFLOAD},
        ("no_wait_for_copies", "no_wait_before_memory_is_freed"),
        sizes={"intermediate_size": 2048, "hidden_size": 512},
    ),
    "ddp, recompute auto": Case(
        2,
        {"sharding_strategy": "ddp", "recompute": "auto"},
        ("fsdp2_waits_for_no_stream",),
    ),
    "shard_grad_op, DoRA": Case(
        2,
        {"sharding_strategy": "shard_grad_op", "train_type": "bnb_dora"},
        ("fsdp2_records_no_event",),
    ),
    "packing": Case(
        2, {"batching": "packed", "gradient_accumulation_steps": 2}, ("host_writes_into_copies",)
    ),
    "paged 8-bit optimizer, full": Case(
        1,
        {"optimizer": "paged_adamw_8bit", "train_type": "full"},
        ("host_reads_before_it_waits",),
        sizes={"intermediate_size": 2048},  # bitsandbytes pages states of 100,000 elements and more
    ),
    "evaluation, CPU offload": Case(
        2, {"eval_fraction": 0.25, "eval_steps": 1, **OFFLOAD}, ("no_wait_for_copies",)
    ),
    "checkpoint at each step, full": Case(
        2, {"save_every": 1, "train_type": "full"}, ("host_reads_before_it_waits",)
    ),
    "generate, CPU offload": Case(
        1, {**OFFLOAD, "max_new_tokens": 4}, ("no_wait_for_copies",), "generate"
    ),
    "generate, graphs": Case(
        1, {"max_new_tokens": 20}, ("no_wait_for_tokens",), "generate", by_chosen=True
    ),
}


@pytest.fixture(scope="module")
def check(models, tmp_path_factory):
    """check(case, fault) -> what was found and what was looked at on each rank. With a fault it
    need not end well.
    """
    rows = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", make_rows(64))
    prompts = rows.with_name("prompts.txt")
    prompts.write_text("sort the list\nname a river\n")

    def options(case: Case, folder: Path) -> dict[str, object]:
        model = models(num_hidden_layers=4, **case.sizes)
        trained = {**COMMON, "model_name": model, "dataset": rows, "output_dir": folder / "output"}
        if case.command == "train":
            return {**trained, **case.options}
        [rank] = run(["train.py", *flags(**trained)], folder / "train")
        assert rank.status == 0, rank.output[-4000:]
        return {
            "adapter": folder / "output",
            "prompts": prompts,
            "out": folder / "answers.jsonl",
            **case.options,
        }

    def start(case: Case, fault: str = "none") -> list[dict[str, dict[str, int]]]:
        folder = tmp_path_factory.mktemp(fault)
        program = [PROGRAMS / "with_races.py", folder / "races{rank}.json", fault]
        program += [*["chosen"] * case.by_chosen, *["long"] * case.keeps_attention, case.command]
        words = flags(**options(case, folder))
        ended = run([*program, *words], folder, ranks=case.ranks, timeout_seconds=600)
        assert fault != "none" or not any(rank.status for rank in ended), ended[0].output[-4000:]
        return [
            json.loads((folder / f"races{rank}.json").read_text()) for rank in range(case.ranks)
        ]

    return start


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    [rank] = run([PROGRAMS / "small_races.py"], tmp_path_factory.mktemp("small"))
    assert rank.status == 0, rank.output
    return json.loads(next(line for line in rank.output.splitlines() if line.startswith("{")))


def test_races_are_found_and_correct_code_is_not_reported(small):
    assert len(small) == 9
    for name, (right, wrong) in small.items():
        assert not right and len(wrong) == 1, name


def test_offloaded_weights_are_waited_for_and_a_missing_wait_is_found(check):
    with ThreadPoolExecutor() as both:
        [right], [wrong] = both.map(check, (EVERYDAY, EVERYDAY), ("none", *EVERYDAY.faults))
    assert right["findings"] == {} and right["counts"]["of side streams"] > 50
    assert wrong["findings"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_no_race_is_found_and_each_fault_is(name, check):
    case = CASES[name]
    right = check(case)
    findings = {finding: count for rank in right for finding, count in rank["findings"].items()}
    found = [fault for fault in case.faults if any(rank["findings"] for rank in check(case, fault))]
    numbers = [
        right[0]["counts"].get(kind, 0)
        for kind in ("launches", "accesses", "of side streams", "of the host")
    ]
    print(
        f"| {' | '.join(map(str, (name, case.ranks, *numbers, len(findings), ', '.join(found))))} |"
    )
    assert findings == {}
    assert found == list(case.faults)
