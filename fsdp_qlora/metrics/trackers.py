"""The sinks of TensorBoard and trackio: curves on this machine, under the names that wandb has."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fsdp_qlora.metrics.sinks import QueuedSink, Record, SinkOptions, curves, plain

log = logging.getLogger("fsdp_qlora")

FOLDER = "tensorboard"


class TensorBoardSink(QueuedSink):
    """Scalars by step in `tensorboard/` of the run's folder, in float32.

    A resumed run continues where metrics.jsonl does: TensorBoard discards what came after it.
    """

    name = "tensorboard"

    @classmethod
    def problem(cls) -> str | None:
        return _missing_package(cls.name)

    def open(self, options: SinkOptions, earlier: Sequence[Record]) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = options.output_dir / FOLDER
        self._is_new = not folder.exists() or not any(folder.iterdir())
        next_step = 1 + max((record["step"] for record in earlier), default=-1)
        writer = SummaryWriter(str(folder), purge_step=None if self._is_new else next_step)
        if self._is_new:
            writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in options.config.items()), 0)
        log.info("tensorboard: run `tensorboard --logdir %s` to see it", folder)
        return writer

    def catch_up(self, earlier: Sequence[Record]) -> None:
        if self._is_new:
            super().catch_up(earlier)

    def log(self, record: Record) -> None:
        for name, number in curves(record).items():
            self.client.add_scalar(name, number, record["step"])

    def flush(self) -> None:
        self.post(lambda: self.client.flush())

    def finish(self, exit_code: int) -> None:
        self.client.close()


class TrackioSink(QueuedSink):
    """A run in trackio's own database on this machine, or where its environment variables say.

    A resumed run sends the records that trackio lacks, and no others.
    """

    name = "trackio"

    @classmethod
    def problem(cls) -> str | None:
        return _missing_package(cls.name)

    def open(self, options: SinkOptions, earlier: Sequence[Record]) -> Any:
        import trackio

        project, name = options.project_name or "fsdp_qlora", options.name or options.output_dir.resolve().name
        run: Any = _without_output(
            partial(
                trackio.init,
                project=project,
                name=f"{name}-{options.run_id[:8]}" if options.run_id else name,
                group=options.group,
                config=plain(options.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )
        self._next_step = getattr(run, "_next_step", 0)  # the library has no public name for it
        log.info("trackio: run %s; `trackio show --project %s` shows it", run.name, project)
        return run

    def log(self, record: Record) -> None:
        if record["step"] >= self._next_step:
            self.client.log(curves(record), step=record["step"])

    def finish(self, exit_code: int) -> None:
        _without_output(self.client.finish)


def _missing_package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed. Run `pip install {name}`"


def _without_output(call: Callable[[], Any]) -> Any:
    """Call the library without the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return call()
