"""A run's metrics: the table of sinks, and the log that feeds them.

`metrics.jsonl` is the complete record and is always written. No other sink may stop or stall
training, least of all wandb, which needs a network (see sinks.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from fsdp_qlora.config.marks import save_times
from fsdp_qlora.observability.sinks import (
    Sink,
    SinkOptions,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named, staged_file
from fsdp_qlora.utils.records import Record, is_evaluation, numbers_in, parse_record, plain
from fsdp_qlora.utils.run_files import METRICS_FILE, ROLLOUTS_FILE, SAMPLES_FILE

log = logging.getLogger("fsdp_qlora")


class MetricLog:
    """Passes each record to every sink. Without sinks (on all ranks but 0) every call does nothing.

    As a context manager it closes itself, and marks the run as failed if an exception leaves the
    block.
    """

    def __init__(self, sinks: Sequence[Sink], options: SinkOptions) -> None:
        self._sinks = list(sinks)
        self._total_steps = options.total_steps
        self._config = options.config
        self._opened = time.monotonic()
        self._evaluation_seconds = 0.0  # of the evaluation before the first step, with its samples
        self.save_seconds = 0.0  # that training waited for the last save
        self._num_steps = 0
        self._has_evaluated = False
        # seconds of the last steps, without the process's first: warm-up
        self._recent: deque[float] = deque(maxlen=50)

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self.close(exit_code=0 if exception_type is None else 1)

    def step(self, record: Record) -> None:
        """Log one optimizer step: the record that `Trainer.train_step` returns."""
        if not self._sinks:
            return
        record = plain(record)
        num_left = max(self._total_steps - record["step"], 0)
        seconds = sum(record.get(name) or 0.0 for name in ("step_seconds", "generation_seconds"))
        self._num_steps += 1
        if self._num_steps > 1:
            self._recent.append(seconds)
        elif self._has_evaluated:
            self._evaluation_seconds = max(0.0, time.monotonic() - self._opened - seconds)
        save_steps, minutes = save_times(self._config.get("save_every", ()))
        # At the end the run evaluates and saves in any case.
        evaluations, saves = (
            -(-self._total_steps // every) - record["step"] // every if every else 1
            for every in (self._config.get("eval_steps"), save_steps)
        )
        steps_seconds = num_left * sum(self._recent) / len(self._recent) if self._recent else None
        if steps_seconds and minutes:
            saves += int(steps_seconds / 60 / minutes)
        others = evaluations * self._evaluation_seconds + saves * self.save_seconds
        eta_seconds = None if steps_seconds is None else steps_seconds + others
        for sink in self._sinks:
            sink.step(record, eta_seconds)
        # Once, when two steps have shown the pace.
        if self._num_steps == 3 and steps_seconds and eta_seconds:
            more = ""
            if self._evaluation_seconds:
                more += f", {evaluations} evaluations of {self._evaluation_seconds:.0f} s"
            if self.save_seconds:
                more += f", {saves} saves of {self.save_seconds:.1f} s"
            else:
                more += "; without saving"
            log.info(
                f"Estimated time: {_clock(time.monotonic() - self._opened + eta_seconds)} in "
                f"total, {_clock(eta_seconds)} left ({num_left:,} steps of "
                f"{steps_seconds / num_left:.2f} s{more})."
            )

    def evaluation(self, record: Record) -> None:
        """Log one evaluation.

        record: step, epoch, eval_loss, perplexity, num_target_tokens, or eval_reward, or both;
        eval_sets and eval_tasks by name.
        """
        if not self._sinks:
            return
        record = plain(record)
        self._has_evaluated = True
        for sink in self._sinks:
            sink.evaluation(record)
        log.info(_line(record, ("step", *EVALUATION_COLUMNS)))
        for name, result in record.get("eval_sets", {}).items():
            log.info(f"  {name}: {_line(result, EVALUATION_COLUMNS)}")
        numbers = numbers_in(record.get("eval_tasks", {}))
        scores = _scores_of_functions(record)
        if len(scores) > 1:
            numbers = scores | numbers
        if numbers:
            log.info("  " + "  ".join(f"{name} {value:.4f}" for name, value in numbers.items()))

    def flush(self) -> None:
        """Make every record so far durable: a checkpoint must not outlive the records before it."""
        for sink in self._sinks:
            sink.flush()

    def summary(self, values: Record) -> None:
        """Set the run's final values (wandb's summary)."""
        values = plain(values)
        for sink in self._sinks:
            sink.summary(values)

    def close(self, exit_code: int = 0) -> None:
        """Close every sink, in bounded time. A second call does nothing."""
        sinks = self._sinks
        self._sinks = []
        for sink in reversed(sinks):
            sink.close(exit_code)


def refuse_sinks(names: Sequence[str]) -> None:
    """Raise UserError if a sink in `log_to` cannot be used here, before anything is loaded."""
    problems = [SINKS[name].problem() for name in names if name in SINKS]
    problems = [problem for problem in problems if problem]
    if problems:
        raise UserError(
            "\n".join(f"log_to: {problem}, or take it out of log_to." for problem in problems)
        )


def open_metric_log(sinks: Sequence[str], options: SinkOptions, *, is_rank_0: bool) -> MetricLog:
    """Open metrics.jsonl and the named sinks, which `refuse_sinks` has passed.

    Args:
        is_rank_0: only rank 0 opens anything; the other ranks get a log that does nothing.
    """
    if not is_rank_0:
        return MetricLog([], options)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    sinks = [word for word in sinks if word in SINKS]  # others are settings of wandb
    # metrics.jsonl first, since it is the complete record, and each sink once.
    names = ["jsonl", *sinks]
    # A progress bar if nothing else shows that the run is alive.
    if set(sinks) <= ELSEWHERE:
        names.append("tqdm")
    opened = [SINKS[name](options) for name in dict.fromkeys(names)]
    return MetricLog(opened, options)


# Key of a record -> its text. Keys that a record lacks are left out.
COLUMNS: dict[str, str] = {
    "step": "step {}",
    "epoch": "epoch {:.2f}",
    "loss": "loss {:7.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "perplexity": "perplexity {:.2f}",
    "reward": "reward {:.4f}",
    "eval_reward": "eval_reward {:.4f}",
    "rewards/accuracies": "accuracy {:.3f}",
    "rewards/margins": "margin {:.4f}",
    "grad_norm": "grad_norm {:8.4f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:>8,.0f} tokens/s",
    "step_seconds": "{:7.2f} s",
    "memory_gib": "{:6.2f} GiB",
    "num_target_tokens": "{:,} target tokens",
}
# of sampled answers, and of preferences
REWARDS = ("reward", "rewards/accuracies", "rewards/margins")
STEP_COLUMNS = (
    "epoch",
    "loss",
    *REWARDS,
    "grad_norm",
    "lr",
    "tokens_per_second",
    "step_seconds",
    "memory_gib",
)
BAR_COLUMNS = ("loss", *REWARDS[:2], "lr", "tokens_per_second")
# In a narrow terminal the bar is cut first and then the end, where the time is.
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"
EVALUATION_COLUMNS = (
    "epoch",
    "eval_loss",
    "perplexity",
    "eval_reward",
    *REWARDS,
    "num_target_tokens",
)


def _line(record: Record, columns: Sequence[str]) -> str:
    """One line of text; of nested numbers (memory per rank) the largest is shown."""
    parts = []
    for column in columns:
        if column in record:
            largest = max(numbers_in(record[column]).values(), default=math.nan)
            parts.append(COLUMNS[column].format(largest))
    return "  ".join(parts)


def _scores_of_functions(record: Record) -> dict[str, float]:
    """The mean score of each function in an evaluation's record, by the function's name."""
    scores = {}
    for name, value in record.items():
        if name.startswith("eval_rewards/") and name.endswith("/mean") and value is not None:
            scores[name.removeprefix("eval_rewards/").removesuffix("/mean")] = value
    return scores


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class JsonlSink(Sink):
    """metrics.jsonl: one JSON object per record, in the file as soon as the call returns.

    If the disk is full, lines are held and written with the next record, so the file has no gaps.
    """

    def __init__(self, options: SinkOptions) -> None:
        # Without a buffer, so that a kill loses no record; O_APPEND, so that no write overwrites.
        path = options.output_dir / METRICS_FILE
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._pending = b""

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def close(self, exit_code: int) -> None:
        self._write_pending()
        os.close(self._descriptor)

    def log(self, record: Record) -> None:
        was_behind = bool(self._pending)
        self._pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        error = self._write_pending()
        if error and not was_behind:
            log.info(
                f"{METRICS_FILE} cannot be written ({error}). Its lines are held and written when "
                "possible."
            )

    def _write_pending(self) -> str | None:
        """Write as many pending bytes as possible; returns the error that stopped it, if any."""
        try:
            # A nearly full disk takes a part of what is written, so the rest is kept.
            while self._pending:
                written = os.write(self._descriptor, self._pending)
                self._pending = self._pending[written:]
        except OSError as error:
            return error.strerror
        return None


def copy_records(source: Path, output_dir: Path) -> None:
    """Start metrics.jsonl, samples.jsonl and rollouts.jsonl as copies of the parent run's files."""
    for name in (METRICS_FILE, SAMPLES_FILE, ROLLOUTS_FILE):
        if (source / name).is_file():
            with staged_file(output_dir / name) as partial:
                shutil.copyfile(source / name, partial)


