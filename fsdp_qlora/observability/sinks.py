"""The base classes of sinks, and TensorBoard's, wandb's and Trackio's.

None of these libraries can stop or stall training.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import queue
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import Version

from fsdp_qlora.distributed.supervision.clock import within
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.records import Record, is_evaluation, numbers_in, plain, read_records
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.run_files import METRICS_FILE

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class SinkOptions:
    """Facts about the run for its sinks, which publish them: without secrets."""

    output_dir: Path
    """For metrics.jsonl, which is appended to, and wandb's files in `wandb/`."""
    total_steps: int
    """Optimizer steps of the whole run."""
    config: Mapping[str, Any]
    """The resolved options."""
    run_id: str | None = None
    """The same for every start of a run, so that wandb resumes it."""
    is_continued: bool = False
    """Whether this start continues a run."""


class Sink:
    """A destination of the run's numbers. A sink overrides the methods it needs."""

    def __init__(self, options: SinkOptions) -> None:
        """Open the sink.

        The folder is there, and metrics.jsonl holds what earlier starts of the run have logged.
        """

    @classmethod
    def problem(cls) -> str | None:
        """Why the sink cannot be used here, and the command that helps; None if it can.

        It does not import the library, which may take seconds.
        """
        return None

    def step(self, record: Record, eta_seconds: float | None) -> None:
        """Log one optimizer step's record; `eta_seconds` is None until the pace is known."""
        self.log(record)

    def evaluation(self, record: Record) -> None:
        """Log one evaluation's record."""
        self.log(record)

    def log(self, record: Record) -> None:
        """Log a record of either kind."""

    def flush(self) -> None:
        """Make all records so far survive a power cut, as far as the sink can."""

    def summary(self, values: Record) -> None:
        """Log the run's final values."""

    def close(self, exit_code: int) -> None:
        """Close the sink; exit code 0 marks the run as finished, any other as failed."""


