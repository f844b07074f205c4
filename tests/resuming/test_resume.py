"""Where a run begins, as decided from what is in its folder."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from fsdp_qlora.checkpoint import checkpoint, resume
from fsdp_qlora.checkpoint.mirror import open_store
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.resume import RunFolder
from fsdp_qlora.checkpoint.run_folder import FACTS, StartRequest
from fsdp_qlora.checkpoint.start import Start
from fsdp_qlora.checkpoint.train_state import TrainState
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.distributed.shards import build_mesh
from fsdp_qlora.distributed.supervision import exits
from fsdp_qlora.distributed.supervision.presence import Presence
from fsdp_qlora.distributed.supervision.stops import Signals
from fsdp_qlora.run.session import SupervisedSession
from fsdp_qlora.run.supervision import RunSupervisor
from fsdp_qlora.utils import run_files
from fsdp_qlora.utils.errors import RunStopped, UserError
from fsdp_qlora.utils.files import read_json, write_hashed_json, write_json
from fsdp_qlora.utils.safetensors_files import TensorForm, write_tensors
from tests.resuming import test_train_state

OPTIONS = {"lr": 0.1, "batch_size": 1, "gradient_accumulation_steps": 1}
ABOUT: dict[str, Any] = {"options": OPTIONS, "facts": dict.fromkeys(FACTS, "x")}
ABOUT |= {"world_size": 1, "global_batch_size": 1, "versions": {"torch": "2.13.0"}}
TENSORS = "state_00000.safetensors"
ROWS = {"kind": "rows", "dtype": "F32", "dims": [3]}
DESCRIPTION: dict[str, Any] = {
    "files": 1,
    "is_sharded": False,
    "shapes": {"w": [2, 3]},
    "layout": {"w": {"parameter": ROWS, "exp_avg": ROWS}},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no process group to tell."""
    monkeypatch.setattr(resume, "all_gather_strings", lambda text, device: [text])


def add_step(run: Path, step: int, run_id: str) -> Path:
    root = run / run_files.CHECKPOINTS
    staging = checkpoint.staging_folder(root, step)
    staging.mkdir(parents=True)
    forms = {name: TensorForm(torch.float32, (2, 3)) for name in ("w/parameter", "w/exp_avg")}
    files = {TENSORS: write_tensors(staging / TENSORS, forms, [torch.zeros(2, 3)] * 2)}
    state = {
        "about": {**ABOUT, "run_id": run_id},
        "progress": {"step": step},
        "tensors": DESCRIPTION,
    }
    files[checkpoint.STATE] = write_hashed_json(staging / checkpoint.STATE, state)
    checkpoint.publish_checkpoint(staging, checkpoint.step_folder(root, step), files)
    return checkpoint.step_folder(root, step)


def begin(
    out: Path, *, resume_from: str | Path = "auto", unattended: bool = False, **options: Any
) -> Start:
    """Decide as a start does, and leave what it leaves when it is killed in its first step."""
    mirror = options.pop("mirror", None)
    request = StartRequest(OPTIONS, resume=str(resume_from), is_unattended=unattended, **options)
    folder = RunFolder(out, read_ranks(), request, mirror)
    start = folder.choose_start(ABOUT)
    folder.prepare({}, {**ABOUT, "run_id": start.run_id}, keep_run=not start.is_new)
    status = {
        "state": "running",
        "start_step": start.step,
        "deaths": start.failed_starts,
        "seconds": start.used_seconds + 60,
    }
    write_json(out / run_files.STATUS, status)
    return start


def test_a_restart_continues_and_does_not_repeat_an_explicit_resume(tmp_path):
    out = tmp_path / "out"
    other = add_step(tmp_path / "other", 5, "other")
    first = begin(out, resume_from=other)
    again = begin(out, resume_from=other, unattended=True)  # it has no checkpoint of its own yet
    assert (first.step, again.step, again.folder) == (5, 5, str(other))
    assert again.run_id == first.run_id != "other" and again.failed_starts == 1
    add_step(out, 7, first.run_id)
    assert begin(out, resume_from=other, unattended=True).step == 7
    # a person asks for it
    assert begin(out, resume_from=other).run_id not in (first.run_id, "other")


