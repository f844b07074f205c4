"""Tries kernels in a process of its own, which a crash or a hang may end without harm to the run.

The first launch of a kernel compiles it, with a compiler and a driver that may be in any state. The
verdict is kept in the cache folder, for other starts and for the machine's other ranks.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_qlora.distributed.device import configure_kernels
from fsdp_qlora.model import kernels
from fsdp_qlora.model.architecture import attention_kernels
from fsdp_qlora.model.kernels.trial import OTHER_NUMBERS, PartTrials, why_wrong
from fsdp_qlora.model.quantizers import bnb_4bit, e2m1, fp8, rounded_weight
from fsdp_qlora.run import (
    answer_trials,
    decoding_trials,
    graph_trials,
    kernel_trials,
    rounding_trials,
)
from fsdp_qlora.run.kernel_trials import KernelForm, trials
from fsdp_qlora.sharding import block_graphs, graphed, replayed, static_memory
from fsdp_qlora.training.generation import model_cache, token_graphs
from fsdp_qlora.utils.descriptions import read_description, write_description
from fsdp_qlora.utils.environment import versions
from fsdp_qlora.utils.files import cache_folder, fingerprint_files, staged_file
from fsdp_qlora.utils.locks import locked
from fsdp_qlora.utils.processes import end_with_parent

log = logging.getLogger("fsdp_qlora")

Verdicts = dict[str, dict[str, str]]
"""Part -> way -> why it is not taken, empty if it is right."""

FOLDER = "kernels"
_START_SECONDS = 180.0  # to import torch from a slow disk
_WAY_SECONDS = 60.0
_FAILED_SECONDS = 600.0  # in which the other ranks of a start do not try what one could not
# How a process that is tried with may end, as reasons say it.
_CRASHED = "ended its process by"
_HANGS = "took more than"
_WAIT_SECONDS = 10.0  # for a killed process, which a driver may hold
_PACKAGES = ("torch", "triton", "bitsandbytes", "flash-attn", "flash-attn-4")
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class Request(NamedTuple):
    """The ways that a process tries.

    form: as JSON. device: of this rank. skips: [part, way] that are decided. source: the function
    that makes the trials, as MODULE:NAME.
    """

    form: dict[str, Any]
    device: str
    skips: list[list[str]]
    source: str = f"{trials.__module__}:{trials.__name__}"


class NotTried(Exception):
    """No process could try the kernels. The message is the reason, after "the process"."""


def tried_apart(form: KernelForm, device: torch.device) -> Verdicts:
    """The verdict on this machine about ways that are to be tried apart, kept or made now.

    No process group is needed.

    Raises:
        NotTried: the process ended before it tried a way.
    """
    key = _key(form, device)
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]
    path = cache_folder() / FOLDER / f"{name}.json"
    request = Request(form.to_dict(), str(device), [])
    return kept_verdict(path, key, lambda: run_trials(request))


def kept_verdict(path: Path, key: Mapping[str, Any], make: Callable[[], Verdicts]) -> Verdicts:
    """The verdict in a file, which is made and written where it is missing or damaged.

    One of several processes makes it, and the others wait. A reason that may pass, such as a full
    GPU or a full disk, is not kept.

    Raises:
        NotTried: by `make`, now or in another process a few minutes ago.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, "Kernels: waiting for another process that tries them."):
        verdict = _read(path)
        if verdict is None:
            try:
                verdict = make()
            except NotTried as error:
                _write(path, {**key, "failed": str(error), "time": time.time()})
                raise
            if all(_lasts(reason) for ways in verdict.values() for reason in ways.values()):
                _write(path, {**key, "verdict": verdict})
    return verdict


def _lasts(reason: str) -> bool:
    return reason in ("", OTHER_NUMBERS) or reason.startswith((_CRASHED, _HANGS))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError), staged_file(path) as partial:
        write_description(partial, content)


def _read(path: Path) -> Verdicts | None:
    try:
        content = read_description(path)
        failed = content.get("failed")
        is_recent = failed is not None and time.time() - content["time"] < _FAILED_SECONDS
        verdict: Verdicts | None = content.get("verdict")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if is_recent:
        raise NotTried(failed)
    return verdict


