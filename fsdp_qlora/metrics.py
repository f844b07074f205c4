"""Where a run's numbers go: a table of sinks, and the log that feeds them.

`metrics.jsonl` is the record and is always written. The other sinks are for people, and none of them may
stop or stall training: wandb most of all, which is reached over a network (see `WandbSink`).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import json
import logging
import math
import os
import queue
import re
import shlex
import socket
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from tqdm import tqdm

from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

T = TypeVar("T")
Record = Mapping[str, Any]

METRICS_FILE = "metrics.jsonl"

# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server has died
# `finish` and wandb's own exit hook block for as long as they are allowed to. Hence a bound on each step.
WANDB_FLOOR = "0.31"  # has what the bounds need: `finish_timeout`, `login(prompt=False)`
WANDB_CONNECT_SECONDS = 3.0
WANDB_INIT_SECONDS = 20.0
WANDB_FINISH_SECONDS = 15.0
WANDB_TEARDOWN_SECONDS = 5.0
WANDB_QUEUE_RECORDS = 10_000  # records held for a wandb process that has stopped reading, then we give up


# --- the log -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SinkOptions:
    """What a sink may need to know about the run; `config` is written out, so it must hold no secrets."""

    output_dir: Path
    total_steps: int
    config: Mapping[str, object]
    project_name: str | None
    name: str | None
    group: str | None
    entity: str | None


class Sink:
    """A place where numbers go. A sink overrides what it has a use for."""

    def step(self, record: Record, eta_seconds: float | None) -> None:
        """Take one optimizer step's record; `eta_seconds` is None until the pace is known."""

    def evaluation(self, record: Record) -> None:
        """Take one evaluation's record."""

    def summary(self, values: Record) -> None:
        """Take the run's final values."""

    def close(self, exit_code: int) -> None:
        """Let go of everything; 0 marks the run as finished, anything else as failed."""


class Pace:
    """Seconds per optimizer step over the last 50, without the first step of the process (warm-up)."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.elapsed_seconds = 0.0
        self._recent: deque[float] = deque(maxlen=50)

    def add(self, step_seconds: object) -> None:
        if not isinstance(step_seconds, (int, float)):
            return
        self.num_steps += 1
        self.elapsed_seconds += step_seconds
        if self.num_steps > 1:
            self._recent.append(step_seconds)

    @property
    def seconds_per_step(self) -> float | None:
        return sum(self._recent) / len(self._recent) if self._recent else None


class MetricLog:
    """Hands each record to every sink. Without sinks (all ranks but 0) every call does nothing.

    As a context manager it closes itself, and marks the run as failed when an exception leaves the block.
    """

    def __init__(self, sinks: Sequence[Sink], *, total_steps: int) -> None:
        self._sinks = list(sinks)
        self._total_steps = total_steps
        self._pace = Pace()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self.close(exit_code=0 if exception_type is None else 1)

    def step(self, record: Record) -> None:
        """Log one optimizer step: a record with the keys of metrics.jsonl (design, section 3)."""
        if not self._sinks:
            return
        record = plain(record)
        self._pace.add(record.get("step_seconds"))
        num_left = max(self._total_steps - record["step"], 0)
        seconds_per_step = self._pace.seconds_per_step
        eta_seconds = None if seconds_per_step is None else num_left * seconds_per_step
        for sink in self._sinks:
            sink.step(record, eta_seconds)
        if self._pace.num_steps == 3 and num_left and seconds_per_step and eta_seconds:
            self.say(
                f"Estimated time: {_clock(self._pace.elapsed_seconds + eta_seconds)} in total, "
                f"{_clock(eta_seconds)} to go ({num_left:,} steps of {seconds_per_step:.2f} s; "
                f"evaluation and saving come on top)."
            )

    def evaluation(self, record: Record) -> None:
        """Log one evaluation: step, epoch, eval_loss, num_target_tokens."""
        if not self._sinks:
            return
        record = plain(record)
        for sink in self._sinks:
            sink.evaluation(record)
        self.say(_line(record, ("step", *EVALUATION_COLUMNS)))

    def say(self, text: str) -> None:
        """Print a line for people that does not break the progress bar. Rank 0 only."""
        if self._sinks:
            _say(text)

    def summary(self, values: Record) -> None:
        """Set the run's final values (wandb's summary)."""
        values = plain(values)
        for sink in self._sinks:
            sink.summary(values)

    def close(self, exit_code: int = 0) -> None:
        """Close every sink, in bounded time. A second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in reversed(sinks):
            sink.close(exit_code)