def test_a_restart_does_not_go_back_to_the_explicit_checkpoint(tmp_path):
    out = tmp_path / "out"
    root = tmp_path / "out" / run_files.CHECKPOINTS
    run_id = begin(out).run_id
    earlier, _ = [add_step(out, step, run_id) for step in (1, 2)]
    first = begin(out, resume_from=earlier, unattended=True)
    # nobody has followed it yet; the budget is the run's
    assert (first.step, first.used_seconds) == (1, 60)
    add_step(out, 3, run_id)
    checkpoint.remove(earlier)
    assert begin(out, resume_from=earlier, unattended=True).step == 3
    assert list(checkpoint.published(root)) == [3]
    new = begin(out, resume_from="off", unattended=True, overwrite=True)
    assert new.step == 0 and new.run_id != run_id and not root.exists()
    add_step(out, 4, new.run_id)
    again = begin(out, resume_from="off", unattended=True, overwrite=True)
    assert (again.step, again.run_id, list(checkpoint.published(root))) == (4, new.run_id, [4])


def test_a_folder_behind_its_mirror_fetches_the_newest_checkpoint(tmp_path):
    box = tmp_path / "other_box"
    out = tmp_path / "out"
    mirror = open_store(str(tmp_path / "mirror"))
    run_id = begin(out, mirror=mirror).run_id
    add_step(out, 10, run_id)
    mirror.update(out)
    assert begin(box, mirror=mirror).step == 10
    for step in (20, 30):
        add_step(box, step, run_id)
        mirror.update(box)
    mirror.update(out)  # by a start that could not reach the mirror when it began
    assert mirror.steps() == [10, 20, 30]
    newest = (
        checkpoint.step_folder(tmp_path / "mirror" / run_files.CHECKPOINTS, 30) / checkpoint.STATE
    )
    content = newest.read_bytes()
    newest.write_bytes(b"x" * len(content))  # a damaged copy is passed over
    assert begin(out, mirror=mirror).step == 20
    newest.write_bytes(content)
    assert begin(out, mirror=mirror).step == 30
    # Only who asks for an earlier one gives up what came later.
    earlier = checkpoint.step_folder(out / run_files.CHECKPOINTS, 20)
    assert begin(out, resume_from=earlier, mirror=mirror).step == 20
    assert mirror.steps() == [10, 20]


def test_restarts_remember_how_many_blocks_recomputed_at_out_of_memory(tmp_path):
    out = tmp_path / "out"
    run_id = begin(out).run_id
    found = []
    ends = [
        {"recompute": 3, "state": "out_of_memory"},
        {"recompute": 6},
        {"state": "out_of_memory"},
    ]
    for step, end in enumerate(ends, start=1):
        status = read_json(out / run_files.STATUS)
        add_step(out, step, run_id)
        write_json(out / run_files.STATUS, {**status, "too_few": found[-1] if found else 0, **end})
        start = begin(out)
        found.append(start.too_few)
        assert start.failed_starts == 0
    assert found == [3, 3, 3]  # the last one did not come to a step
    write_json(out / run_files.STATUS, {"state": "out_of_memory", "start_step": 3, "recompute": 6})
    start = begin(out)
    assert (start.too_few, start.failed_starts) == (6, 1)


def test_a_mirror_with_damaged_checkpoints_does_not_start_at_step_0(tmp_path):
    out = tmp_path / "out"
    mirror = open_store(str(tmp_path / "mirror"))
    folder = add_step(out, 10, begin(out, mirror=mirror).run_id)
    (folder / checkpoint.STATE).write_text("{}")
    mirror.update(out)
    with pytest.raises(UserError, match=r"No checkpoint on the mirror .* passes verification"):
        begin(tmp_path / "box", mirror=mirror)
    assert not (tmp_path / "box" / "run.json").exists() and mirror.steps() == [10]


def supervisor_of(out: Path) -> RunSupervisor:
    """Of a start that is about to load the model."""
    folder = RunFolder(out, read_ranks(), StartRequest(OPTIONS, is_unattended=True))
    return RunSupervisor(
        TrainConfig(output_dir=str(out)),
        folder,
        folder.choose_start(ABOUT),
        SupervisedSession(
            read_ranks(),
            HashStore(),
            presence=Presence(HashStore(), read_ranks(), hang_minutes=15),
            signals=Signals(),
            started=0.0,
        ),
        memory_settings="",
    )


