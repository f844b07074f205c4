"""wandb: an offline run keeps all numbers, and no trouble stalls a run.

Each night against a stand-in server: numbers arrive once, also in resumed runs and after outages.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_qlora.observability import sinks
from fsdp_qlora.observability.metric_log import MetricLog, cut_metrics, open_metric_log
from fsdp_qlora.observability.sinks import SinkOptions, WandbSink, reason
from fsdp_qlora.utils.records import numbers_in
from tests.chaos.harness import Job, ended, steps_done, wait_for
from tests.chaos.wandb_server import Run, WandbServer
from tests.helpers.metrics import metrics_of
from tests.helpers.run import ROOT

KEY = "0123456789abcdef0123456789abcdef01234567"
HANG_SECONDS = 600  # protects these tests against a hang; nothing is measured


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No wandb key, settings or proxy of the machine that the tests run on."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))


@pytest.fixture
def server(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield server
    server.stop()
    assert server.errors == []


def open_log(output_dir: Path) -> MetricLog:
    return open_metric_log(
        ["wandb"],
        SinkOptions(
            output_dir=output_dir,
            total_steps=8,
            config={
                "lr": 2e-4,
                "output_dir": Path("some/where"),
                "lora_target_modules": ("q_proj", "v_proj"),
                "log_to": (
                    "wandb",
                    "project=a_project",
                    "name=a_name",
                    "group=a_group",
                    "entity=an_entity",
                ),
            },
            run_id="ab12cd34",
        ),
        is_rank_0=True,
    )


def log_steps(log: MetricLog, steps: range, eval_steps: tuple[int, ...] = ()) -> None:
    for step in steps:
        memory = {"allocated": [1.0, 2.5]}
        log.step(
            {
                "step": step,
                "epoch": step / 8,
                "loss": 2 / step,
                "num_target_tokens": 7,
                "memory_gib": memory,
            }
        )
        if step in eval_steps:
            log.evaluation(
                {"step": step, "epoch": step / 8, "eval_loss": 3 / step, "num_target_tokens": 50}
            )


def rows_of(output_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> its row in wandb: the numbers of metrics.jsonl."""
    rows: dict[int, dict[str, float]] = {}
    for record in metrics_of(output_dir):
        is_evaluation = "eval_loss" in record
        for name, number in numbers_in(record).items():
            name = f"eval_{name.removeprefix('eval_')}" if is_evaluation else name
            rows.setdefault(record["step"], {})[name] = number
    return rows


def assert_complete(run: Run, output_dir: Path) -> None:
    """Every number of metrics.jsonl is in the server's history once, in the row of its step, and
    nothing else.
    """
    expected = rows_of(output_dir)
    rows = [{name: number for name, number in row.items() if name[0] != "_"} for row in run.rows]
    assert [row["_step"] for row in run.rows] == sorted(expected)
    assert rows == [expected[step] for step in sorted(expected)]


def sync(line: str) -> None:
    """Run the command that ends a line for people."""
    command = shlex.split(line[line.index("wandb sync ") :])
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


NO_KEY = " (no API key: `wandb login` or WANDB_API_KEY sets one)"


@pytest.mark.parametrize(("mode", "says"), [(None, NO_KEY), ("offline", "")])
def test_an_offline_run_says_why_and_keeps_every_number(mode, says, tmp_path, lines, monkeypatch):
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    with open_log(tmp_path) as log:
        log_steps(log, range(1, 4), eval_steps=(2,))
    assert f"wandb: offline{says}" in lines[0]
    [file] = Path(lines[0].split("sync ")[1]).glob("*.wandb")
    content = file.read_bytes()
    named = [pair for row in rows_of(tmp_path).values() for pair in row.items()]
    assert len(named) > 12
    for name, number in named:
        text = f"{number:.17g}".encode() if number % 1 == 0 else json.dumps(number).encode()
        # protobuf: the key, and behind it the JSON of the value, with its length
        assert name.encode() + b"\x82\x01" + bytes([len(text)]) + text in content, name


@pytest.mark.nightly
def test_wandb_gets_the_recorded_numbers_and_no_file_holds_the_key(server, tmp_path, lines):
    with open_log(tmp_path) as log:
        log.evaluation({"step": 0, "epoch": 0.0, "eval_loss": 4.0, "num_target_tokens": 50})
        log_steps(log, range(1, 7), eval_steps=(3, 6))
        log.summary({"final_loss": 0.25})
    assert_complete(server.run, tmp_path)
    assert list(server.runs) == ["ab12cd34"] and lines[0] == (
        f"wandb: {server.url}/an_entity/a_project/runs/ab12cd34"
    )
    assert server.run.summary["final_loss"] == 0.25 and server.run.exit_code == 0
    expected = {"lr": 2e-4, "output_dir": "some/where", "lora_target_modules": ["q_proj", "v_proj"]}
    assert {name: server.run.config[name]["value"] for name in expected} == expected
    assert server.run.names == ["an_entity", "a_project", "a_group", "a_name"]
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]


# The checkpoint to resume from is of step 4, and was saved before its evaluation where that has to
# be done again.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_lost", "eval_steps", "is_evaluated"),
    [(0, (2, 4), True), (3, (2, 4), False)],
    ids=["server-is-ahead", "evaluation-comes-again"],
)
def test_a_resumed_run_sends_wandb_only_what_it_lacks(
    num_lost, eval_steps, is_evaluated, server, tmp_path
):
    with open_log(tmp_path) as log:
        log_steps(log, range(1, 7), eval_steps)
    server.run.lose_rows(num_lost)
    cut_metrics(tmp_path, 4, 4 if is_evaluated else 2)
    with open_log(tmp_path) as log:
        if not is_evaluated:
            log.evaluation({"step": 4, "epoch": 0.5, "eval_loss": 0.75, "num_target_tokens": 50})
        log_steps(log, range(5, 9), eval_steps=(6,))
    assert list(server.runs) == ["ab12cd34"] and server.run.num_starts == 2
    assert_complete(server.run, tmp_path)