def cut_metrics(output_dir: Path, step: int, last_eval_step: int) -> None:
    """Remove the records after a checkpoint from metrics.jsonl: the run will write them again.

    Lines that are no records are removed too, with a message.

    Args:
        step: of the checkpoint.
        last_eval_step: of the last evaluation before the checkpoint was saved.
    """
    path = output_dir / METRICS_FILE
    if not path.exists():
        return
    kept_lines = []
    num_damaged = 0
    # Without what follows the last newline: a crash may have left a line unfinished.
    for line in read_named(path).split(b"\n")[:-1]:
        record = parse_record(line)
        if record is None:
            num_damaged += 1
        elif record["step"] <= (last_eval_step if is_evaluation(record) else step):
            kept_lines.append(line)
    if num_damaged:
        log.info("%s: %d damaged line(s) were removed.", METRICS_FILE, num_damaged)
    with staged_file(path) as partial:
        partial.write_bytes(b"".join(line + b"\n" for line in kept_lines))


class _Lines:
    """A stream that writes each state of a bar as a separate line, for a file or a pipe."""

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
            bar_format=BAR,
            file=None if is_terminal else _Lines(),
            dynamic_ncols=is_terminal,
            mininterval=0.1 if is_terminal else 30.0,
            maxinterval=10.0 if is_terminal else 30.0,
        )
        self._is_new = True

    def step(self, record: Record, eta_seconds: float | None) -> None:
        step = record["step"]
        # a resumed run starts in the middle; earlier steps must not count towards the pace
        if self._is_new:
            self._bar.initial = self._bar.n = self._bar.last_print_n = step - 1
            self._is_new = False
        self._bar.set_postfix_str(" ".join(_line(record, BAR_COLUMNS).split()), refresh=False)
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


SINKS: dict[str, type[Sink]] = {
    "tqdm": TqdmSink,
    "stdout": StdoutSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "tensorboard": TensorBoardSink,
    "jsonl": JsonlSink,
}

ELSEWHERE = {"wandb", "trackio", "tensorboard"}  # sinks that show nothing in the terminal
