"""The TensorBoard sink: event files in the run's folder."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from fsdp_qlora.metrics.sinks import METRICS_FILE, Record, Sink, SinkOptions, named_numbers, read_records

log = logging.getLogger("fsdp_qlora")

FOLDER = "tensorboard"
_QUEUE_RECORDS = 10_000  # held while the disk does not answer


class TensorBoardSink(Sink):
    """Scalars by step in `tensorboard/` of the run's folder, under the names that wandb has; in float32.

    A resumed run goes on where metrics.jsonl does: TensorBoard is told to leave out what came after it. A failure is
    reported once, and nothing more is written.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._writer: Any = None
        try:
            self._open(options)
        except Exception as error:
            self._give_up(error)

    @classmethod
    def problem(cls) -> str | None:
        if importlib.util.find_spec("tensorboard"):
            return None
        return "tensorboard is not installed. Run `pip install tensorboard`"

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self._guard(partial(self._add, record))

    def evaluation(self, record: Record) -> None:
        self._guard(partial(self._add, record))

    def flush(self) -> None:
        self._guard(lambda: self._writer.flush())

    def close(self, exit_code: int) -> None:
        self._guard(lambda: self._writer.close())

    def _open(self, options: SinkOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = options.output_dir / FOLDER
        records = read_records(options.output_dir / METRICS_FILE)
        is_new = not folder.exists() or not any(folder.iterdir())
        next_step = 1 + max((record["step"] for record in records), default=-1)
        self._writer = SummaryWriter(str(folder), purge_step=None if is_new else next_step, max_queue=_QUEUE_RECORDS)
        if is_new:
            lines = "\n".join(f"    {name}: {value}" for name, value in options.config.items())
            self._writer.add_text("settings", lines, 0)
            for record in records:  # of starts that did not log here
                self._add(record)
        log.info("tensorboard: run `tensorboard --logdir %s` to see it", folder)

    def _add(self, record: Record) -> None:
        for name, number in named_numbers(record).items():
            if not name.endswith("step"):
                self._writer.add_scalar(name, number, record["step"])

    def _guard(self, call: Callable[[], object]) -> None:
        if self._writer is None:
            return
        try:
            call()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        log.info("tensorboard: no more is written there (%s). All numbers are in %s.", error, METRICS_FILE)
