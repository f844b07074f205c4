"""The sinks: what they write, and that no sink can stop or stall a run."""

import errno
import importlib.metadata
import json
import os
from pathlib import Path

import numpy as np
import pytest

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.observability import metric_log as metrics
from fsdp_qlora.observability.metric_log import cut_metrics, open_metric_log
from fsdp_qlora.observability.sinks import SinkOptions, named_numbers
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.utils.errors import UserError


def open_log(
    tmp_path: Path, *sinks: str, total_steps: int = 8, **more: object
) -> metrics.MetricLog:
    is_rank_0 = bool(more.pop("is_rank_0", True))
    options = {
        "output_dir": tmp_path / "out",
        "total_steps": total_steps,
        "config": {
            "lr": 2e-4,
            "output_dir": Path("some/where"),
            "lora_target_modules": ("q_proj", "v_proj"),
        },
    }
    return open_metric_log(sinks, SinkOptions(**{**options, **more}), is_rank_0=is_rank_0)  # type: ignore[arg-type]


def record(step: int, **values: object) -> dict[str, object]:
    return {
        "step": step,
        "epoch": step / 8,
        "loss": 2.0 / step,
        "grad_norm": 0.5,
        "lr": 2e-4,
        "num_target_tokens": 100,
        "num_tokens": 200,
        "tokens_per_second": 1234.5,
        "step_seconds": 60.0 if step == 1 else 2.0,
        "memory_gib": {"allocated": [1.0, 2.0], "reserved": [1.5, 2.5]},
        **values,
    }


def read_jsonl(tmp_path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# --- the record
# ----------------------------------------------------------------------------------------


def test_metrics_jsonl_is_always_written_and_holds_each_record_at_once(tmp_path, lines):
    log = open_log(tmp_path, "stdout")
    log.step(record(1))
    evaluation = {"step": 1, "epoch": 0.125, "eval_loss": 1.25, "num_target_tokens": 1000}
    log.evaluation(evaluation)
    before_close = read_jsonl(tmp_path)
    log.close()
    assert before_close == [record(1), evaluation]
    assert lines == ["step 1  epoch 0.12  eval_loss 1.2500  1,000 target tokens"]


def test_metrics_jsonl_has_null_for_numbers_that_json_does_not_have(tmp_path):
    log = open_log(tmp_path)
    values = {
        "loss": float("nan"),
        "grad_norm": np.float32("inf"),
        "lr": np.float64(0.25),
        "num_tokens": np.int64(7),
    }
    log.step(record(1, **values, memory_gib=[np.float32(1.5), float("-inf")]))
    log.close()
    (written,) = read_jsonl(tmp_path)
    assert {key: written[key] for key in values} == {
        "loss": None,
        "grad_norm": None,
        "lr": 0.25,
        "num_tokens": 7,
    }
    assert written["memory_gib"] == [1.5, None]


def test_resume_cuts_damaged_lines_and_steps_after_the_checkpoint(tmp_path, lines):
    bad = [
        b"\0\0\0",
        b"",
        b"{}",
        b'{"loss": 1.0}',
        b'\xff{"step": 2}',
        b"[1]",
        b'{"step": "2"}',
        b"step",
        b"[" * 5000,
    ]
    with open_log(tmp_path) as log:
        log.evaluation({"step": 0, "eval_loss": 3.0})
        for step in range(1, 6):
            log.step(record(step))
            if step in (2, 4):
                log.evaluation({"step": step, "eval_loss": 1.0})
    path = tmp_path / "out" / "metrics.jsonl"
    whole = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*whole[:2], *bad, *whole[2:], b'{"step": 6, "lo']))
    for last_eval_step, kept in ((4, whole[:7]), (2, whole[:6])):  # the second finds no damage
        cut_metrics(tmp_path / "out", 4, last_eval_step)
        assert path.read_bytes().splitlines() == kept
    with open_log(tmp_path) as log:  # it goes on behind them
        log.step(record(5))
    assert [one["step"] for one in read_jsonl(tmp_path)] == [0, 1, 2, 2, 3, 4, 5]
    assert lines.count("metrics.jsonl: 9 damaged line(s) were removed.") == 1


