"""The wandb sink: a run that can neither stop nor stall training, whatever the network does."""

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
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from fsdp_qlora.metrics.sinks import METRICS_FILE, Record, Sink, SinkOptions, numbers_in, plain

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")

# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server has died
# `finish` and wandb's own exit hook block for as long as they are allowed to. Hence a bound on each step.
WANDB_FLOOR = "0.31"  # has what the bounds need: `finish_timeout`, `login(prompt=False)`
WANDB_CONNECT_SECONDS = 3.0
WANDB_INIT_SECONDS = 20.0
WANDB_FINISH_SECONDS = 15.0
WANDB_TEARDOWN_SECONDS = 5.0
WANDB_QUEUE_RECORDS = 10_000  # records held for a wandb process that has stopped reading, then we give up


class WandbSink(Sink):
    """A wandb run that can neither stop nor stall training.

    Whether it is online is decided before it starts; what waits for the network runs in daemon threads with
    a time limit; records go through a queue. Whatever goes wrong is one line that says how to sync.

    A run that goes on is sent what metrics.jsonl has and the server lacks (wandb uploads every 15 s: what was
    not yet sent is lost with a killed start), and is not sent again what the server has.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._run: Any = None
        self._problem: str | None = None  # why no more records are sent; set by the sending thread too
        self._refusal: str | None = None  # why the server lacks what wandb, all the same, writes to disk
        self._is_reported = False
        self._last_eval_step = -1  # that the server had when the run was gone on with
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(WANDB_QUEUE_RECORDS)
        try:
            self._run, line = _within(WANDB_INIT_SECONDS + 20, partial(_start_wandb, options))
        except Exception as error:
            line = f"wandb: not used, it did not start ({_reason(error)}). All numbers are in {METRICS_FILE}."
        log.info(line)
        if self._run is None:
            return
        self._listen()
        threading.Thread(target=self._send, name="wandb-records", daemon=True).start()
        if options.run_id and not self._run.offline:  # offline nobody knows what the server has
            self._post(partial(self._catch_up, (options.output_dir / METRICS_FILE).read_text().splitlines()))

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._post(lambda: self._log(record))

    def evaluation(self, record: Record) -> None:
        self._post(lambda: self._log(record))

    def summary(self, values: Record) -> None:
        self._post(lambda: self._run.summary.update(values))

    def close(self, exit_code: int) -> None:
        if self._run is not None:
            try:
                _within(WANDB_FINISH_SECONDS, partial(self._finish, exit_code))
            except Exception as error:
                self._problem = self._problem or _reason(error)
            self._report_problem()
        _stop_wandb(exit_code)

    def _listen(self) -> None:
        """Hear what wandb would print: that a server refuses data for good is told in no other way."""
        import wandb

        def hear(record: logging.LogRecord) -> bool:
            if "will not be synced" in record.getMessage():
                self._refusal = "the server has refused data"
            return False

        terminal = logging.Logger("wandb")
        terminal.addFilter(hear)
        wandb.termsetup(self._run.settings, terminal)

    def _catch_up(self, lines: list[str]) -> None:
        """Send what earlier starts have left in metrics.jsonl and the server does not have."""
        self._last_eval_step = self._run.summary.get("eval_step", -1)
        for line in lines:
            self._log(json.loads(line))

    def _log(self, record: Record) -> None:
        """Send a record unless the server has it: its last row is that before `starting_step`.

        An evaluation's numbers have names of their own, because those of its step are in the same row. One that
        was cut off after its step's row was sent goes into the next row; `eval_step` says where it belongs.
        """
        numbers, first_step = numbers_in(record), self._run.starting_step
        if "eval_loss" in record:
            numbers = {name if name.startswith("eval_") else f"eval_{name}": n for name, n in numbers.items()}
            is_there = record["step"] <= self._last_eval_step or record["step"] < first_step - 1
        else:
            is_there = record["step"] < first_step
        if not is_there:
            self._run.log(numbers, step=max(record["step"], first_step))

    def _post(self, call: Callable[[], object]) -> None:
        """Leave a call to the sending thread, so that nothing wandb does can hold up the trainer."""
        if self._run is None:
            return
        if self._problem is None:
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._problem = f"it has not taken the last {WANDB_QUEUE_RECORDS:,} records"
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
        """Say once, from the trainer's thread, that wandb does not have everything."""
        problem = self._problem or self._refusal
        if problem is not None and not self._is_reported:
            self._is_reported = True
            log.info(
                f"wandb: the run is not complete there ({problem}). Training is not affected, all numbers are in "
                f"{METRICS_FILE}. {_how_to_upload(self._run)}"
            )


