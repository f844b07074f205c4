"""Blocks of a run are captured on the stand-in, and train to the bits of the same run without."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.standin_memory import SETTINGS
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RUN
from stand_in.environment import run
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags
from tests.preferences.pairs import make_pairs
from tests.rollouts.runs import inputs

Case = Callable[[Models, Path], dict[str, Any]]
STOPPED = 3
ALLOCATIONS = ROOT / "stand_in/programs/allocations.py"
MEMORY = ROOT / "stand_in/programs/graph_memory.py"
PROGRAM = ROOT / "stand_in/programs/graphed_blocks.py"
OPTIONS: dict[str, Any] = {
    "train_type": "qlora",
    "precision": "bf16",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "recompute": "all",
    "context_length": 512,
    "quant_cache": "off",
    "log_to": "stdout",
    "kernels": "auto",
}


def trained(
    way: str,
    models: Models,
    folder: Path,
    *,
    ranks: int = 1,
    output: str = "",
    **options: Any,
) -> str:
    """The output of a run."""
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl", make_rows(32))
    own = {"model_name": models(), "dataset": folder / "rows.jsonl"}
    words = flags(**OPTIONS | own | options)
    settings: dict[str, object] = {"PHANTOM_VALUES": 1, "PHANTOM_CC": 90}
    out = flags(output_dir=folder / (output or way))
    arguments = [PROGRAM, way, folder / "notes", *words, *out]
    ended = run(arguments, folder / f"of_{way}", ranks=ranks, settings=settings)
    status = STOPPED if "max_hours" in options else 0
    assert [rank.status for rank in ended] == [status] * ranks, ended[0].output[-4000:]
    return ended[0].output


def assert_same_bits(plain: Path, graphs: Path) -> None:
    for entry in ("loss", "grad_norm"):
        assert read_metrics(plain, entry) == read_metrics(graphs, entry)
    adapter = load_file(graphs / "adapter_model.safetensors")
    for name, values in load_file(plain / "adapter_model.safetensors").items():
        assert torch.equal(values, adapter[name]), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_captured_blocks_train_to_the_same_bits(ranks: int, models: Models, tmp_path: Path) -> None:
    trained("plain", models, tmp_path, ranks=ranks)
    output = trained("graphs", models, tmp_path, ranks=ranks)
    assert "Graphs: not" not in output
    # A process of its own and each rank have captured a block, and its bits were right.
    assert re.search(r"not graphs \(blocks\): [\d.]+ -> [\d.]+ ms", output)
    assert_same_bits(tmp_path / "plain", tmp_path / "graphs")
    for rank in range(ranks):
        filled = json.loads((tmp_path / f"notes.{rank}").read_text())
        # Documents have other lengths in each micro-batch, and yet share graphs: two of the trial,
        # and two of the run.
        assert len(filled) <= 4 and sum(filled) > 2 * 2 * 2 * 4


def of_mxfp4(models: Models, folder: Path) -> dict[str, Any]:
    return {"quant_type": "mxfp4"}


def of_int8(models: Models, folder: Path) -> dict[str, Any]:
    return {"train_type": "int8_lora", "int8_threshold": 0}


def of_hqq(models: Models, folder: Path) -> dict[str, Any]:
    return {"train_type": "hqq_lora"}


def of_pairs(models: Models, folder: Path) -> dict[str, Any]:
    write_rows(folder / "rows.jsonl", make_pairs(32))
    return {"objective": "dpo"}


def of_answers(models: Models, folder: Path) -> dict[str, Any]:
    options = inputs(models, folder, prompts=16, beta=0.1, batch_size=4)
    own = ("objective", "rewards", "num_generations", "max_completion_length", "beta")
    return {name: options[name] for name in (*own, "batch_size", "context_length")}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (of_mxfp4, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((of_int8, 1), (of_hqq, 1), (of_pairs, 2), (of_answers, 2))
        ),
    ],
)
def test_captured_blocks_of_other_runs_train_to_the_same_bits(
    case: Case, ranks: int, models: Models, tmp_path: Path
) -> None:
    options = case(models, tmp_path)
    trained("plain", models, tmp_path, ranks=ranks, **options)
    output = trained("graphs", models, tmp_path, ranks=ranks, **options)
    assert "Graphs: not" not in output
    assert re.search(r"not graphs \((answers, )?blocks\): [\d.]+ -> [\d.]+ ms", output)
    assert_same_bits(tmp_path / "plain", tmp_path / "graphs")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train_type": "int8_lora"}, "outliers of LLM.int8, which the host counts"),
        ({"context_parallel_size": 2}, "context parallelism"),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each,
)
def test_a_run_says_once_why_its_blocks_have_no_graphs(
    options: dict[str, Any], reason: str, models: Models, tmp_path: Path
) -> None:
    ranks = options.get("context_parallel_size", 1)
    output = trained("chosen", models, tmp_path, ranks=ranks, max_steps=1, **options)
    said = re.findall(r"^Graphs: .*", output, re.MULTILINE)
    assert said == [f"Graphs: not for blocks: {reason}"]
    assert "graphs (blocks)" not in output


def test_a_block_that_asks_the_device_trains_on_without(models: Models, tmp_path: Path) -> None:
    trained("plain", models, tmp_path)
    output = trained("reads", models, tmp_path)
    [line] = re.findall(r"^Graphs: not for .*", output, re.MULTILINE)
    assert "LlamaDecoderLayer" in line and "not permitted when stream is capturing" in line
    # nor in the rank's trial
    assert re.search(r"not graphs \(blocks\): (?!\d)", output)
    assert_same_bits(tmp_path / "plain", tmp_path / "reads")


@pytest.mark.slow
def test_graphs_of_a_run_are_taken_again_when_it_continues(models: Models, tmp_path: Path) -> None:
    trained("chosen", models, tmp_path, output="whole")
    output = trained("chosen", models, tmp_path, max_hours=1e-7)
    assert re.search(r"blocks graphs \([\d.]+ -> [\d.]+ ms\)", output)
    assert read_json(tmp_path / "chosen" / RUN)["ways"]["blocks"] == "graphs"
    output = trained("chosen", models, tmp_path)
    assert "Resuming at step 1" in output and "other kernels" not in output
    assert_same_bits(tmp_path / "whole", tmp_path / "chosen")


def memory_of_graphs(folder: Path, *words: object, capability: int = 86) -> dict[str, Any]:
    """What graphs take, and what is planned."""
    settings = SETTINGS | {"PHANTOM_GIB": 80, "PHANTOM_CC": capability}
    [ended] = run([MEMORY, *words], folder, settings=settings)
    assert ended.status == 0, ended.output[-4000:]
    found: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    assert found["reasons"] == []
    return found


@pytest.mark.parametrize(("rows", "lengths", "capability"), [(2, 1, 86), (2, 3, 86), (4, 3, 90)])
def test_graphs_take_the_memory_that_is_planned_for_them(
    rows: int, lengths: int, capability: int, tmp_path: Path
) -> None:
    found = memory_of_graphs(tmp_path, rows, lengths, capability=capability)
    assert found["lengths"] == lengths
    for name in ("static", "pool", "workspaces", "reserved"):
        taken, planned = found[name]
        assert planned == pytest.approx(taken, rel=0.02), name
    taken, planned = found["arguments"]
    assert taken <= planned


def test_graphs_of_faster_kernels_take_no_more_than_planned(tmp_path: Path) -> None:
    found = memory_of_graphs(tmp_path, 2, 3, "chosen")
    for name in ("pool", "reserved"):
        taken, planned = found[name]
        assert taken <= planned, name


def test_planned_allocations_reserve_what_those_of_torch_do(tmp_path: Path) -> None:
    [ended] = run([ALLOCATIONS], tmp_path, settings=SETTINGS)
    assert ended.status == 0, ended.output[-4000:]
    reserved, planned = json.loads(ended.output.splitlines()[-1])
    assert len(reserved) == 6 and reserved == planned
