"""Runs of train.py whose ranks can be killed, and faults that are put into a rank
before it starts.
"""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

from stand_in.environment import free_port
from tests.helpers.metrics import metrics_of
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, rank_process

RANKS = 2
HANG_SECONDS = 600.0  # a limit against hangs only: the machine may be busy
# NF4 base, dropout, accumulation, two epochs with a short last step each: 2 x 5 steps.
OPTIONS = {
    "precision": "fp32",
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_epochs": 2,
    "eval_fraction": 0.1,
    "eval_steps": 4,
    "save_every": 3,
    "lr": 1e-3,
    "log_to": "stdout",
    "quant_cache": "off",
}

Fault = Callable[[], object]
Same = Callable[[Path], None]


def inputs(models: Models, folder: Path) -> dict[str, object]:
    """Options with a tiny model and 21 rows, 2 of them held out."""
    return {
        **OPTIONS,
        "model_name": models(),
        "dataset": write_rows(folder / "rows.jsonl", make_rows(21)),
    }


# --- faults ---

INJECTED = "A fault was injected."
"""What a rank whose fault has come prints."""


def on(*ranks: int) -> bool:
    """Whether this process is one of these ranks; any, if none is given."""
    return not ranks or int(os.environ["RANK"]) in ranks


def at_step(step: int, happens: Fault, *ranks: int, during: str = "train_step") -> None:
    """Let something happen on some ranks, or on all, whenever a step (from 0) comes to this method
    of its trainer.
    """
    from fsdp_qlora.training.trainer import Trainer

    original = getattr(Trainer, during)

    def wrapped(self: Trainer, *args: object, **named: object) -> object:
        now = args[0] if isinstance(args[0], int) else getattr(args[0], "step", self.heartbeat.step)
        if now == step and on(*ranks):
            happens()
        return original(self, *args, **named)

    setattr(Trainer, during, wrapped)


def hang() -> NoReturn:
    while True:
        time.sleep(0.1)


def fill_disk(folder: Path, most: int) -> None:
    """Let the checkpoints' folder have room for `most` tensor files."""
    from fsdp_qlora.checkpoint import train_state

    original = train_state.write_tensors

    def write_tensors(path: Path, forms: Any, values: Any) -> Any:
        if len(list(folder.glob("*/state_*.safetensors"))) >= most:
            for _ in values:
                pass
            print(INJECTED, flush=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, forms, values)

    train_state.write_tensors = write_tensors


def write_slowly() -> None:
    """Let a thread write every checkpoint, however small it is, and take longer than a step."""
    from fsdp_qlora.checkpoint import saving, train_state

    original = train_state.write_tensors

    def write_tensors(*content: Any) -> Any:
        time.sleep(0.5)
        return original(*content)

    saving.MIN_BACKGROUND_BYTES = 0
    train_state.write_tensors = write_tensors


def together(*faults: Fault) -> None:
    for fault in faults:
        fault()


def be_impatient() -> None:
    from fsdp_qlora.distributed.supervision import presence

    presence._SILENT_SECONDS = 3.0
    presence._PULSE_SECONDS = 0.5


KILLED = partial(signal.raise_signal, signal.SIGKILL)


def _train_with(argv: list[str], fault: Fault | None) -> int:
    import torch

    import train

    if fault is not None:
        fault()
    status = train.main(argv)
    assert not torch.distributed.is_initialized()  # its threads would outlive Python
    return status


# --- runs ---


class Job:
    """One start of train.py on some ranks, each in a forked process. `fault(*arguments)` runs in
    each rank first.
    """

    def __init__(
        self,
        options: dict[str, object],
        logs: Path,
        *,
        ranks: int = RANKS,
        fault: Callable[..., object] | None = None,
        arguments: tuple = (),
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        fault = partial(fault, *arguments) if fault else None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preload"])
        port = free_port()
        self.logs = [logs / f"rank{rank}.log" for rank in range(ranks)]
        self.processes = [
            context.Process(
                target=rank_process,
                args=(
                    _train_with,
                    (flags(**options), fault),
                    rank,
                    ranks,
                    port,
                    str(self.logs[rank]),
                ),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def wait(self, seconds: float = HANG_SECONDS) -> list[int]:
        """Exit statuses. When one rank ends the others are given a minute; torchrun gives them some
        seconds.
        """
        end = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.is_alive(), f"still running after {seconds} s:\n{self.output()}"
        for signal_of_death in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if signal_of_death and process.is_alive():
                    os.kill(process.pid or 0, signal_of_death)
                process.join(60 if signal_of_death is None else 5)
        return [
            process.exitcode if process.exitcode is not None else -1 for process in self.processes
        ]

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())


@contextlib.contextmanager
def ended(job: Job) -> Iterator[Job]:
    """Let no process of a failed test live on."""
    try:
        yield job
    finally:
        for process in job.processes:
            if process.is_alive():
                process.kill()


def finish(
    options: dict[str, object], logs: Path, statuses: list[int] | None = None, **how: Any
) -> Job:
    """A start whose ranks end with these statuses, all 0 where none are given."""
    with ended(Job(options, logs, **how)) as job:
        found = job.wait()
    assert found == (statuses or [0] * len(found)), f"{job.output()[-6000:]}\nexit statuses {found}"
    return job


def run(
    options: dict[str, object], logs: Path, statuses: list[int] | None = None, **how: Any
) -> str:
    """The output of a start whose ranks end with these statuses, all 0 where none are given."""
    return finish(options, logs, statuses, **how).output()


def adapter(output_dir: Path) -> str:
    """A hash of the adapter's file, byte for byte."""
    return hashlib.sha256((output_dir / "adapter_model.safetensors").read_bytes()).hexdigest()


# What may differ between two runs with equal numbers, and what depends on how rows are split.
_TIMES = {
    "tokens_per_second",
    "step_seconds",
    "generation_seconds",
    "memory_gib",
    "useful_of_computed",
    "useful_of_lock_step",
    "recompute",
}


def numbers(output_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the times; every line must be whole."""
    return [
        {name: value for name, value in record.items() if name not in _TIMES}
        for record in metrics_of(output_dir)
    ]


def status(output_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output_dir / "status.json").read_text())
    return content


def wait_for(condition: Callable[[], object], seconds: float = HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def steps_done(output_dir: Path) -> int:
    path = output_dir / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0
