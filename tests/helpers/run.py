"""Runs of train.py on several ranks, each in a forked process."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stand_in.environment import free_port
from tests.helpers.models import PROBE

ROOT = Path(__file__).resolve().parents[2]


def all_slow_but(quick: str, cases: Iterable[str], nightly: Iterable[str] = ()) -> list[Any]:
    """The cases of a test, all but one for --slow alone, and some for --nightly alone."""
    import pytest  # not in every rank

    tiers: dict[str, Any] = {quick: []} | {case: pytest.mark.nightly for case in nightly}
    return [pytest.param(case, marks=tiers.get(case, pytest.mark.slow)) for case in cases]


def flags(**options: object) -> list[str]:
    """Options as a command line: flags(batch_size=2) -> ["--batch_size", "2"]."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def rank_process(
    target: Callable[..., int],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    log: str,
) -> None:
    """One rank in a process of its own, as torchrun would start it, its output going to a file,
    libraries' too.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    status = 1
    with (
        open(log, "w", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            status = target(*args)
        except BaseException:
            traceback.print_exc()
    os._exit(status)


def on_ranks(
    world_size: int, target: Callable[..., int], args: tuple[Any, ...], folder: Path
) -> tuple[list[int], str]:
    """Call target(*args) -> exit status on `world_size` ranks in forked processes: no import is
    paid again.

    Returns:
        The ranks' exit statuses and all their output. When one fails the others are ended, as
        torchrun does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    port = free_port()
    logs = [str(folder / f"rank{rank}.log") for rank in range(world_size)]
    processes = [
        context.Process(
            target=rank_process,
            args=(target, args, rank, world_size, port, logs[rank]),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.05)
        if any(process.exitcode for process in processes):
            for seconds, end in ((5, "terminate"), (60, "kill")):
                for process in processes:
                    process.join(seconds)
                    getattr(process, end)()
    statuses = [process.exitcode if process.exitcode is not None else -1 for process in processes]
    return statuses, "\n".join(Path(log).read_text() for log in logs if Path(log).exists())


def train_rank(argv: list[str], logits_file: Path | None = None) -> int:
    """What one rank of `run_ranks` does."""
    import train
    from fsdp_qlora.export import save_results as saving
    from fsdp_qlora.export.values import LiveValues

    if logits_file is not None:
        save = saving.save_adapter

        def save_with_logits(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            # a checkpoint's, saved by rank 0 alone
            if not isinstance(kwargs["values"], LiveValues):
                save(model, *args, **kwargs)
                return
            model.eval()
            with torch.no_grad():
                logits = model(input_ids=PROBE, use_cache=False).logits
            if kwargs["values"].keeps:
                save_file({"logits": logits.clone()}, logits_file)
            save(model, *args, **kwargs)

        saving.save_adapter = save_with_logits
    return train.main(argv)


def run_ranks(
    world_size: int, argv: list[str], folder: Path, logits_file: Path | None = None
) -> tuple[list[int], str]:
    """Run train.py's main on `world_size` ranks; the trained model's logits of PROBE go to
    `logits_file`.
    """
    return on_ranks(world_size, train_rank, (argv, logits_file), folder)


def train_ok(
    world_size: int, output_dir: Path, *, logits_file: Path | None = None, **options: object
) -> str:
    """A run that must succeed; returns its output. It quantizes by itself unless a cache is asked
    for.
    """
    usual = {"quant_cache": "off"} | ({} if "config" in options else {"context_length": 512})
    argv = flags(output_dir=output_dir, log_to="stdout", **{**usual, **options})
    statuses, output = run_ranks(
        world_size, argv, output_dir.parent / f"{output_dir.name}_logs", logits_file
    )
    assert statuses == [0] * world_size, f"{output[-6000:]}\nexit statuses {statuses}"
    return output
