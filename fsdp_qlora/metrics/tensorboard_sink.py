"""The TensorBoard sink: event files in the run's folder."""

from __future__ import annotations

import importlib.util
import logging
from functools import partial

from fsdp_qlora.metrics.sinks import METRICS_FILE, GuardedSink, Record, SinkOptions, named_numbers, read_records

log = logging.getLogger("fsdp_qlora")

FOLDER = "tensorboard"
_QUEUE_RECORDS = 10_000  # held while the disk does not answer


class TensorBoardSink(GuardedSink):
    """Scalars by step in `tensorboard/` of the run's folder, under the names that wandb has; in float32.

    A resumed run goes on where metrics.jsonl does: TensorBoard is told to leave out what came after it.
    """

    name = "tensorboard"

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self.attempt(partial(self._open, options))

    @classmethod
    def problem(cls) -> str | None:
        if importlib.util.find_spec("tensorboard"):
            return None
        return "tensorboard is not installed. Run `pip install tensorboard`"

    def step(self, record: Record, eta_seconds: float | None) -> None:
        self.guard(partial(self._add, record))

    def evaluation(self, record: Record) -> None:
        self.guard(partial(self._add, record))

    def flush(self) -> None:
        self.guard(lambda: self.client.flush())

    def close(self, exit_code: int) -> None:
        self.guard(lambda: self.client.close())

    def _open(self, options: SinkOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = options.output_dir / FOLDER
        records = read_records(options.output_dir / METRICS_FILE)
        is_new = not folder.exists() or not any(folder.iterdir())
        next_step = 1 + max((record["step"] for record in records), default=-1)
        self.client = SummaryWriter(str(folder), purge_step=None if is_new else next_step, max_queue=_QUEUE_RECORDS)
        if is_new:
            lines = "\n".join(f"    {name}: {value}" for name, value in options.config.items())
            self.client.add_text("settings", lines, 0)
            for record in records:  # of starts that did not log here
                self._add(record)
        log.info("tensorboard: run `tensorboard --logdir %s` to see it", folder)

    def _add(self, record: Record) -> None:
        for name, number in named_numbers(record).items():
            if not name.endswith("step"):
                self.client.add_scalar(name, number, record["step"])
