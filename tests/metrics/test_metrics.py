"""The sinks: what they write, and that none of them can stop or stall a run."""

import errno
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed import read_ranks
from fsdp_qlora.errors import UserError
from fsdp_qlora.metrics import metric_log as metrics
from fsdp_qlora.metrics import wandb_sink
from fsdp_qlora.metrics.metric_log import check_sinks, cut_metrics, open_metric_log
from fsdp_qlora.metrics.sinks import SinkOptions
from fsdp_qlora.planning.plan import make_plan

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No wandb key, settings, server or proxy of the machine the tests run on."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


def open_log(tmp_path: Path, *sinks: str, total_steps: int = 8, **more: object) -> metrics.MetricLog:
    is_rank_0 = bool(more.pop("is_rank_0", True))
    options = {
        "output_dir": tmp_path / "out",
        "total_steps": total_steps,
        "config": {"lr": 2e-4, "output_dir": Path("some/where"), "lora_target_modules": ("q_proj", "v_proj")},
        "project_name": "a_project",
        "name": "a_name",
        "group": "a_group",
        "entity": "an_entity",
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


# --- the record ----------------------------------------------------------------------------------------


def test_metrics_jsonl_is_always_written_and_holds_each_record_at_once(tmp_path, lines):
    log = open_log(tmp_path, "stdout")
    log.step(record(1))
    log.evaluation({"step": 1, "epoch": 0.125, "eval_loss": 1.25, "num_target_tokens": 1000})
    before_close = read_jsonl(tmp_path)
    log.close()
    assert before_close == [
        record(1),
        {"step": 1, "epoch": 0.125, "eval_loss": 1.25, "num_target_tokens": 1000},
    ]
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


def test_metrics_jsonl_is_appended_to_and_a_torn_last_line_is_cut(tmp_path):
    with open_log(tmp_path) as log:
        log.step(record(1))
    with (tmp_path / "out" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with open_log(tmp_path) as log:
        log.step(record(2))
    assert [written["step"] for written in read_jsonl(tmp_path)] == [1, 2]


def test_what_comes_after_a_checkpoint_is_cut_and_an_evaluation_that_it_does_not_know(tmp_path):
    with open_log(tmp_path) as log:
        log.evaluation({"step": 0, "eval_loss": 3.0})
        for step in range(1, 6):
            log.step(record(step))
            if step in (2, 4):
                log.evaluation({"step": step, "eval_loss": 1.0})
    (tmp_path / "out" / "metrics.jsonl").open("a").write('{"step": 6, "lo')
    for last_eval_step, expected in ((4, [0, 1, 2, 2, 3, 4, 4]), (2, [0, 1, 2, 2, 3, 4])):
        cut_metrics(tmp_path / "out", 4, last_eval_step)
        assert [one["step"] for one in read_jsonl(tmp_path)] == expected


def test_lines_that_a_full_disk_does_not_take_come_later_and_in_order(tmp_path, monkeypatch, lines):
    real_write, room = os.write, iter([1000, 7, -1, -1, 1000, 1000, 1000])

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
        "metrics.jsonl cannot be written (No space left on device). Its lines are kept, and written when there is room."
    ]


def test_ranks_other_than_0_write_and_print_nothing(tmp_path, lines, capfd):
    log = open_log(tmp_path, "tqdm", "stdout", "wandb", is_rank_0=False)
    for step in range(1, 5):
        log.step(record(step))
    log.evaluation({"step": 4, "eval_loss": 1.0})
    log.say("hello")
    log.summary({"loss": 1.0})
    log.close()
    assert not (tmp_path / "out").exists()
    assert lines == []
    assert capfd.readouterr() == ("", "")


# --- for people ----------------------------------------------------------------------------------------


def test_total_time_is_estimated_once_after_three_steps_without_the_first(tmp_path, lines):
    log = open_log(tmp_path, total_steps=103)
    for step in range(1, 7):
        log.step(record(step))
        assert len(lines) == (step >= 3)
    log.close()
    # 60 + 2 + 2 s have passed, 100 steps of 2 s are left
    assert lines[0].startswith("Estimated time: 0:04:24 in total, 0:03:20 to go (100 steps of 2.00 s")


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


def test_progress_bar_does_not_fill_a_log_file(tmp_path, capsys):
    log = open_log(tmp_path, "tqdm", total_steps=500)
    for step in range(1, 501):
        log.step(record(step))
    log.close()
    printed = capsys.readouterr().err
    assert "\r" not in printed
    assert len(printed.splitlines()) <= 3
    assert "500/500" in printed.splitlines()[-1] and "loss  0.0040" in printed.splitlines()[-1]


def test_progress_bar_of_a_resumed_run_starts_where_the_run_is(tmp_path, capsys):
    log = open_log(tmp_path, "tqdm", total_steps=500)
    log.step(record(401))
    log.close()
    assert "401/500" in capsys.readouterr().err.splitlines()[-1]


# --- what cannot work is said before anything starts ---------------------------------------------------


def test_unknown_sink_suggests_the_closest():
    (error,) = check_sinks(["tqdm", "wandbb"])
    assert "'wandbb'" in error and "Did you mean wandb?" in error and "tqdm, stdout, wandb, jsonl" in error
    assert check_sinks(["tqdm", "stdout", "wandb", "jsonl"]) == []


def test_missing_wandb_is_an_error_before_the_model_is_looked_for(tmp_path, monkeypatch):
    def find_nothing(name):
        raise wandb_sink.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wandb_sink.importlib.metadata, "version", find_nothing)
    config = TrainConfig(log_to=("wandb",), model_name=str(tmp_path / "no_model"))
    with pytest.raises(UserError, match=r"wandb is not installed.*pip install 'wandb>=0.31'"):
        make_plan(config, read_ranks())