def test_starts_killed_while_the_model_loads_make_no_progress(tmp_path):
    out = tmp_path / "out"
    add_step(out, 3, begin(out).run_id)
    kept = []  # a context that is never left, as after SIGKILL
    for _ in range(3):
        kept.append(supervisor_of(out).loading())
        kept[-1].__enter__()
    with pytest.raises(
        RunStopped, match="restarted 2 times without progress: each start from step 3"
    ) as stopped:
        supervisor_of(out)
    assert (
        stopped.value.ending.exit_code == 4
        and read_json(out / run_files.STATUS)["state"] == "no_progress"
    )


def as_torch_does() -> None:
    """Turn an error of a tensor's dispatch into another, as DTensor's does."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception as error:
        raise RuntimeError(f"{error}\n\nSharding propagation failed") from error


def as_gloo_does() -> None:
    """Fail as a collective does whose other rank was ended by the same signal, a moment sooner."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
        )


@pytest.mark.parametrize(
    "happens", [partial(signal.raise_signal, signal.SIGTERM), as_torch_does, as_gloo_does]
)
def test_preemption_during_loading_is_not_counted_as_a_failure(happens, tmp_path):
    out = tmp_path / "out"
    before = signal.getsignal(signal.SIGTERM)
    add_step(out, 3, begin(out).run_id)
    for place in ("load", "prepare", "load", "prepare"):
        supervisor = supervisor_of(out)
        begun = exits.aborting_others(supervisor.presence), supervisor.control.signals.handled()
        with (
            pytest.raises(RunStopped, match="before training began") as stopped,
            begun[0],
            begun[1],
        ):
            with supervisor.loading():
                if place == "load":
                    happens()
            happens()
        assert stopped.value.ending.exit_code == 75 and signal.getsignal(signal.SIGTERM) == before
    assert read_json(out / run_files.STATUS)["state"] == "preempted" and begin(out).step == 3


# --- checkpoints of other releases ---

# saved after two steps; what the third gives is beside it
FORMAT_1 = Path(__file__).with_name("format_1")


@pytest.fixture
def saved_before(tmp_path: Path) -> Path:
    folder: Path = shutil.copytree(FORMAT_1 / "step_000002", tmp_path / "saved" / "step_000002")
    return folder


def test_a_checkpoint_of_format_1_resumes_to_the_same_bits(
    saved_before, tmp_path, monkeypatch, lines
):
    start = begin(tmp_path / "out", resume_from=saved_before)
    assert (start.step, Progress.from_dict(start.progress).num_tokens) == (2, 100)
    assert (
        "It was saved by other versions, which may change the numbers: torch 2.0.0 then"
    ) in lines[-1]
    monkeypatch.setattr(test_train_state, "SHAPES", {"lora_A": (2, 3), "lora_B": (4, 2)})
    ranks = read_ranks()
    start_process_group(ranks, HashStore())
    try:
        mesh = build_mesh(ranks, sharding_strategy="full_shard")
        model, optimizer = test_train_state.make_model("adamw", mesh)
        TrainState(model, optimizer, mesh, ranks, is_large=False).load(
            Path(str(start.folder)), start.tensors
        )
        test_train_state.step(model, optimizer, 2)
        found = test_train_state.result_of(model)
    finally:
        stop_process_group()
    torch.testing.assert_close(
        found, load_file(FORMAT_1 / "after_step_3.safetensors")["result"], rtol=1e-6, atol=1e-7
    )


def test_a_later_checkpoint_format_is_refused_and_kept(saved_before, tmp_path):
    manifest = json.loads((saved_before / checkpoint.MANIFEST).read_text()) | {"format": 2}
    del manifest["sha256"]
    manifest["sha256"] = checkpoint._manifest_hash(manifest)
    (saved_before / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        UserError,
        match=r"step_000002 has checkpoint format 2, and this version .* reads 1",
    ):
        begin(tmp_path / "out", resume_from=saved_before.parent)
    assert saved_before.is_dir()
