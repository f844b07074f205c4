"""The wandb sink: it can neither stop nor stall training, whatever the network does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from packaging.version import Version

from fsdp_qlora.config.conflicts import wandb_settings
from fsdp_qlora.distributed.supervision.clock import within
from fsdp_qlora.observability.sinks import QueuedSink, SinkOptions, named_numbers, reason
from fsdp_qlora.utils.records import Record, plain

log = logging.getLogger("fsdp_qlora")

# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server has died
# `finish` and wandb's own exit hook block for as long as they may. Hence a time limit on each.
OLDEST_VERSION = "0.31"  # has `finish_timeout` and `login(prompt=False)`, needed for the limits
INIT_SECONDS = 20.0
TEARDOWN_SECONDS = 5.0


class WandbSink(QueuedSink):
    """A wandb run that can neither stop nor stall training.

    Online or offline is decided before it starts. A failure is reported in one line that says how to sync.

    A resumed run is sent the records of metrics.jsonl that the server lacks, and no others. (wandb uploads every
    15 s, so a kill loses the last records.)
    """

    name = "wandb"
    start_seconds = 2 * INIT_SECONDS

    def __init__(self, options: SinkOptions) -> None:
        self._last_eval_step = -1  # the server's last when the run was resumed
        super().__init__(options)

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
        run, line = _start_wandb(options, finish_seconds=self.finish_seconds)
        log.info(line)
        if run is not None:
            self._listen(run)
        return run

    def catch_up(self, earlier: Sequence[Record]) -> None:
        """Send the records of earlier starts that the server lacks; offline it is unknown which these are."""
        if not self.client.offline:
            self._last_eval_step = self.client.summary.get("eval_step", -1)
            super().catch_up(earlier)

    def log(self, record: Record) -> None:
        """Send a record unless the server has it: the server's last row is the one before `starting_step`.

        An evaluation's numbers get names of their own, because its step's numbers are in the same row. If a kill
        separated it from that row, it is sent in the next row; `eval_step` gives its step.
        """
        step, first_step = record["step"], self.client.starting_step
        is_evaluation = "eval_loss" in record
        is_there = step < first_step - is_evaluation or (is_evaluation and step <= self._last_eval_step)
        if not is_there:
            self.client.log(named_numbers(record), step=max(step, first_step))

    def summary(self, values: Record) -> None:
        self.post(lambda: self.client.summary.update(values))

    def finish(self, exit_code: int) -> None:
        self.client.finish(exit_code=exit_code)

    def close(self, exit_code: int) -> None:
        super().close(exit_code)
        _stop_wandb(exit_code)

    def advice(self) -> str:
        return _how_to_upload(self.client) if self.client is not None else ""

    def _listen(self, run: Any) -> None:
        """Read wandb's messages: they are the only sign that the server refuses data for good."""
        import wandb

        def read(record: logging.LogRecord) -> bool:
            if "will not be synced" in record.getMessage():
                self.report_incomplete("the server has refused data")
            return False

        terminal = logging.Logger("wandb")
        terminal.addFilter(read)
        wandb.termsetup(run.settings, terminal)


def _start_wandb(options: SinkOptions, *, finish_seconds: float) -> tuple[Any, str]:
    """Start a wandb run, online if possible; returns it (None if wandb is disabled) and a line for the user."""
    # wandb reports its own errors over the network, and at exit waits 10 s for a server that does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode == "disabled":
        return None, "wandb: disabled by WANDB_MODE."
    problem = why_offline(settings)
    if problem is None:
        try:
            run = _init_wandb(options, finish_seconds, mode="online")
            return run, f"wandb: {run.url}"
        except Exception as error:
            problem = reason(error)
            _stop_wandb(1)  # it still holds the run's id and would refuse a second run with it
    run = _init_wandb(options, finish_seconds, mode="offline")
    return run, f"wandb: offline ({problem}). {_how_to_upload(run)}"


def _init_wandb(options: SinkOptions, finish_seconds: float, *, mode: Literal["online", "offline"]) -> Any:
    import wandb

    named: dict[str, Any] = {"project": "fsdp_qlora", **(wandb_settings(options.config["wandb"]) or {})}
    settings = wandb.Settings(
        silent=True,  # we print the important line
        console="off",  # capturing the terminal would break the progress bar and could upload secrets
        disable_git=True,  # a remote's URL may hold a token
        save_code=False,
        init_timeout=INIT_SECONDS,
        finish_timeout=0.8 * finish_seconds,
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


def _stop_wandb(exit_code: int) -> None:
    """Stop wandb's process now, because its exit hook waits without limit.

    If that times out, the hook is removed anyway, and wandb's process ends with ours.
    """
    with contextlib.suppress(Exception):
        import wandb

        within(TEARDOWN_SECONDS, partial(wandb.teardown, exit_code))


def why_offline(settings: Any) -> str | None:
    """Why an online run cannot work, None if it may."""
    import wandb

    if settings.mode in ("offline", "dryrun"):
        return "requested by WANDB_MODE or `wandb offline`"
    try:
        if not wandb.login(verify=False, prompt=False):  # only looks for a key, wherever wandb may store it
            return f"no API key for {urlsplit(settings.base_url).hostname}: `wandb login` or WANDB_API_KEY sets one"
    except Exception as error:
        return reason(error)
    return None


def _how_to_upload(run: Any) -> str:
    option = "" if run.offline else "--include-online "  # otherwise `wandb sync` skips runs started online
    command = f"wandb sync {option}{shlex.quote(str(Path(run.dir).parent))}"
    return f"The next start of this run that reaches wandb uploads the rest. To upload it yourself: {command}"
