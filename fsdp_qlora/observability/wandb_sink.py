"""The wandb sink: it can neither stop nor stall training, whatever the network does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version

from fsdp_qlora.distributed.supervision.clock import within
from fsdp_qlora.observability.sinks import QueuedSink, SinkOptions, named_numbers, reason
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.records import Record, plain

log = logging.getLogger("fsdp_qlora")

# Measured with wandb 0.31: without a network `wandb.init` blocks for 101 s, and after the server has died
# `finish` and wandb's own exit hook block for as long as they may. Hence a time limit on each.
OLDEST_VERSION = "0.31"  # has `finish_timeout` and `login(prompt=False)`, needed for the limits
INIT_SECONDS = 20.0
TEARDOWN_SECONDS = 5.0


class WandbSink(QueuedSink):
    """A wandb run, which every start of the run continues; offline where it cannot be online.

    wandb uploads every 15 s, so a kill loses the last rows there. The next start sends what follows the server's last
    row. An evaluation that a kill has separated from its step's row is not sent again.
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
        # wandb reports its own errors over the network, and at exit waits 10 s for a server that does not answer.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        limit, problem = 0.8 * self.finish_seconds, ""
        try:
            run = _start(options, finish_timeout=limit, mode=online_mode())
        except Exception as error:
            problem = f" ({reason(error)})"
            _stop(1)  # it still holds the run's id and would refuse a second run with it
            run = _start(options, finish_timeout=limit, mode="offline")
        log.info("wandb: %s", f"offline{problem}. {_how_to_upload(run)}" if run.offline else run.url or "disabled")
        return run

    def lacking(self, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [] if self.client.offline else [one for one in earlier if one["step"] >= self.client.starting_step]

    def log(self, record: Record) -> None:
        """Send a record; wandb drops one that is before its next row. An evaluation's numbers are in its step's row."""
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


def online_mode() -> Any:
    """The mode of WANDB_MODE and `wandb offline`. Raises UserError if it is online and there is no API key."""
    import wandb

    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    # It only looks for a key, wherever wandb may store it.
    if mode == "online" and not wandb.login(verify=False, prompt=False):
        raise UserError("no API key: `wandb login` or WANDB_API_KEY sets one")
    return mode


def _start(options: SinkOptions, *, finish_timeout: float, mode: Any) -> Any:
    import wandb

    named: dict[str, Any] = {
        "project": "fsdp_qlora",
        **dict(word.split("=", 1) for word in options.config["log_to"] if "=" in word),
    }
    settings = wandb.Settings(
        silent=True,  # we print the important line
        console="off",  # capturing the terminal would break the progress bar and could upload secrets
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
    option = "" if run.offline else "--include-online "  # otherwise `wandb sync` skips runs started online
    command = f"wandb sync {option}{shlex.quote(str(Path(run.dir).parent))}"
    return f"The next start of this run that reaches wandb uploads the rest. To upload it yourself: {command}"