def wandb_problem() -> str | None:
    """What is wrong with the installed wandb, told without importing it (it takes seconds)."""
    try:
        version = importlib.metadata.version("wandb")
    except importlib.metadata.PackageNotFoundError:
        return "wandb is not installed"
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if numbers < [int(number) for number in WANDB_FLOOR.split(".")]:
        return f"wandb {version} is installed and is too old to be kept from stalling training"
    return None


def _start_wandb(options: SinkOptions) -> tuple[Any, str]:
    """Start a wandb run, online if that can work.

    Returns:
        The run (None where wandb is disabled) and one line for people.
    """
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
            _stop_wandb(1)  # it still holds the run's id, and refuses a second run with it
    run = _init_wandb(options, mode="offline")
    return run, f"wandb: offline ({problem}). {_how_to_upload(run)}"


def _init_wandb(options: SinkOptions, *, mode: Literal["online", "offline"]) -> Any:
    import wandb

    settings = wandb.Settings(
        silent=True,  # we print the one line that matters
        console="off",  # capturing the terminal would break the bar and could copy secrets
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
    """End wandb's own process now, because the hook it leaves for the program's exit waits without limit.

    Where it takes too long, the hook is gone all the same, and wandb's process ends with ours.
    """
    with contextlib.suppress(Exception):
        import wandb

        _within(WANDB_TEARDOWN_SECONDS, partial(wandb.teardown, exit_code))


def _why_offline(settings: Any) -> str | None:
    """Why an online run cannot work, or None when it is worth trying. Takes a few seconds at most."""
    import wandb

    if settings.mode in ("offline", "dryrun"):
        return "as asked by WANDB_MODE or `wandb offline`"
    hostname = urlsplit(settings.base_url).hostname
    host, port = _first_hop(settings)
    try:
        if not wandb.login(verify=False, prompt=False):  # only looks for a key, in all of wandb's places
            return f"no API key for {hostname}: `wandb login` or WANDB_API_KEY sets one"
    except Exception as error:
        return _reason(error)
    try:
        connect = partial(socket.create_connection, (host, port), timeout=WANDB_CONNECT_SECONDS)
        _within(WANDB_CONNECT_SECONDS, connect).close()  # a name lookup heeds no timeout of its own
    except Exception as error:
        return f"no connection to {host}:{port}: {_reason(error)}"
    return None


def _first_hop(settings: Any) -> tuple[str, int]:
    """Host and port that a request to the server connects to: the proxy's, where there is one."""
    url = urlsplit(settings.base_url)
    proxies = {"http": settings.http_proxy, "https": settings.https_proxy}
    proxy = proxies.get(url.scheme) or urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _how_to_upload(run: Any) -> str:
    option = "" if run.offline else "--include-online "  # without it `wandb sync` skips what was begun online
    command = f"wandb sync {option}{shlex.quote(str(Path(run.dir).parent))}"
    return f"A later start of the run that reaches wandb uploads the rest; if there will be none: {command}"


def _reason(error: BaseException) -> str:
    """The first line of an error, without the user and password that a URL in it may hold."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Call `function` in a daemon thread and wait for its result at most `seconds`.

    Raises:
        TimeoutError: it is still running, and goes on unseen.
        Exception: what `function` raised.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # a SystemExit too: wandb.teardown raises one
            result.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    thread = threading.Thread(target=call, name="wandb-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return result.result()