def check_sinks(names: Sequence[str]) -> list[str]:
    """Say what is wrong with `log_to` before anything is loaded; an empty list when all is well."""
    errors = []
    for name in names:
        if name not in SINKS:
            close = difflib.get_close_matches(name, SINKS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            errors.append(f"log_to: there is no sink named {name!r}.{hint} Allowed: {', '.join(SINKS)}.")
    if "wandb" in names and (problem := _wandb_problem()):
        errors.append(f"log_to: {problem}. Run `pip install 'wandb>={WANDB_FLOOR}'`, or take it out of log_to.")
    return errors


def open_metric_log(
    sinks: Sequence[str],
    *,
    output_dir: Path,
    total_steps: int,
    config: Mapping[str, object],
    project_name: str | None,
    name: str | None,
    group: str | None,
    entity: str | None,
    is_rank_0: bool,
) -> MetricLog:
    """Open the sinks named in `sinks`, and metrics.jsonl in any case.

    Args:
        output_dir: gets metrics.jsonl (appended to) and wandb's files in `wandb/`.
        total_steps: optimizer steps of the whole run.
        config: the resolved options, shown in wandb; no secrets.
        project_name, name, group, entity: wandb's; None leaves each to wandb and its environment variables.
        is_rank_0: only rank 0 opens anything; the other ranks get a log that does nothing.
    Raises:
        UserError: an unknown sink, or wandb is asked for and not installed. Nothing was opened.
    """
    if errors := check_sinks(sinks):
        raise UserError("\n".join(errors))
    if not is_rank_0:
        return MetricLog([], total_steps=total_steps)
    output_dir.mkdir(parents=True, exist_ok=True)
    options = SinkOptions(output_dir, total_steps, config, project_name, name, group, entity)
    names = dict.fromkeys(["jsonl", *sinks])  # the record first; each sink once
    return MetricLog([SINKS[sink](options) for sink in names], total_steps=total_steps)


# --- numbers and text ----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Turn a record into what JSON holds: NaN and infinities become None, 0-d arrays become numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not isinstance(value, float) and hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _numbers(value: object, name: str = "") -> dict[str, float]:
    """The numbers in a nested value by path: {"memory_gib": {"reserved": [1.5]}} -> memory_gib/reserved/0."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {name: value} if isinstance(value, (int, float)) else {}
    return {
        path: number for key, item in items for path, number in _numbers(item, f"{name}/{key}" if name else key).items()
    }


# Formats of one record for people. A column whose key is not in the record is left out.
COLUMNS: dict[str, str] = {
    "step": "step {}",
    "epoch": "epoch {:.2f}",
    "loss": "loss {:7.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "grad_norm": "grad_norm {:8.4f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:>8,.0f} tokens/s",
    "step_seconds": "{:7.2f} s",
    "memory_gib": "{:6.2f} GiB",
    "num_target_tokens": "{:,} target tokens",
}
STEP_COLUMNS = ("epoch", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "memory_gib")
BAR_COLUMNS = ("loss", "lr", "tokens_per_second")
EVALUATION_COLUMNS = ("epoch", "eval_loss", "num_target_tokens")


def _line(record: Record, columns: Sequence[str]) -> str:
    """One line of text; of nested numbers (memory per rank) the largest is shown."""
    parts = []
    for column in columns:
        if column in record:
            number = max(_numbers(record[column]).values(), default=math.nan)
            parts.append(COLUMNS[column].format(number))
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _say(text: str) -> None:
    with tqdm.external_write_mode():  # takes a bar off the screen, and draws it again afterwards
        log.info(text)


# --- sinks on this machine -----------------------------------------------------------------------------


class JsonlSink(Sink):
    """metrics.jsonl: one JSON object per record, in the file as soon as the call returns."""

    def __init__(self, options: SinkOptions) -> None:
        path = options.output_dir / METRICS_FILE
        _cut_torn_line(path)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._write(record)

    def evaluation(self, record: Record) -> None:
        self._write(record)

    def close(self, exit_code: int) -> None:
        self._file.close()

    def _write(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")


def _cut_torn_line(path: Path) -> None:
    """Remove what a machine that died in mid-write left after the last newline."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


class _Lines:
    """Makes each state of a bar a line of its own, for a file or a pipe."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


class TqdmSink(Sink):
    """A progress bar over the steps of the run; in a file or a pipe, a line every half minute."""

    def __init__(self, options: SinkOptions) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=options.total_steps,
            unit="step",
            file=None if is_terminal else _Lines(),
            dynamic_ncols=is_terminal,
            mininterval=0.1 if is_terminal else 30.0,
            maxinterval=10.0 if is_terminal else 30.0,
        )
        self._is_new = True

    def step(self, record: Record, eta_seconds: float | None) -> None:
        step = record["step"]
        if self._is_new:  # a resumed run starts in the middle, and must not count what it has not done
            self._bar.initial = self._bar.n = self._bar.last_print_n = step - 1
            self._is_new = False
        self._bar.set_postfix_str(_line(record, BAR_COLUMNS), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self, exit_code: int) -> None:
        self._bar.close()


class StdoutSink(Sink):
    """One aligned line per optimizer step on standard output."""

    def __init__(self, options: SinkOptions) -> None:
        self._total_steps = options.total_steps

    def step(self, record: Record, eta_seconds: float | None) -> None:
        step = f"step {record['step']:>{len(str(self._total_steps))}}/{self._total_steps}"
        eta = "-:--:--" if eta_seconds is None else _clock(eta_seconds)
        with tqdm.external_write_mode():
            print(f"{step}  {_line(record, STEP_COLUMNS)}  ETA {eta}", flush=True)


# --- wandb ---------------------------------------------------------------------------------------------


class WandbSink(Sink):
    """A wandb run that can neither stop nor stall training.

    Whether it is online is decided before it starts; what waits for the network runs in daemon threads with
    a time limit; records go through a queue. Whatever goes wrong is one line that says how to sync.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._run: Any = None
        self._problem: str | None = None  # why no more records are sent; set by the sending thread too
        self._is_reported = False
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(WANDB_QUEUE_RECORDS)
        try:
            self._run, line = _within(WANDB_INIT_SECONDS + 20, partial(_start_wandb, options))
        except Exception as error:
            line = f"wandb: not used, it did not start ({_reason(error)}). All numbers are in {METRICS_FILE}."
        _say(line)
        if self._run is not None:
            threading.Thread(target=self._send, name="wandb-records", daemon=True).start()

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._log(record)

    def evaluation(self, record: Record) -> None:
        self._log(record)

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

    def _log(self, record: Record) -> None:
        numbers = _numbers(record)
        self._post(lambda: self._run.log(numbers, step=record["step"]))

    def _post(self, call: Callable[[], object]) -> None:
        """Leave a call to the sending thread, so that nothing wandb does can hold up the trainer."""
        if self._run is None or self._is_reported:
            return
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
        if self._problem is not None and not self._is_reported:
            self._is_reported = True
            _say(
                f"wandb: the run is not complete there ({self._problem}). Training is not affected, all "
                f"numbers are in {METRICS_FILE}. To upload what is on disk: {_sync_command(self._run)}"
            )


def _wandb_problem() -> str | None:
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
    run = _init_wandb(options, mode="offline")
    return run, f"wandb: offline ({problem}). To upload the run later: {_sync_command(run)}"


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


def _sync_command(run: Any) -> str:
    return f"wandb sync {shlex.quote(str(Path(run.dir).parent))}"


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


SINKS: dict[str, Callable[[SinkOptions], Sink]] = {
    "tqdm": TqdmSink,
    "stdout": StdoutSink,
    "wandb": WandbSink,
    "jsonl": JsonlSink,
}
