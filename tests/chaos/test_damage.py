"""Checkpoints that have changed on disk, other splits over ranks,
and runs that are not the same.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.mirror import open_store
from tests.chaos.conftest import Reference
from tests.chaos.harness import KILLED, Job, at_step, ended, finish, numbers, run, wait_for
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows

pytestmark = pytest.mark.slow

DIE_AT_8 = partial(at_step, 8, KILLED)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "truncate": truncate,
    "delete": Path.unlink,
}


@pytest.fixture(scope="module")
def stopped(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished run with the checkpoints of steps 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("stopped")
    run(reference.same_but(folder / "out"), folder / "logs", ANY, fault=DIE_AT_8)
    assert list(checkpoint.published(folder / "out" / "checkpoints")) == [4, 6, 8]
    return folder / "out"


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE, "state_00000.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_any_checkpoint_file_is_detected(name, damage, stopped, tmp_path):
    folder = tmp_path / "step_000008"
    shutil.copytree(stopped / "checkpoints" / "step_000008", folder)
    checkpoint.verify(folder)
    DAMAGES[damage](folder / name)
    with pytest.raises(checkpoint.DamagedCheckpoint, match=name):
        checkpoint.verify(folder)


def test_a_damaged_checkpoint_is_quarantined_and_the_previous_used(
    reference, stopped, assert_same, tmp_path
):
    shutil.copytree(stopped, tmp_path / "out")
    newest = tmp_path / "out" / "checkpoints" / "step_000008"
    flip(newest / "state_00000.safetensors")
    output = run(reference.same_but(tmp_path / "out"), tmp_path / "logs")
    assert "step_000008 is damaged (state_00000.safetensors has changed" in output
    assert "It is now step_000008.set_aside" in output and "Resuming at step 6 from" in output
    assert newest.with_name("step_000008.set_aside").is_dir()
    assert_same(tmp_path / "out")


def test_resuming_on_2_then_1_then_4_ranks_gives_the_same_run(reference, tmp_path):
    options = reference.same_but(tmp_path / "out")
    run(options, tmp_path / "logs2", ANY, fault=partial(at_step, 5, KILLED))
    run(options, tmp_path / "logs1", ANY, ranks=1, fault=partial(at_step, 7, KILLED))
    output = run(options, tmp_path / "logs4", ranks=4)
    assert "Resuming at step 6 from" in output
    assert ("The global batch stays at the 4 rows") in output and (
        "are 1 micro-batches per step"
    ) in output
    expected = numbers(reference.output_dir)
    found = numbers(tmp_path / "out")
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        # The rows of each step and their order: the numbers of tokens, exactly; the rest up to the
        # order of sums.
        assert {key: value for key, value in ours.items() if isinstance(value, int)} == {
            key: value for key, value in theirs.items() if isinstance(value, int)
        }
        assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = (
        torch.cat(
            [
                tensor.flatten()
                for _, tensor in sorted(load_file(folder / "adapter_model.safetensors").items())
            ]
        )
        for folder in (tmp_path / "out", reference.output_dir)
    )
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-6


def test_a_new_machine_starts_from_the_mirror_or_without_it(reference, assert_same, tmp_path):
    options = reference.same_but(tmp_path / "out", mirror=tmp_path / "mirror")
    with ended(Job(options, tmp_path / "logs0", fault=DIE_AT_8)) as job:
        wait_for(lambda: checkpoint.published(tmp_path / "mirror" / "checkpoints"))
        job.wait()
    for step in open_store(str(tmp_path / "mirror")).steps():
        checkpoint.verify(checkpoint.step_folder(tmp_path / "mirror" / "checkpoints", step))
    shutil.rmtree(tmp_path / "out")
    output = run(options, tmp_path / "logs1")
    assert "has none: the run resumes from the mirror's" in output and "Resuming at step " in output
    assert_same(tmp_path / "out")
    steps = [
        list(checkpoint.published(tmp_path / name / "checkpoints")) for name in ("out", "mirror")
    ]
    assert steps[0] == steps[1] and steps[0][-1] == 10
    # Of another run it is left alone, and where nothing can be written training continues.
    output = run(
        {**options, "output_dir": tmp_path / "other", "lr": 0.1}, tmp_path / "logs2", [2, 2]
    )
    assert "--lr was 0.001 and is 0.1" in output and not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("")
    output = run(
        {**options, "output_dir": tmp_path / "third", "mirror": tmp_path / "file"},
        tmp_path / "logs3",
    )
    assert output.count("has no copy of the last checkpoint") == 1
    assert_same(tmp_path / "third")


def test_other_options_model_or_rows_are_refused_by_name(reference, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "out")

    def snapshot() -> list[tuple[Path, int]]:
        paths = [path for path in (tmp_path / "out").rglob("*") if path.name != ".lock"]
        return sorted((path, path.stat().st_mtime_ns) for path in paths)

    before = snapshot()
    other_model = make_model(tmp_path / "model")
    weights = load_file(other_model / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other_model / "model.safetensors", metadata={"format": "pt"})
    cases: list[tuple[dict[str, object], list[str]]] = [
        (
            {"lr": 2e-3, "num_epochs": 3},
            ["--lr was 0.001 and is 0.002", "--num_epochs was 2 and is 3"],
        ),
        ({"batch_size": 2}, ["was 4 rows per step and is 8"]),
        (
            {"dataset": write_rows(tmp_path / "rows.jsonl", make_rows(21, seed=9))},
            ["the rows (--dataset, --eval_dataset) are not"],
        ),
        ({"model_name": other_model}, ["the base model's weights (--model_name) is not the same"]),
    ]
    for number, (changes, words) in enumerate(cases):
        for log in finish(
            reference.same_but(tmp_path / "out", **changes), tmp_path / f"logs{number}", [2, 2]
        ).logs:
            assert not [word for word in words if word not in log.read_text()], log.read_text()
    assert snapshot() == before


def test_a_finished_run_ends_at_once_and_earlier_checkpoints_continue(
    reference, stopped, assert_same, tmp_path
):
    shutil.copytree(stopped, tmp_path / "out")
    earlier = tmp_path / "out" / "checkpoints" / "step_000004"
    options = reference.same_but(tmp_path / "out")
    # In its own folder, what came later is set aside; in another folder the run continues as a new
    # one.
    for folder in (tmp_path / "out", tmp_path / "fork"):
        output = run(
            {**options, "output_dir": folder, "resume": earlier}, tmp_path / f"logs_{folder.name}"
        )
        assert "Resuming at step 4 from" in output
        assert_same(folder)
        earlier = stopped / "checkpoints" / "step_000004"
    assert (tmp_path / "out" / "checkpoints" / "step_000006.set_aside").is_dir()
    written = (tmp_path / "out" / "adapter_model.safetensors").stat().st_mtime_ns
    assert "This run is finished already: nothing to do." in run(options, tmp_path / "logs_again")
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_mtime_ns == written
    assert json.loads((tmp_path / "out" / "run.json").read_text())["run_id"]
