"""Which kernels a run takes that continues one of other kernels, or of before they were chosen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.model.kernels.in_use import Ways
from fsdp_qlora.run.ways import describe_change
from fsdp_qlora.utils import run_files
from fsdp_qlora.utils.files import read_json, record_of, write_hashed_json, write_json
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok

PLAIN = Ways()._asdict()
ADAPTER = "adapter_model.safetensors"


def as_left(run: Path, other: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a run with its first checkpoint alone, as an earlier version left it.

    edit: changes the record of the run, which is in two files.
    """
    shutil.copytree(run, other)
    root = other / run_files.CHECKPOINTS
    first, last = checkpoint.published(root)
    checkpoint.remove(checkpoint.step_folder(root, last))
    folder = checkpoint.step_folder(root, first)
    staging = folder.rename(checkpoint.staging_folder(root, first))
    (staging / checkpoint.MANIFEST).unlink()
    state = read_json(staging / checkpoint.STATE)
    stored = read_json(other / run_files.RUN)
    for record in (state["about"], stored):
        edit(record)
    write_hashed_json(staging / checkpoint.STATE, state)
    files = {path.name: record_of(path) for path in staging.iterdir()}
    checkpoint.publish_checkpoint(staging, folder, files)
    write_json(other / run_files.RUN, stored)
    write_json(other / run_files.STATUS, {"state": "stopped", "saved_step": first})
    return other


def forget_kernels(record: dict[str, Any]) -> None:
    """As a version without --kernels left it."""
    assert record.pop("ways") == PLAIN and record["options"].pop("kernels") == "plain"


def test_a_run_of_before_continues_to_the_same_bytes_or_is_told(models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, make_rows(20))
    options = {"model_name": models(), "dataset": rows, "max_steps": 4, "save_every": 2}
    options |= {"gradient_accumulation_steps": 1, "eval_fraction": 0, "device": "cpu"}
    whole = tmp_path / "whole"
    train_ok(1, whole, kernels="plain", **options)
    same = as_left(whole, tmp_path / "same", forget_kernels)
    output = train_ok(1, same, kernels="plain", **options)
    assert "Resuming at step 2" in output and "other kernels" not in output
    assert (same / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    told = as_left(whole, tmp_path / "told", forget_kernels)
    output = train_ok(1, told, **options)
    assert output.count("continues with other kernels: linears plain then, lean now.") == 1
    assert read_json(told / run_files.RUN)["ways"] == PLAIN | {"linears": "lean"}


@pytest.mark.quick
def test_a_change_is_one_line_that_names_unknown_parts_too():
    lean = PLAIN | {"linears": "lean"}
    assert describe_change(lean, Ways(linears="lean"), "auto") == ""
    assert describe_change(lean | {"head": "fused"}, Ways(), "plain") == (
        "The run continues with other kernels: linears lean then, plain now; head fused then, "
        "plain now, as --kernels plain asks."
    )
    # A machine that cannot graph blocks says so, and goes on.
    assert describe_change(lean | {"blocks": "graphs"}, Ways(linears="lean"), "auto").startswith(
        "The run continues with other kernels: blocks graphs then, plain now. Results are as"
    )
