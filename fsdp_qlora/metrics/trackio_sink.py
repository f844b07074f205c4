"""The trackio sink: a run in trackio's own database on this machine, or where its environment variables say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from fsdp_qlora.metrics.background import within
from fsdp_qlora.metrics.sinks import METRICS_FILE, GuardedSink, Record, SinkOptions, named_numbers, plain, read_records

log = logging.getLogger("fsdp_qlora")

_START_SECONDS = 30.0  # with TRACKIO_SPACE_ID it asks the hub
_FINISH_SECONDS = 15.0
_PROJECT = "fsdp_qlora"


class TrackioSink(GuardedSink):
    """A trackio run, of the run's name and id, that can neither stop nor stall training.

    trackio sends from threads of its own. A resumed run gives it the records that it lacks, and no others.
    """

    name = "trackio"

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._last_step = -1  # that trackio has from earlier starts
        self.attempt(partial(self._open, options))

    def _open(self, options: SinkOptions) -> None:
        self.client = within(_START_SECONDS, partial(_start, options))
        self._last_step = getattr(self.client, "_next_step", 0) - 1  # the library has no public name for it
        project = options.project_name or _PROJECT
        log.info("trackio: run %s; `trackio show --project %s` shows it", self.client.name, project)
        for record in read_records(options.output_dir / METRICS_FILE):
            self._log(record)

    @classmethod
    def problem(cls) -> str | None:
        return None if importlib.util.find_spec("trackio") else "trackio is not installed. Run `pip install trackio`"

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._log(record)

    def evaluation(self, record: Record) -> None:
        self._log(record)

    def close(self, exit_code: int) -> None:
        self.guard(lambda: within(_FINISH_SECONDS, partial(_quietly, self.client.finish)))

    def _log(self, record: Record) -> None:
        """Pass a record on unless trackio has it; an evaluation comes after its step."""
        if record["step"] > self._last_step:
            numbers = {name: n for name, n in named_numbers(record).items() if not name.endswith("step")}
            self.guard(lambda: self.client.log(numbers, step=record["step"]))


def _start(options: SinkOptions) -> Any:
    import trackio

    name = options.name or options.output_dir.resolve().name
    return _quietly(
        partial(
            trackio.init,
            project=options.project_name or _PROJECT,
            name=f"{name}-{options.run_id[:8]}" if options.run_id else name,
            group=options.group,
            config=plain(options.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    )


def _quietly(call: Callable[[], Any]) -> Any:
    """Without the lines that the library prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call()
