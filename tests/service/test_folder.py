"""The folder of a service: who made its adapters, a full disk, a damaged file; and the key out of
sight.
"""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_qlora.service.adapter_store import moved_aside
from fsdp_qlora.service.command_reader import Base
from fsdp_qlora.service.commands import CreateModel, DropModel, SaveWeights
from fsdp_qlora.service.entries import AdapterSettings, ModelEntry, SessionEntry
from fsdp_qlora.service.messages import Limits
from fsdp_qlora.service.records import QueuedRequest, Records
from fsdp_qlora.service.scheduler import Scheduler
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import ROOT, flags
from tests.service.harness import KEY, STEP, ServedModel, Service, assert_equal, datums

MODEL = f"{'0' * 32}:train:0"
SESSION: SessionEntry = {"user_metadata": None, "display_name": None, "time": 0.0}
SETTINGS: AdapterSettings = {"rank": 2, "seed": 0, "train_attn": True, "train_mlp": True}
MODEL_ENTRY: ModelEntry = {"about": SETTINGS, "user_metadata": None, "time": 0.0}


def finished(command: list[Any], status: int, **place: Any) -> str:
    """What a process that ends with this status says of errors."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, **place)
    assert run.returncode == status and "Traceback" not in run.stderr, run.stderr
    return run.stderr


def ended(service: Service, *more: str) -> str:
    """What a start says that is refused."""
    return finished([*service._command, *more], 2, cwd=ROOT, env=service.environment)


@pytest.mark.slow
def test_another_alpha_is_refused_and_an_older_folder_taken_over(models, tmp_path):
    service = Service(models(), tmp_path / "folder", 1, api_key=KEY)
    try:
        words = [word for each in service.processes() for word in each.cmdline()]
        assert words and not any(KEY in word for word in words)
        client = service.trainer()
        client.forward_backward(datums(2), "cross_entropy")
        client.optim_step(STEP).result()
        saved = service.adapter(client, "before")
        folder = service.saved(client.save_state("state").result().path)
        service.kill()
        reason = ended(service, "--lora_alpha", "64")
        service.start()
        service.kill()
        generate = [sys.executable, "-m", "fsdp_qlora", "generate", folder]
        generate += flags(prompt="sky", max_new_tokens=2, device="cpu")
        # the base's place is noted in the service's folder
        finished(generate, 0, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert "lora_alpha" in reason and "32" in reason and "64" in reason
        assert "precision" in ended(service, "--precision", "bf16")
        assert "lora_target_modules" in ended(service, "--lora_target_modules", "q_proj,v_proj")
        # as 0.1 has written it
        with contextlib.closing(sqlite3.connect(service.folder / "service.db")) as file, file:
            [(about,)] = file.execute("SELECT about FROM entries WHERE kind = 'service'").fetchall()
            old = {"model": json.loads(about)["model"]}
            file.execute("UPDATE entries SET about = ? WHERE kind = 'service'", (json.dumps(old),))
        assert json.loads(about)["ways"]["linears"] == "lean"
        assert "other kernels" not in service.log.read_text()
        service.start()
        said = service.log.read_text()
        assert said.count("continues with other kernels: linears plain then, lean now.") == 1
        assert_equal(service.adapter(client, "after"), saved, 0)
    finally:
        service.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]).returncode
    ):
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, left: int) -> None:
    with (disk / "ballast").open("ab") as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free - left) > 0:
            file.write(b"x" * min(free, 2**16))
            file.flush()


@pytest.mark.slow
def test_a_full_disk_fails_requests_and_nothing_else(models, small_disk):
    service = Service(models(), small_disk / "folder", 1, save_every="2")
    try:
        model = ServedModel(service, seed=3)
        other = service.trainer(seed=4)
        model.train()
        model.step()
        fill(small_disk, 80_000)
        refused = model.save("a")
        assert "cannot be written" in refused["error"] and "--output_dir" not in refused["error"]
        # its state cannot be saved now
        assert "metrics" in model.step()
        fill(small_disk, 0)
        statuses = set()
        for _ in range(20):
            status, answer = service.create_session()
            statuses.add(status)
            assert status == 200 or "cannot be read or written" in answer["error"]
        assert 503 in statuses
        (small_disk / "ballast").unlink()
        assert service.process.poll() is None
        assert model.save("a")["path"].endswith("/weights/a")
        first = service.adapter(other, "end")
        second = service.saved(f"tinker://{model.name}/weights/a")
        assert first and second.is_dir()
        assert not [path for path in service.folder.rglob("*") if path.name.endswith(".writing")]
        assert "Traceback" not in service.log.read_text()
    finally:
        service.end()


def damaged(path: Path, how: str) -> None:
    """Damage a service's file."""
    content = path.read_bytes()
    if how == "zeros":
        path.write_bytes(content[:8192] + bytes(len(content) - 8192))
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "rubbish":
        path.write_bytes(b"no database" * 1000)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "schema":
        path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE pieces (id TEXT)")
    else:
        path.unlink()
        {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "gone": lambda: None}[how]()