def _key(form: KernelForm, device: torch.device) -> dict[str, Any]:
    """The facts that a verdict depends on."""
    installed = versions()
    driver = ""
    with contextlib.suppress(OSError):
        driver = _DRIVER.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    graphs = (graph_trials, graphed, block_graphs, replayed, static_memory)
    answers = (answer_trials, model_cache, token_graphs)
    # Where torch's operators round a weight.
    rounding = (rounding_trials, rounded_weight, bnb_4bit, e2m1, fp8)
    tried = (kernel_trials, decoding_trials, attention_kernels, *rounding, *graphs, *answers)
    sources = [Path(str(module.__file__)) for module in tried]
    sources += sorted(Path(kernels.__path__[0]).glob("*.py"))
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": {name: installed.get(name) for name in _PACKAGES},
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "kernels": fingerprint_files(sources),
        "form": form.to_dict(),
    }


# --- the process that waits ---


def run_trials(
    request: Request,
    *,
    start_seconds: float = _START_SECONDS,
    way_seconds: float = _WAY_SECONDS,
) -> Verdicts:
    """Try all ways in child processes: after a crash or a hang another one does the others.

    Raises:
        NotTried: as `tried_apart`.
    """
    verdicts: Verdicts = {}
    while True:
        skips = [[part, way] for part, ways in verdicts.items() for way in ways]
        rest = request._replace(skips=skips)
        current, reason = _run_child(
            rest,
            verdicts,
            start_seconds,
            way_seconds,
        )
        if current is None and reason:
            raise NotTried(reason)
        if current is None:
            return verdicts
        part, way = current
        verdicts.setdefault(part, {})[way] = reason


def _run_child(
    request: Request, verdicts: Verdicts, start_seconds: float, way_seconds: float
) -> tuple[tuple[str, str] | None, str]:
    """Add what one process finds to the verdicts.

    Returns:
        The part and the way at which it ended too early, None if at none; and how it ended.
    """
    environment = dict(os.environ)
    paths = [str(_PACKAGE_ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryFile("w+") as given:
        given.write(json.dumps(request))
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            # with what it starts, such as a compiler
            start_new_session=True,
        )
    current: tuple[str, str] | None = None
    hangs = False
    try:
        with _Alarm(child, start_seconds) as alarm:
            assert child.stdout is not None
            for line in child.stdout:
                part, way, reason = json.loads(line)
                alarm.again(way_seconds)
                if reason is None:
                    current = (part, way)
                else:
                    verdicts.setdefault(part, {})[way] = reason
                    current = None
            status = child.wait()
            hangs = alarm.rang
    finally:
        _kill(child)
    if hangs:
        return current, f"{_HANGS} {way_seconds if current else start_seconds:.0f} s"
    if status:
        end = f"signal {-status}" if status < 0 else f"exit status {status}"
        return current, f"{_CRASHED} {end}" if current else f"ended by {end}"
    return None, ""


class _Alarm:
    """Kills a child that says nothing for too long."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self._child = child
        self.rang = False
        self._timer = self._started(seconds)

    def again(self, seconds: float) -> None:
        """Begin to wait anew."""
        self._timer.cancel()
        self._timer = self._started(seconds)

    def _started(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._ring)
        timer.daemon = True
        timer.start()
        return timer

    def _ring(self) -> None:
        self.rang = True
        _kill(self._child)

    def __enter__(self) -> "_Alarm":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _kill(child: subprocess.Popen[str]) -> None:
    """End a child and its own children, and forget it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_WAIT_SECONDS)


# --- the process that tries ---


def verdicts_of(parts: Sequence[PartTrials], skips: Sequence[Sequence[str]]) -> Iterator[list[Any]]:
    """[part, way, None] before a way is tried, and [part, way, reason] when it is decided."""
    for part in parts:
        for way in part.apart:
            if [part.part, way] in skips:
                continue
            yield [part.part, way, None]
            reason = ""
            for make in part.proofs:
                reason = reason or why_wrong(make, [way])[way]
            yield [part.part, way, reason]


def main() -> None:
    """Try what stdin asks for, and write each verdict to stdout as a line of JSON."""
    end_with_parent()  # also if the rank is killed
    # What libraries print is not for the other process.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        request = Request(*json.loads(sys.stdin.read()))
        module, _, name = request.source.partition(":")
        make = getattr(importlib.import_module(module), name)
        device = torch.device(request.device)
        configure_kernels()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        parts = make(KernelForm.from_dict(request.form), device)
        for line in verdicts_of(parts, request.skips):
            answers.write(json.dumps(line) + "\n")
    # Destructors of a driver in a bad state have nothing more to say.
    os._exit(0)


if __name__ == "__main__":
    main()