def test_a_wandb_that_could_stall_training_is_refused(monkeypatch):
    monkeypatch.setattr(wandb_sink.importlib.metadata, "version", lambda name: "0.9.7rc1")
    (error,) = check_sinks(["wandb"])
    assert "wandb 0.9.7rc1 is installed and is too old" in error and "pip install 'wandb>=0.31'" in error
    assert check_sinks(["tqdm"]) == []


# --- wandb ---------------------------------------------------------------------------------------------


def read_wandb(tmp_path: Path) -> list:
    """The records of the one run in out/wandb: LevelDB's log format, after 7 bytes of header."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (tmp_path / "out" / "wandb").glob("*run-*/run-*.wandb")
    data, position, payload, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(payload))
            payload = b""
    return records


def test_offline_wandb_run_holds_config_records_and_summary_and_no_key(tmp_path, monkeypatch, lines):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with open_log(tmp_path, "wandb") as log:
        for step in range(1, 4):
            log.step(record(step))
        log.evaluation({"step": 3, "epoch": 0.375, "eval_loss": 1.25})
        log.summary({"final_loss": 0.5})
    records = read_wandb(tmp_path)

    (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_group, run.entity) == (
        "a_project",
        "a_name",
        "a_group",
        "an_entity",
    )
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    expected = {"lr": 2e-4, "output_dir": "some/where", "lora_target_modules": ["q_proj", "v_proj"]}
    assert {key: config[key] for key in expected} == expected

    history = [one.history for one in records if one.WhichOneof("record_type") == "history"]
    rows = [{(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in row.item} for row in history]
    assert [row["loss"] for row in rows] == [2.0, 1.0, 2.0 / 3]
    assert rows[2]["eval_loss"] == 1.25 and rows[2]["memory_gib/reserved/1"] == 2.5
    summary = [i for one in records for i in one.summary.update if (i.key or i.nested_key[0]) == "final_loss"]
    assert [json.loads(item.value_json) for item in summary] == [0.5]

    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert "wandb: offline (as asked by WANDB_MODE" in lines[0]
    assert Path(lines[0].split("wandb sync ")[1]).is_dir()


def test_a_run_left_by_an_exception_is_marked_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(KeyError), open_log(tmp_path, "wandb"):
        raise KeyError("a bug in training")
    exits = [one.exit for one in read_wandb(tmp_path) if one.WhichOneof("record_type") == "exit"]
    assert [one.exit_code for one in exits] == [1]


def test_every_start_of_a_run_goes_on_with_its_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for start in range(2):
        with open_log(tmp_path / str(start), "wandb", run_id="ab12cd34") as log:
            log.step(record(start + 1))
        (run,) = [one.run for one in read_wandb(tmp_path / str(start)) if one.WhichOneof("record_type") == "run"]
        assert run.run_id == "ab12cd34"


def test_disabled_wandb_makes_no_run(tmp_path, monkeypatch, lines):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with open_log(tmp_path, "wandb") as log:
        log.step(record(1))
    assert not (tmp_path / "out" / "wandb").exists()
    assert lines == ["wandb: disabled by WANDB_MODE."]


def test_without_a_key_wandb_goes_offline(tmp_path, lines):
    with open_log(tmp_path, "wandb") as log:
        log.step(record(1))
    assert "wandb: offline (no API key for api." in lines[0] and "wandb sync" in lines[0]
    assert any(one.WhichOneof("record_type") == "history" for one in read_wandb(tmp_path))


def test_without_a_network_wandb_goes_offline_at_once(tmp_path, monkeypatch, lines):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")  # nobody listens there any more
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1:{port}\n  login user\n  password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    begin = time.monotonic()
    with open_log(tmp_path, "wandb") as log:
        log.step(record(1))
    assert f"wandb: offline (no connection to 127.0.0.1:{port}" in lines[0] and "wandb sync" in lines[0]
    assert time.monotonic() - begin < 15


def test_the_proxy_is_what_has_to_be_in_reach_where_there_is_one(monkeypatch):
    class Settings:
        base_url = "https://api.wandb.ai"
        http_proxy = https_proxy = None

    assert wandb_sink._first_hop(Settings) == ("api.wandb.ai", 443)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy.local:3128")
    assert wandb_sink._first_hop(Settings) == ("proxy.local", 3128)
    monkeypatch.setenv("NO_PROXY", "api.wandb.ai")
    assert wandb_sink._first_hop(Settings) == ("api.wandb.ai", 443)


def test_a_server_that_never_answers_stalls_neither_the_start_nor_the_end(tmp_path):
    program = f"""
        import logging, sys
        from pathlib import Path
        from fsdp_qlora.metrics import metric_log as metrics
        from fsdp_qlora.metrics import wandb_sink
        from fsdp_qlora.metrics.sinks import SinkOptions
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        wandb_sink.WANDB_INIT_SECONDS = 1.0
        wandb_sink.WANDB_TEARDOWN_SECONDS = 1.0
        with metrics.open_metric_log(
            ["wandb"], SinkOptions(Path({str(tmp_path / "out")!r}), 1, {{}}, "p", None, None, None), is_rank_0=True
        ) as log:
            log.step({{"step": 1, "loss": 0.5}})
    """
    with socket.create_server(("127.0.0.1", 0)) as server:  # the backlog takes connections, nobody reads
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {
            **os.environ,
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": KEY,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=40,  # unbounded, wandb takes 101 s to start, and 20 s or more at the program's exit
        )
    assert done.returncode == 0, done.stderr
    assert "wandb: offline (Timed out initializing run" in done.stdout and "wandb sync" in done.stdout
    assert read_jsonl(tmp_path) == [{"step": 1, "loss": 0.5}]


class StandIn(BaseHTTPRequestHandler):
    """Just enough of a wandb server to start a run; it stops answering when told to."""

    is_dead = threading.Event()
    is_over = threading.Event()

    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        if self.is_dead.is_set():
            self.is_over.wait(60)
            return
        project = {"name": "p", "entity": {"name": "e"}}
        bucket = {"id": "i", "name": "n", "displayName": "d", "config": "{}", "project": project}
        data = {"upsertBucket": {"bucket": bucket, "inserted": True}} if b"upsertBucket" in request else {}
        answer = json.dumps({"data": data} if self.path == "/graphql" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_server_that_dies_during_the_run_neither_stalls_nor_stops_it(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(wandb_sink, "WANDB_FINISH_SECONDS", 2.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    log = open_log(tmp_path, "wandb", total_steps=3)
    assert lines == [f"wandb: http://127.0.0.1:{server.server_port}/e/p/runs/{lines[0].rsplit('/')[-1]}"]
    StandIn.is_dead.set()
    begin = time.monotonic()
    for step in range(1, 4):
        log.step(record(step))
    log.close()
    assert time.monotonic() - begin < 15
    StandIn.is_over.set()
    server.shutdown()
    server.server_close()
    assert "the run is not complete there" in lines[-1] and "wandb sync" in lines[-1]
    assert sum(one.WhichOneof("record_type") == "history" for one in read_wandb(tmp_path)) == 3
    assert len(read_jsonl(tmp_path)) == 3


def test_an_error_of_wandb_is_said_once_and_ends_the_sending(tmp_path, monkeypatch, lines):
    import wandb

    calls = []

    def fail(run, *_, **__):
        calls.append(run)
        raise ConnectionResetError("the wandb process is gone")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Run, "log", fail)
    log = open_log(tmp_path, "wandb", total_steps=3)
    for step in range(1, 4):
        log.step(record(step))
    log.close()
    problems = [line for line in lines if "the wandb process is gone" in line]
    assert len(problems) == 1 and "wandb sync" in problems[0]
    assert len(calls) == 1
    assert len(read_jsonl(tmp_path)) == 3


def test_a_wandb_that_hangs_does_not_hold_up_a_step(tmp_path, monkeypatch, lines):
    import wandb

    is_over = threading.Event()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Run, "log", lambda *_, **__: is_over.wait(60))
    monkeypatch.setattr(wandb_sink, "WANDB_QUEUE_RECORDS", 4)
    monkeypatch.setattr(wandb_sink, "WANDB_FINISH_SECONDS", 0.5)
    monkeypatch.setattr(wandb_sink, "WANDB_TEARDOWN_SECONDS", 2.0)
    begin = time.monotonic()
    log = open_log(tmp_path, "wandb", total_steps=20)
    for step in range(1, 21):
        log.step(record(step))
    log.close()
    assert time.monotonic() - begin < 20
    is_over.set()
    assert len([line for line in lines if "it has not taken the last 4 records" in line]) == 1
    assert len(read_jsonl(tmp_path)) == 20


def test_reasons_do_not_show_the_password_of_a_url():
    error = OSError("proxyconnect https://user:word@proxy.local:3128 refused.\nmore")
    assert wandb_sink._reason(error) == "proxyconnect https://***@proxy.local:3128 refused"