def test_lines_that_a_full_disk_does_not_take_come_later_and_in_order(tmp_path, monkeypatch, lines):
    real_write = os.write
    room = iter([1000, 7, -1, -1, 1000, 1000, 1000])

    def write(descriptor: int, content: bytes) -> int:
        most = next(room)
        if most < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, content[:most])

    with open_log(tmp_path) as log, monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for step in range(1, 5):
            log.step(record(step))
    assert [one["step"] for one in read_jsonl(tmp_path)] == [1, 2, 3, 4]
    assert [line for line in lines if "metrics.jsonl" in line] == [
        "metrics.jsonl cannot be written (No space left on device). Its lines are held and "
        "written when possible."
    ]


def test_ranks_other_than_0_write_and_print_nothing(tmp_path, lines, capfd):
    log = open_log(tmp_path, "tqdm", "stdout", "wandb", is_rank_0=False)
    for step in range(1, 5):
        log.step(record(step))
    log.evaluation({"step": 4, "eval_loss": 1.0})
    log.summary({"loss": 1.0})
    log.close()
    assert not (tmp_path / "out").exists()
    assert lines == []
    assert capfd.readouterr() == ("", "")


# --- for people
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_seconds", "said"),
    [
        (
            0.0,
            "0:05:10 in total, 0:03:50 left (100 steps of 2.00 s, 3 evaluations of 10 s; without "
            "saving).",
        ),
        # Saves after steps 40, 80 and 103, and one after two minutes.
        (
            6.0,
            "0:05:34 in total, 0:04:14 left (100 steps of 2.00 s, 3 evaluations of 10 s, 4 saves "
            "of 6.0 s).",
        ),
    ],
)
def test_total_time_counts_steps_evaluations_and_saves(
    save_seconds, said, tmp_path, lines, monkeypatch
):
    now = iter([0.0, 70.0, 80.0])  # opened, after the first step of 60 s, when it is said
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    log = open_log(tmp_path, total_steps=103, config={"eval_steps": 50, "save_every": ["40", "2m"]})
    log.save_seconds = save_seconds
    log.evaluation({"step": 0, "eval_loss": 1.0})
    for step in range(1, 7):
        log.step(record(step))
        assert len(lines) == 1 + (step >= 3)
    log.close()
    # 80 s have passed, 100 steps of 2 s are left, and evaluations of 10 s after steps 50, 100 and
    # 103
    assert lines[1] == f"Estimated time: {said}"


def test_stdout_has_one_aligned_line_per_step(tmp_path, capsys):
    log = open_log(tmp_path, "stdout", total_steps=1000)
    for step, loss in ((9, 2.5), (10, 12.25), (11, float("nan"))):
        log.step(record(step, loss=loss, tokens_per_second=10.0**step))
    log.close()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  epoch")[0] for line in printed] == [
        "step    9/1000",
        "step   10/1000",
        "step   11/1000",
    ]
    assert len({line.index("grad_norm") for line in printed}) == 1
    assert "loss 12.2500" in printed[1] and "2.50 GiB" in printed[1]
    assert printed[1].endswith("ETA 0:33:00")  # 990 steps of 2 s


@pytest.mark.parametrize("first", [1, 401])
def test_progress_bar_does_not_fill_a_log_file_and_starts_where_the_run_is(first, tmp_path, capsys):
    with open_log(tmp_path, "tqdm", total_steps=500) as log:
        for step in range(first, 403):
            log.step(record(step))
    printed = capsys.readouterr().err
    assert "\r" not in printed and len(printed.splitlines()) <= 3
    assert "402/500" in printed.splitlines()[-1] and "loss 0.0050" in printed.splitlines()[-1]


# --- read back by their own readers
# --------------------------------------------------------------------


