"""The wandb sink: it can neither stop nor stall training, whatever the network does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import queue
import re
import shlex
import socket
import threading
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fsdp_qlora.metrics.background import within
from fsdp_qlora.metrics.sinks import (
    METRICS_FILE,
    SAMPLES_FILE,
    Record,
    Sink,
    SinkOptions,
    named_numbers,
    plain,
    read_records,
)
from fsdp_qlora.storage.files import read_regular

log = logging.getLogger("fsdp_qlora")

# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server has died
# `finish` and wandb's own exit hook block for as long as they may. Hence a time limit on each.
WANDB_FLOOR = "0.31"  # has `finish_timeout` and `login(prompt=False)`, needed for the limits
WANDB_CONNECT_SECONDS = 3.0
WANDB_INIT_SECONDS = 20.0
WANDB_FINISH_SECONDS = 15.0
WANDB_TEARDOWN_SECONDS = 5.0
WANDB_QUEUE_RECORDS = 10_000  # most records held for a wandb process that has stopped reading


class WandbSink(Sink):
    """A wandb run that can neither stop nor stall training.

    Online or offline is decided before it starts. Calls that wait for the network run in daemon threads with a
    time limit, and records pass through a queue. Any failure is reported in one line that says how to sync.

    A resumed run is sent the records of metrics.jsonl that the server lacks, and no others. (wandb uploads every
    15 s, so a kill loses the last records.)
    """

    def __init__(self, options: SinkOptions) -> None:
        self._run: Any = None
        self._samples_file = options.output_dir / SAMPLES_FILE
        self._no_samples: str | None = None  # why their table is not sent
        self._problem: str | None = None  # why no more records are sent; also set by the sending thread
        self._refusal: str | None = None  # why the server lacks records that wandb has written to disk
        self._is_reported = self._is_table_reported = False
        self._last_eval_step = -1  # the server's last when the run was resumed
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(WANDB_QUEUE_RECORDS)
        try:
            self._run, line = within(WANDB_INIT_SECONDS + 20, partial(_start_wandb, options))
        except Exception as error:
            line = f"wandb: not used, it did not start ({_reason(error)}). All numbers are in {METRICS_FILE}."
        log.info(line)
        if self._run is None:
            return
        self._listen()
        threading.Thread(target=self._send, name="wandb-records", daemon=True).start()
        if options.run_id and not self._run.offline:  # offline, the server's records are unknown
            self._post(partial(self._catch_up, read_regular(options.output_dir / METRICS_FILE).decode().splitlines()))

    @classmethod
    def problem(cls) -> str | None:
        if found := wandb_problem():
            return f"{found}. Run `pip install 'wandb>={WANDB_FLOOR}'`"
        return None

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._post(lambda: self._log(record))

    def evaluation(self, record: Record) -> None:
        self._post(lambda: self._log(record))

    def samples(self, records: Sequence[Record]) -> None:
        self._post(lambda: self._log_samples(records))

    def summary(self, values: Record) -> None:
        self._post(lambda: self._run.summary.update(values))

    def close(self, exit_code: int) -> None:
        if self._run is not None:
            try:
                within(WANDB_FINISH_SECONDS, partial(self._finish, exit_code))
            except Exception as error:
                self._problem = self._problem or _reason(error)
            self._report_problem()
        _stop_wandb(exit_code)

    def _listen(self) -> None:
        """Read wandb's messages: they are the only sign that the server refuses data for good."""
        import wandb

        def read(record: logging.LogRecord) -> bool:
            if "will not be synced" in record.getMessage():
                self._refusal = "the server has refused data"
            return False

        terminal = logging.Logger("wandb")
        terminal.addFilter(read)
        wandb.termsetup(self._run.settings, terminal)

    def _catch_up(self, lines: list[str]) -> None:
        """Send the records of earlier starts that the server lacks."""
        self._last_eval_step = self._run.summary.get("eval_step", -1)
        for line in lines:
            self._log(json.loads(line))

    def _log(self, record: Record) -> None:
        """Send a record unless the server has it: the server's last row is the one before `starting_step`.

        An evaluation's numbers get names of their own, because its step's numbers are in the same row. If a kill
        separated it from that row, it is sent in the next row; `eval_step` gives its step.
        """
        numbers, first_step = named_numbers(record), self._run.starting_step
        if "eval_loss" in record:
            is_there = record["step"] <= self._last_eval_step or record["step"] < first_step - 1
        else:
            is_there = record["step"] < first_step
        if not is_there:
            self._run.log(numbers, step=max(record["step"], first_step))

    def _log_samples(self, records: Sequence[Record]) -> None:
        """A table with all samples of the run so far: wandb shows the last one that was sent.

        A table is an artifact too, for which wandb asks its server for more than for numbers: a failure ends the tables
        alone.
        """
        if self._no_samples is not None:
            return
        try:
            self._send_table(records)
        except Exception as error:
            self._no_samples = _reason(error)

    def _send_table(self, records: Sequence[Record]) -> None:
        import wandb

        step, columns = records[0]["step"], ["step", "prompt", "text"]
        rows = [row for row in read_records(self._samples_file) if row["step"] < step] + list(records)
        table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({"samples": table}, step=max(step, self._run.starting_step))

    def _post(self, call: Callable[[], object]) -> None:
        """Queue a call for the sending thread, so that wandb cannot block the trainer."""
        if self._run is None:
            return
        if self._problem is None:
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._problem = f"it has not accepted the last {WANDB_QUEUE_RECORDS:,} records"
        self._report_problem()

    def _send(self) -> None:
        while True:
            call = self._queue.get()
            try:
                if self._problem is None:
                    call()
            except Exception as error:
                self._problem = _reason(error)
            finally:
                self._queue.task_done()

    def _finish(self, exit_code: int) -> None:
        self._queue.join()
        self._run.finish(exit_code=exit_code)

    def _report_problem(self) -> None:
        """Report once, from the trainer's thread, that wandb does not have all records."""
        if self._no_samples and not self._is_table_reported:
            self._is_table_reported = True
            log.info("wandb: the samples are not sent there (%s). They are in %s.", self._no_samples, SAMPLES_FILE)
        problem = self._problem or self._refusal
        if problem is not None and not self._is_reported:
            self._is_reported = True
            log.info(
                f"wandb: the run there is incomplete ({problem}). Training is not affected, all numbers are in "
                f"{METRICS_FILE}. {_how_to_upload(self._run)}"
            )