class QueuedSink(Sink):
    """A sink whose library may block or fail.

    One thread makes all calls to the library, with a time limit at start and end. The first failure
    is logged once and ends the sink. At the start it is sent the records of earlier starts that it
    lacks.

    Attributes:
        name: as --log_to gives it, also the package's name.
        client: the library's object, which `open` returns; None if there is none.
    """

    name: ClassVar[str]
    start_seconds: ClassVar[float] = 60.0
    finish_seconds: ClassVar[float] = 15.0

    def __init__(self, options: SinkOptions) -> None:
        self.client: Any = None
        self._has_failed = False
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        try:
            earlier = read_records(options.output_dir / METRICS_FILE)
            self.client = within(self.start_seconds, partial(self.open, options))
        except Exception as error:
            self._fail(error)
        # A daemon: a call that never returns does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"{self.name}-records", daemon=True)
        if self.client is not None:
            self._thread.start()
            for record in self.lacking(earlier):
                self.log(record)

    @classmethod
    def problem(cls) -> str | None:
        if importlib.util.find_spec(cls.name):
            return None
        return f"{cls.name} is not installed. Run `pip install {cls.name}`"

    def open(self, options: SinkOptions) -> Any:
        """Start the library's run, and return its object."""
        raise NotImplementedError

    def send(self, record: Record) -> None:
        """Send a step's or an evaluation's record."""
        raise NotImplementedError

    def lacking(self, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records of earlier starts that the library lacks."""
        return earlier

    def finish(self, exit_code: int) -> None:
        """End the library's run, after all calls have been made."""

    def advice(self) -> str:
        """Advice to the user about missing records."""
        return ""

    def log(self, record: Record) -> None:
        self.post(partial(self.send, record))

    def close(self, exit_code: int) -> None:
        if self.client is not None:
            try:
                within(self.finish_seconds, partial(self._finish, exit_code))
            except Exception as error:
                self._fail(error)

    def post(self, call: Callable[[], object]) -> None:
        """Queue a call for the thread."""
        if self.client is not None and not self._has_failed:
            self._calls.put(call)

    def _work(self) -> None:
        while call := self._calls.get():
            try:
                call()
            except Exception as error:
                return self._fail(error)

    def _finish(self, exit_code: int) -> None:
        self._calls.put(None)
        self._thread.join()
        self.finish(exit_code)

    def _fail(self, error: Exception) -> None:
        """Send nothing more, and say so once."""
        if not self._has_failed:
            self._has_failed = True
            log.info(
                f"{self.name}: the run there is incomplete ({reason(error)}). Training is not "
                f"affected, all numbers are in {METRICS_FILE}. {self.advice()}".rstrip()
            )


class TensorBoardSink(QueuedSink):
    """Scalars by step in `tensorboard/` of the run's folder, in float32.

    Each start writes the records of earlier ones again, so that the curves are those of
    metrics.jsonl.
    """

    name = "tensorboard"

    def open(self, options: SinkOptions) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard draws what all files of a folder have: an earlier start's would be a second
        # curve.
        folder = options.output_dir / "tensorboard"
        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
        writer = SummaryWriter(str(folder))
        # Indented lines are a code block in Markdown.
        settings = "\n".join(f"    {name}: {value}" for name, value in options.config.items())
        writer.add_text("settings", settings, 0)
        log.info("tensorboard: run `tensorboard --logdir %s` to see it", folder)
        return writer

    def send(self, record: Record) -> None:
        for name, value in named_numbers(record).items():
            if not name.endswith("step"):  # by which the others are drawn
                self.client.add_scalar(name, value, record["step"])

    def flush(self) -> None:
        self.post(lambda: self.client.flush())

    def finish(self, exit_code: int) -> None:
        self.client.close()


def reason(error: Exception) -> str:
    """The first line of an error, without secrets."""
    return redact((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."))


def named_numbers(record: Record) -> dict[str, float]:
    """The numbers of a record by path."""
    numbers = numbers_in(record)
    if not is_evaluation(record):
        return numbers
    # An evaluation shares a step's row, so its numbers have names of their own.
    return {
        name if name.startswith("eval_") else f"eval_{name}": value
        for name, value in numbers.items()
    }


# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server
# has died `finish` and wandb's own exit hook block for as long as they may. Hence a time limit on
# each.
OLDEST_VERSION = "0.31"  # has `finish_timeout` and `login(prompt=False)`, needed for the limits
INIT_SECONDS = 20.0
TEARDOWN_SECONDS = 5.0


class WandbSink(QueuedSink):
    """A wandb run, which every start of the run continues; offline where it cannot be online.

    wandb uploads every 15 s, so a kill loses the last rows there. The next start sends what follows
    the server's last row. An evaluation that a kill has separated from its step's row is not sent
    again.
    """

    name = "wandb"
    start_seconds = 2 * INIT_SECONDS

    @classmethod
    def problem(cls) -> str | None:
        advice = f"Run `pip install 'wandb>={OLDEST_VERSION}'`"
        try:
            version = importlib.metadata.version("wandb")
        except importlib.metadata.PackageNotFoundError:
            return f"wandb is not installed. {advice}"
        if Version(version) < Version(OLDEST_VERSION):
            return f"wandb {version} is installed and is too old: it can stall training. {advice}"
        return None

    def open(self, options: SinkOptions) -> Any:
        # wandb reports its own errors over the network, and at exit waits 10 s for a server that
        # does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        limit = 0.8 * self.finish_seconds
        problem = ""
        try:
            run = _start(options, finish_timeout=limit, mode=online_mode())
        except Exception as error:
            problem = f" ({reason(error)})"
            _stop(1)  # it still holds the run's id and would refuse a second run with it
            run = _start(options, finish_timeout=limit, mode="offline")
        place = run.url or "disabled"
        if run.offline:
            place = f"offline{problem}. {_how_to_upload(run)}"
        log.info("wandb: %s", place)
        return run

    def lacking(self, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # An offline run has no server to ask what it has; `wandb sync` uploads earlier files.
        if self.client.offline:
            return []
        return [record for record in earlier if record["step"] >= self.client.starting_step]

    def send(self, record: Record) -> None:
        """Send a record to its step's row; wandb drops one that is before its next row."""
        self.client.log(named_numbers(record), step=record["step"])

    def summary(self, values: Record) -> None:
        self.post(lambda: self.client.summary.update(values))

    def finish(self, exit_code: int) -> None:
        self.client.finish(exit_code=exit_code)

    def close(self, exit_code: int) -> None:
        super().close(exit_code)
        _stop(exit_code)

    def advice(self) -> str:
        return _how_to_upload(self.client) if self.client is not None else ""


class TrackioSink(QueuedSink):
    """A Trackio run in its database on this machine, which every start of the run continues.

    Trackio finds it by its name: a start that continues takes the newest of that name. Steps that
    are repeated after a kill are there twice.
    """

    name = "trackio"

    def open(self, options: SinkOptions) -> Any:
        import trackio

        named: dict[str, Any] = {"project": "fsdp_qlora", "name": options.run_id}
        given = _given_settings(options)
        given.pop("entity", None)  # wandb's alone
        # A name may be another run's, which must not get this one's steps.
        resume = "never" if "name" in given and not options.is_continued else "allow"
        named |= given
        # It would start threads of its own; memory is in the records.
        named |= {"auto_log_gpu": False, "auto_log_cpu": False}
        config = plain(options.config)
        return trackio.init(config=config, resume=resume, embed=False, **named)

    def lacking(self, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return []  # those of starts with this sink are in the database

    def send(self, record: Record) -> None:
        numbers = named_numbers(record)
        numbers.pop("step", None)  # a reserved name there
        self.client.log(numbers, step=record["step"])

    def finish(self, exit_code: int) -> None:
        self.client.finish()


def online_mode() -> Any:
    """The mode of WANDB_MODE and `wandb offline`.

    Raises:
        UserError: it is online and there is no API key.
    """
    import wandb

    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    # It only looks for a key, wherever wandb may store it.
    if mode == "online" and not wandb.login(verify=False, prompt=False):
        raise UserError("no API key: `wandb login` or WANDB_API_KEY sets one")
    return mode


def _given_settings(options: SinkOptions) -> dict[str, str]:
    """Words of log_to such as project=NAME, which are arguments of the library's `init`."""
    return dict(word.split("=", 1) for word in options.config["log_to"] if "=" in word)


def _start(options: SinkOptions, *, finish_timeout: float, mode: Any) -> Any:
    import wandb

    named: dict[str, Any] = {"project": "fsdp_qlora", **_given_settings(options)}
    settings = wandb.Settings(
        silent=True,  # we print the important line
        # capturing the terminal would break the progress bar and could upload secrets
        console="off",
        disable_git=True,  # a remote's URL may hold a token
        save_code=False,
        init_timeout=INIT_SECONDS,
        finish_timeout=finish_timeout,
        finish_timeout_raises=True,
    )
    return wandb.init(
        dir=str(options.output_dir),
        config=plain(options.config),
        **named,
        id=options.run_id,
        resume="allow" if options.run_id else None,
        mode=mode,
        settings=settings,
    )


def _stop(exit_code: int) -> None:
    """Stop wandb's process now, because its exit hook waits without limit.

    If that times out, the hook is removed anyway, and wandb's process ends with ours.
    """
    with contextlib.suppress(Exception):
        import wandb

        within(TEARDOWN_SECONDS, partial(wandb.teardown, exit_code))


def _how_to_upload(run: Any) -> str:
    # otherwise `wandb sync` skips runs started online
    option = "" if run.offline else "--include-online "
    command = f"wandb sync {option}{shlex.quote(str(Path(run.dir).parent))}"
    return (
        "The next start of this run that reaches wandb uploads the rest. To upload it "
        f"yourself: {command}"
    )