@pytest.mark.quick
@pytest.mark.parametrize(
    "how", ["zeros", "cut", "rubbish", "empty", "schema", "folder", "pipe", "gone"]
)
def test_a_damaged_file_of_records_is_refused_in_one_sentence(tmp_path, how):
    records = Records(tmp_path)
    for number in range(200):
        records.add(request_of(number), b"x" * 500)
        records.sessions.put(str(number), SESSION)
    records._file.close()
    (tmp_path / MODEL.replace(":", "_") / "weights").mkdir(parents=True)
    damaged(tmp_path / "service.db", how)
    with pytest.raises(UserError, match=r"service\.db|cannot be used") as refusal:
        Records(tmp_path)
    assert "\n" not in str(refusal.value)


def request_of(number: int) -> QueuedRequest:
    return QueuedRequest(f"{MODEL}:{number}", MODEL, number, "optim_step")


def scheduler_of(folder: Path) -> Scheduler:
    """A scheduler that has room for one model."""
    base = Base(["base"], "base", Limits(10, 10, 10, 10))
    times = (0, 0.0)
    return Scheduler(Records(folder), folder, [base], max_rank=8, max_models=1, save_times=times)


@pytest.mark.quick
def test_what_is_written_together_is_written_or_not(tmp_path):
    records = Records(tmp_path)
    with pytest.raises(ZeroDivisionError), records.all_or_none():
        records.models.put("a", MODEL_ENTRY)
        records.finish([("b", "done", b"")])
        raise ZeroDivisionError
    assert records.models.get("a") is None


@pytest.mark.quick
def test_results_are_kept_by_count_and_by_bytes(tmp_path):
    records = Records(tmp_path)
    sampler = f"direct:{'0' * 32}"
    for number in range(10):
        records.add(QueuedRequest(str(number), sampler, number, "asample"), b"request")
        records.finish([(str(number), "done", b"x" * 100)])
    records.samplers.put(sampler, {"path": None, "time": 0.0})
    assert records.body("9") == b""  # not needed any more
    records.forget_old(8, 10**6)
    assert [number for number in range(10) if records.result(str(number))] == [*range(2, 10)]
    records.forget_old(8, 350)
    assert [number for number in range(10) if records.result(str(number))] == [7, 8, 9]
    records.forget_direct_samplers(1.0)
    assert records.samplers.get(sampler) is not None
    records.forget_old(0, 0)
    records.forget_direct_samplers(1.0)
    assert records.samplers.get(sampler) is None


@pytest.mark.quick
@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_replaced_as_a_whole_or_put_back(tmp_path, fails):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "old").write_text("")
    with contextlib.suppress(OSError), moved_aside(folder):
        if fails:
            raise OSError("the disk is full")
        folder.mkdir()
        (folder / "new").write_text("")
    assert [path.name for path in folder.iterdir()] == ["old" if fails else "new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.quick
def test_a_state_that_is_saved_is_not_saved_again_to_make_room(tmp_path):
    scheduler = scheduler_of(tmp_path)
    records = scheduler.records
    other = f"{'1' * 32}:train:0"
    request = {"session_id": other[:32], "model_seq_id": 0, "base_model": "base"}
    request |= {"lora_config": {"rank": 2}}
    queued = QueuedRequest(f"{other}:0", other, 0, "create_model")
    records.add(queued, json.dumps(request).encode())
    making_room = [DropModel, CreateModel]
    for live, kinds in ((4, making_room), (3, [SaveWeights, *making_room])):
        records.models.put(MODEL, MODEL_ENTRY | {"live": live})
        for number in range(5):
            records.add(request_of(number), b"{}")
            records.finish([(request_of(number).id, "done", b"")])
        scheduler.models.forget(other)
        scheduler.models.note_use(MODEL)
        assert [type(job.command) for job in scheduler._jobs_of(queued)] == kinds


@pytest.mark.quick
def test_requests_that_cannot_be_read_fail_one_at_a_time(tmp_path):
    scheduler = scheduler_of(tmp_path)
    records = scheduler.records
    records.sessions.put(MODEL[:32], SESSION)
    records.models.put(MODEL, MODEL_ENTRY)
    done: list[str] = []
    scheduler.results.on_done = done.append
    for number in range(3):
        scheduler.submit(request_of(number), b"\xff{")
    for count in (1, 2, 3):  # the ranks give a sign of life between two of them
        assert scheduler.take(0.0) is None and len(done) == count
    state, answer = scheduler.results.get(f"{MODEL}:2") or ("", b"")
    assert state == "failed" and b"error" in answer
