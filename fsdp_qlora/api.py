"""Training from Python, as in a notebook: the options, rules and errors of the command line."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from uuid import UUID

import yaml

from fsdp_qlora.commands.run_config import make_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.text import stored_values
from fsdp_qlora.distributed.supervision import launch
from fsdp_qlora.utils.errors import ENDINGS, RunStopped, TrainingError, UserError
from fsdp_qlora.utils.files import ROWS_IN_MEMORY, cache_folder, read_json, staged_file
from fsdp_qlora.utils.records import read_records
from fsdp_qlora.utils.run_files import METRICS_FILE, STATUS

if TYPE_CHECKING:
    from fsdp_qlora.config.train_options import TrainOptions  # a file of types alone


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    output_dir: its folder, with the adapter or the model. state: finished; over_budget, when
    max_hours has ended it with a checkpoint, from which the same call resumes; planned, after
    dry_run. steps: optimizer steps done, those of earlier starts included. losses: the training
    loss of each, in nats. eval_losses: step -> held-out loss, in nats.
    """

    output_dir: Path
    state: str
    steps: int
    losses: list[float]
    eval_losses: dict[int, float]

    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl: one dict per step and per evaluation."""
        return read_records(self.output_dir / METRICS_FILE)


def train(
    config: TrainConfig | str | Path | None = None, **options: Unpack[TrainOptions]
) -> TrainResult:
    """Fine-tune a model, as `fsdp-qlora train` does with these options.

    For example `train(model_name="...", dataset="rows.jsonl")`.

    The run has its own processes, one per visible GPU (nproc_per_node=1 for one). They end with it,
    so their memory is free afterwards and their failure does not end this process. In a process
    that torchrun has started, `train` is one rank of that run.

    Args:
        config: options that the keywords replace: a YAML file, a name that `fsdp-qlora configs`
            lists, or a TrainConfig. Editors complete, and type checkers check, its fields and the
            keywords.
        options: the options of `fsdp-qlora train --help`. Lists may be lists. `dataset` and
            `eval_dataset` may be rows: a list of dicts, a `datasets.Dataset` or a pandas frame.
            They are kept in the cache, in a file named by their content, so that the same rows
            resume a run.
    Raises:
        UserError: bad input.
        TrainingError: the run cannot continue, or a process of it has died.
        RunStopped: a signal has stopped it, with a checkpoint.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop button, has stopped it, with a checkpoint.
    """
    given: dict[str, Any] = dict(options)
    for name in ("dataset", "eval_dataset"):
        if name in given:
            given[name] = _in_file(given[name])
    run_config = make_train_config(config, given)
    if launch.is_started_by_others():
        # imported here: it imports torch, which a notebook needs only if it is a rank itself
        from fsdp_qlora.run.train import run

        run(run_config)
    else:
        _run_workers(run_config)
    output_dir = Path(run_config.output_dir)
    if run_config.is_preview:
        return TrainResult(output_dir, "planned", 0, [], {})
    status = read_json(output_dir / STATUS)
    records = read_records(output_dir / METRICS_FILE)
    return TrainResult(
        output_dir,
        state=status.get("state", "finished"),
        steps=status.get("step", 0),
        losses=[record["loss"] for record in records if "loss" in record],
        eval_losses={
            record["step"]: record["eval_loss"] for record in records if "eval_loss" in record
        },
    )


def _in_file(rows: Any) -> Any:
    """The path of a file with these rows; anything else than rows is returned as it is."""
    if isinstance(rows, Mapping):
        raise UserError(
            f"dataset has the splits {', '.join(map(str, rows))}. Give one, such as "
            "dataset['train']."
        )
    # By their attributes: neither pandas nor datasets is imported for a list or a file's name.
    if hasattr(rows, "iterrows"):
        # astype: a column of numbers cannot hold None, and would keep NaN for what is missing
        frame = rows.astype(object).where(rows.notna(), None)
        rows = [_without_nulls(row) for row in frame.to_dict("records")]
    elif hasattr(rows, "column_names"):
        from fsdp_qlora.data.sources.source import number_tables  # slow to import

        rows = [row for _, row in number_tables(rows, "dataset")]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return rows
    lines: list[str] = []
    try:
        for row in rows:
            lines.append(json.dumps(_with_plain_objects(row), default=_as_json) + "\n")
    except (TypeError, ValueError, OSError, RecursionError) as error:
        raise UserError(
            f"dataset: row {len(lines) + 1} cannot be written as JSON ({error})."
        ) from error
    text = "".join(lines)
    # named by its content: the same rows are the same dataset, so that their run can be resumed
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_folder() / ROWS_IN_MEMORY / f"{digest}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as partial:
        partial.write_text(text)
    return str(path.resolve())


def _with_plain_objects(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row whose objects and lists, such as calls of tools, have values as those of a table."""
    from fsdp_qlora.data.content import plain_value  # slow to import

    return {
        name: plain_value(value) if isinstance(value, Mapping | list | tuple) else value
        for name, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    """A value of a frame without nulls in its objects: a table has null for a missing key."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _as_json(value: Any) -> Any:
    """A value in a type of JSON.

    An array becomes a list, an image or bytes a data URL, a date or a decimal text.
    """
    if hasattr(value, "tolist"):  # of numpy or torch
        return value.tolist()
    if hasattr(value, "getexif"):  # of Pillow
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(value)
        content = io.BytesIO()
        # TIFF does not keep these two modes
        if upright.mode in ("HSV", "YCbCr"):
            upright = upright.convert("RGB")
        # TIFF keeps all other modes without loss, such as CMYK, which PNG has not
        upright.save(content, "TIFF", compression="tiff_adobe_deflate")
        value = content.getvalue()
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    if isinstance(value, (date, time, Decimal, UUID, Path)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not among the types that rows can have")


def _run_workers(config: TrainConfig) -> None:
    """Run in new processes, and raise the error that ended them."""
    with tempfile.TemporaryDirectory(prefix="fsdp_qlora_") as folder, _signals_as_before():
        path = Path(folder) / "options.yaml"
        path.write_text(yaml.safe_dump(stored_values(vars(config))))  # null means the default
        end = launch.run_in_workers(config, ["--config", os.fspath(path)])
    state = "failed"
    for name, ending in ENDINGS.items():
        if ending.exit_code == end.status:
            state = name
            break
    if state == "interrupted":
        raise KeyboardInterrupt(end.reason)
    if state == "bad_input":
        raise UserError(end.reason)
    if state == "preempted":
        raise RunStopped(state, end.reason)
    if state not in ("finished", "over_budget"):
        raise TrainingError(end.reason)


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """Put back the handlers that torch's agent replaces: later, Ctrl-C must be what it was."""
    # Python sets handlers in the main thread alone, so torch's agent sets none in another.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signal_number: signal.getsignal(signal_number) for signal_number in signal.valid_signals()
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            # None: a handler that C code has set, which Python cannot set again
            if handler is not None and signal.getsignal(signal_number) is not handler:
                signal.signal(signal_number, handler)