def log_in_three_starts(tmp_path: Path, sink: str) -> dict[tuple[str, int], float]:
    """Steps 1 to 9, killed after 6 and resumed from 4, the first two without the sink; (name, step)
    -> what is due.
    """
    run = {"run_id": "0123456789", "total_steps": 9}
    with open_log(tmp_path, "jsonl", **run) as log:
        log.evaluation({"step": 0, "epoch": 0.0, "eval_loss": 3.0})
        for step in (1, 2):
            log.step(record(step))
    killed = open_log(tmp_path, sink, "jsonl", **run)
    for step in range(3, 7):
        killed.step(record(step))
    killed.close(exit_code=1)
    cut_metrics(tmp_path / "out", 4, 0)
    with open_log(tmp_path, sink, "jsonl", **run) as log:
        for step in range(5, 10):
            log.step(record(step))
        log.evaluation({"step": 9, "epoch": 1.0, "eval_loss": 1.0 / 3})
    rows = [(row["step"], named_numbers(row).items()) for row in read_jsonl(tmp_path)]
    return {
        (name, step): number
        for step, numbers in rows
        for name, number in numbers
        if not name.endswith("step")
    }


def test_tensorboard_reads_what_metrics_jsonl_has(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    due = log_in_three_starts(tmp_path, "tensorboard")
    reader = accumulator.EventAccumulator(
        str(tmp_path / "out" / "tensorboard"), size_guidance={"scalars": 0}
    )
    reader.Reload()
    found = [
        (name, event.step, event.value)
        for name in reader.Tags()["scalars"]
        for event in reader.Scalars(name)
    ]
    assert len(found) == len(due)
    assert {(name, step): value for name, step, value in found} == {
        key: np.float32(value) for key, value in due.items()
    }


def test_trackio_has_the_numbers_of_starts_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    run = {"run_id": "0123456789", "config": {"log_to": ("trackio", "project=mine"), "lr": 2e-4}}
    for first in (1, 3):
        with open_log(tmp_path, "trackio", "jsonl", **run) as log:
            log.step(record(first))
            log.step(record(first + 1))
    rows = storage.get_logs("mine", "0123456789")
    assert [(row["step"], row["loss"]) for row in rows] == [(n, 2.0 / n) for n in (1, 2, 3, 4)]
    assert all(row["memory_gib/reserved/1"] == 2.5 for row in rows)


def test_trackio_has_two_runs_of_one_name_and_no_entity(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    words = ("trackio", "wandb", "project=named", "name=mine", "entity=team")
    for folder, first, is_continued in (("a", 1, False), ("b", 1, False), ("b", 2, True)):
        run = {"run_id": folder, "config": {"log_to": words}, "is_continued": is_continued}
        (tmp_path / folder).mkdir(exist_ok=True)
        with open_log(tmp_path / folder, "trackio", "jsonl", **run) as log:
            log.step(record(first))
    runs = storage.get_run_records("named")
    steps = [
        [row["step"] for row in storage.get_logs("named", each["name"], run_id=each["id"])]
        for each in runs
    ]
    assert sorted(steps) == [[1], [1, 2]]


def test_a_sink_that_fails_says_so_once_and_stops_nothing(tmp_path, lines):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tensorboard").write_text("a file in the place of the folder")
    with open_log(tmp_path, "tensorboard", "jsonl") as log:
        for step in (1, 2):
            log.step(record(step))
        log.flush()
    assert len(lines) == 1 and lines[0].startswith("tensorboard: the run there is incomplete (")
    assert len(read_jsonl(tmp_path)) == 2


# --- what cannot work is said before anything starts
# ---------------------------------------------------


@pytest.mark.parametrize(
    ("sink", "wandb", "said"),
    [
        ("wandb", None, r"wandb is not installed\. Run `pip install 'wandb>=0\.31'`"),
        (
            "wandb",
            "0.9.7rc1",
            r"wandb 0\.9\.7rc1 is installed and is too old.*pip install 'wandb>=0\.31'",
        ),
        (
            "tensorboard",
            None,
            "tensorboard is not installed. Run `pip install tensorboard`, or take it out",
        ),
    ],
)
def test_a_missing_or_old_package_is_an_error_before_the_model(
    sink, wandb, said, tmp_path, monkeypatch
):
    def version(name: str) -> str:
        if wandb is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return wandb

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TrainConfig(log_to=(sink,), model_name=str(tmp_path / "no_model"))
    with pytest.raises(UserError, match=f"log_to: {said}"):
        prepare_run(config, read_ranks(), None)