def ends(work: Callable[[], None]) -> None:
    """Do something that must end while the server is in trouble."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


@pytest.mark.nightly
@pytest.mark.parametrize("status", [0, None], ids=["is-silent", "is-gone-at-the-end"])
def test_an_outage_costs_one_line_whose_command_uploads_the_rest(
    status, server, tmp_path, lines, monkeypatch
):
    monkeypatch.setattr(WandbSink, "finish_seconds", 2.0)
    log = open_log(tmp_path)
    log_steps(log, range(1, 4))
    server.status = 200 if status is None else status
    log_steps(log, range(4, 7), eval_steps=(6,))
    if status is None:
        server.stop()
    ends(log.close)
    if status is None:
        server.start()
    server.status = 200
    assert len([line for line in lines if "wandb" in line]) == 2  # the run's address, and this one
    assert "the run there is incomplete" in lines[-1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7
    assert server.run.rows == []
    sync(lines[-1])
    assert_complete(server.run, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("no key", NO_KEY),
        ("asked", ""),
        ("no network", " ("),
    ],
)
def test_a_later_online_start_sends_what_an_offline_run_has_kept(
    why, says, server, tmp_path, lines, monkeypatch
):
    with monkeypatch.context() as patch:
        if why == "no key":
            patch.delenv("WANDB_API_KEY")
        elif why == "asked":
            patch.setenv("WANDB_MODE", "offline")
        else:
            server.stop()
            patch.setattr(sinks, "INIT_SECONDS", 2.0)
        with open_log(tmp_path) as log:
            log_steps(log, range(1, 4), eval_steps=(2,))
    assert server.num_requests == 0
    assert f"wandb: offline{says}" in lines[0] and Path(lines[0].split("sync ")[1]).is_dir()
    if why == "no network":
        server.start()
    with open_log(tmp_path) as log:
        log_steps(log, range(4, 7))
    assert_complete(server.run, tmp_path)


@pytest.mark.nightly
def test_a_run_left_by_an_exception_is_marked_as_failed(server, tmp_path):
    with pytest.raises(KeyError), open_log(tmp_path):
        raise KeyError("a bug in training")
    assert server.run.exit_code == 1


def test_wandb_errors_do_not_show_a_urls_password():
    error = OSError("proxyconnect https://user:word@proxy.local:3128 refused.\nmore")
    assert reason(error) == "proxyconnect https://[secret]@proxy.local:3128 refused"


@pytest.mark.nightly
def test_a_silent_wandb_server_delays_neither_start_nor_end(server, tmp_path):
    program = f"""
import logging, sys
from pathlib import Path
from fsdp_qlora.observability import sinks
from tests.chaos.test_wandb import log_steps, open_log
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sinks.INIT_SECONDS = sinks.TEARDOWN_SECONDS = 1.0
with open_log(Path({str(tmp_path)!r})) as log:
    log_steps(log, range(1, 2))
"""
    server.status = 0
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    server.status = 200
    assert done.returncode == 0, done.stderr
    assert "wandb: offline (" in done.stdout and "wandb sync" in done.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("trouble", ["an error", "a hang"])
def test_wandb_errors_are_reported_once_and_delay_no_step(trouble, tmp_path, lines, monkeypatch):
    import wandb

    is_over = threading.Event()
    calls = []

    def fail(run: object, *_: object, **__: object) -> None:
        calls.append(run)
        if trouble == "an error":
            raise ConnectionResetError("the wandb process is gone")
        is_over.wait()

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Run, "log", fail)
    if trouble == "a hang":
        monkeypatch.setattr(WandbSink, "finish_seconds", 0.5)
        monkeypatch.setattr(sinks, "TEARDOWN_SECONDS", 2.0)

    def steps() -> None:
        with open_log(tmp_path) as log:
            log_steps(log, range(1, 21))

    ends(steps)  # before wandb has taken the first record
    is_over.set()
    says = {"an error": "the wandb process is gone", "a hang": "no answer within 0.5 s"}[trouble]
    problems = [line for line in lines if says in line]
    assert len(problems) == 1 and "wandb sync" in problems[0] and len(calls) <= 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20


def use_wandb(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    WandbSink.finish_seconds = 4.0


@pytest.mark.nightly
def test_wandb_has_every_step_once_after_a_kill_and_an_outage(
    server, reference, assert_same, tmp_path
):
    names = ("WANDB_BASE_URL", "WANDB_API_KEY", "HOME", "NETRC")
    how = {"fault": use_wandb, "arguments": ({name: os.environ[name] for name in names},)}
    output_dir = tmp_path / "out"
    options = reference.same_but(
        output_dir, log_to="wandb,project=a_project,entity=an_entity,name=a"
    )
    with ended(Job(options, tmp_path / "logs0", **how)) as job:
        wait_for(lambda: steps_done(output_dir) >= 4)
        job.kill(0)
        job.wait()
    assert server.run.exit_code is None
    with ended(Job(options, tmp_path / "logs1", **how)) as job:
        wait_for(lambda: server.run.num_starts == 2)
        server.status = 500
        assert job.wait(HANG_SECONDS) == [0, 0], job.output()
    server.status = 200
    assert_same(output_dir)
    said = [line for line in job.output().splitlines() if "wandb sync" in line]
    assert len(said) == 1 and "the run there is incomplete" in said[0]
    sync(said[0])
    assert_complete(server.run, output_dir)
    run_id = json.loads((output_dir / "run.json").read_text())["run_id"]
    assert list(server.runs) == [run_id]