def wandb_problem() -> str | None:
    """What is wrong with the installed wandb, found without the slow import."""
    try:
        version = importlib.metadata.version("wandb")
    except importlib.metadata.PackageNotFoundError:
        return "wandb is not installed"
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if numbers < [int(number) for number in WANDB_FLOOR.split(".")]:
        return f"wandb {version} is installed and is too old: it can stall training"
    return None


def _start_wandb(options: SinkOptions) -> tuple[Any, str]:
    """Start a wandb run, online if possible; returns it (None if wandb is disabled) and a line for the user."""
    # wandb reports its own errors over the network, and at exit waits 10 s for a server that does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode == "disabled":
        return None, "wandb: disabled by WANDB_MODE."
    problem = _why_offline(settings)
    if problem is None:
        try:
            run = _init_wandb(options, mode="online")
            return run, f"wandb: {run.url}"
        except Exception as error:
            problem = _reason(error)
            _stop_wandb(1)  # it still holds the run's id and would refuse a second run with it
    run = _init_wandb(options, mode="offline")
    return run, f"wandb: offline ({problem}). {_how_to_upload(run)}"


def _init_wandb(options: SinkOptions, *, mode: Literal["online", "offline"]) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True,  # we print the important line
        console="off",  # capturing the terminal would break the progress bar and could upload secrets
        disable_git=True,  # a remote's URL may hold a token
        save_code=False,
        init_timeout=WANDB_INIT_SECONDS,
        finish_timeout=0.8 * WANDB_FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    return wandb.init(
        dir=str(options.output_dir),
        config=plain(options.config),
        project=options.project_name,
        name=options.name,
        group=options.group,
        entity=options.entity,
        id=options.run_id,
        resume="allow" if options.run_id else None,
        mode=mode,
        settings=settings,
    )


def _stop_wandb(exit_code: int) -> None:
    """Stop wandb's process now, because its exit hook waits without limit.

    If that times out, the hook is removed anyway, and wandb's process ends with ours.
    """
    with contextlib.suppress(Exception):
        import wandb

        within(WANDB_TEARDOWN_SECONDS, partial(wandb.teardown, exit_code))


def _why_offline(settings: Any) -> str | None:
    """Why an online run cannot work, None if it may. Takes a few seconds at most."""
    import wandb

    if settings.mode in ("offline", "dryrun"):
        return "requested by WANDB_MODE or `wandb offline`"
    hostname = urlsplit(settings.base_url).hostname
    host, port = _first_hop(settings)
    try:
        if not wandb.login(verify=False, prompt=False):  # only looks for a key, wherever wandb may store it
            return f"no API key for {hostname}: `wandb login` or WANDB_API_KEY sets one"
    except Exception as error:
        return _reason(error)
    try:
        connect = partial(socket.create_connection, (host, port), timeout=WANDB_CONNECT_SECONDS)
        within(WANDB_CONNECT_SECONDS, connect).close()  # the timeout does not cover the name lookup
    except Exception as error:
        return f"no connection to {host}:{port}: {_reason(error)}"
    return None


def _first_hop(settings: Any) -> tuple[str, int]:
    """Host and port that a request to the server connects to: the proxy's, if there is one."""
    url = urlsplit(settings.base_url)
    proxies = {"http": settings.http_proxy, "https": settings.https_proxy}
    proxy = proxies.get(url.scheme) or urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _how_to_upload(run: Any) -> str:
    option = "" if run.offline else "--include-online "  # otherwise `wandb sync` skips runs started online
    command = f"wandb sync {option}{shlex.quote(str(Path(run.dir).parent))}"
    return f"The next start of this run that reaches wandb uploads the rest. To upload it yourself: {command}"


def _reason(error: BaseException) -> str:
    """The first line of an error, without the user and password that a URL in it may contain."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return re.sub(r"//[^/@\s]+@", "//***@", text)
