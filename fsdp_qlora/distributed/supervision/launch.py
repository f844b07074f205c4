"""Starts one process per visible GPU when training is started as a single process.

A process that torchrun has started with others, or with an explicit count of 1, continues as a
worker. Any other process becomes a launcher: it starts the workers through torchrun's own agent and
waits for them.
"""

import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.supervision.restarts import (
    AUTO_RESTART,
    NOTE_FILE,
    forward_exit,
    is_restart,
)
from fsdp_qlora.utils.errors import ENDINGS, RAISED, UserError, note_reason, write_line
from fsdp_qlora.utils.text import plural

# torch is imported where it is needed, so that --help and wrong options are quick.
if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

_STATUS_OF_SIGNAL = {
    signal.SIGTERM: ENDINGS["preempted"].exit_code,
    # Slurm sends SIGUSR1 when a job's time is nearly over.
    signal.SIGUSR1: ENDINGS["preempted"].exit_code,
    signal.SIGHUP: ENDINGS["preempted"].exit_code,
    signal.SIGINT: ENDINGS["interrupted"].exit_code,
}
_LAUNCHER_PID = "FSDP_QLORA_LAUNCHER_PID"
WORKER = ("-u", "-m", "fsdp_qlora", "train")

# Variables that torchrun's agent sets for its workers, besides those that start with TORCHELASTIC_.
# Our own agent and its workers would take a wrong rank or port from those that an outer torchrun
# has set.
_AGENT_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


class WorkersEnd(NamedTuple):
    """How the workers have ended. reason: of the first worker that failed, empty if none has."""

    status: int
    reason: str


def is_from_an_agent(name: str) -> bool:
    """Whether torchrun sets this environment variable for its workers."""
    return name in _AGENT_VARIABLES or name.startswith("TORCHELASTIC_")


def relaunch_if_needed(
    config: TrainConfig, argv: list[str], worker: Sequence[str] = WORKER
) -> int | None:
    """Start the workers and wait for them, if this process is not a worker itself.

    Args:
        argv: the arguments after the program's name; the workers get the same.
        worker: python's arguments before them.
    Returns:
        None if this process is a worker and should continue, otherwise the status to exit with: the
        first failed worker's, the one in errors.ENDINGS if a signal ended the run, or 0.
    Raises:
        UserError: more processes are requested than GPUs are visible, or their number differs from
            torchrun's.
    """
    if not _is_single_by_default(argv):
        _check_torchrun_processes(config)
    else:
        processes, reason = _num_processes(config)
        if processes > 1:
            return _start(processes, reason, [*worker, *argv]).status
    _end_with_parent()
    return None


def run_in_workers(config: TrainConfig, argv: list[str]) -> WorkersEnd:
    """Start the workers, even a single one, and wait for them.

    This process keeps no memory or state of the run. The workers' errors are not printed: the
    caller raises them. See `relaunch_if_needed` for the arguments and errors.
    """
    processes, reason = (1, "") if config.is_preview else _num_processes(config)
    return _start(processes, reason, [*WORKER, *argv], raises=True)


def _start(processes: int, reason: str, words: list[str], *, raises: bool = False) -> WorkersEnd:
    # The store's socket is opened here, since torch's own would listen on every interface.
    with socket.create_server(("localhost", 0)) as server_socket:
        if processes > 1:  # print and not the logger, which is set up in the workers
            print(f"Starting {processes} processes, {reason}.", flush=True)
        return _run_workers(processes, words, server_socket, raises=raises)


def is_started_by_others() -> bool:
    """Whether torchrun or another program has started this process as one rank of a run."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE") or 1) > 1


# --- how this process was started ---


def _is_single_by_default(argv: list[str]) -> bool:
    """Whether this process is alone, and no number of processes was requested from torchrun."""
    is_one_of_several = any(
        int(os.environ.get(name) or 1) > 1 for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return not is_one_of_several and not (by_torchrun and _torchrun_has_nproc(argv))


def _torchrun_has_nproc(argv: list[str]) -> bool:
    """Whether torchrun was given a number of processes.

    In a worker's environment a 1 looks like the default, so torchrun's command is read.
    """
    if "PET_NPROC_PER_NODE" in os.environ:  # torchrun reads its options from PET_ variables, too
        return True
    try:
        content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return True  # no /proc: keep the single process that torchrun started
    # Each argument ends with a zero.
    command = content.decode(errors="replace").split("\0")[:-1]
    # The parent: python torchrun OPTIONS train.py ARGV, or -m fsdp_qlora train ARGV. The same flag
    # in ARGV is ours.
    torchrun = command[: len(command) - len(argv)]
    arguments = command[len(command) - len(argv) :]
    # torchrun accepts abbreviations; no other option of it starts with --np.
    return arguments != argv or any(word.replace("_", "-").startswith("--np") for word in torchrun)


def _check_torchrun_processes(config: TrainConfig) -> None:
    """Refuse a number of processes that differs from torchrun's."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    total = int(os.environ.get("WORLD_SIZE", "1"))
    if config.nproc_per_node not in (-1, local, total):
        started = plural(local, "process", ending="es")
        raise UserError(
            f"torchrun has started {started} on this machine, but the options of the training ask "
            f"for {config.nproc_per_node}. Leave out --world_size and --nproc_per_node of the "
            "training."
        )


def _num_processes(config: TrainConfig) -> tuple[int, str]:
    """The number of processes on this machine, and the reason for it."""
    requested = config.nproc_per_node
    if requested > 1 and config.device != "cpu":
        gpus = _visible_gpus()
        # Without any GPU, `choose_device` refuses or takes the CPU, where several may share it.
        if 0 < gpus < requested:
            raise UserError(
                f"{requested} processes are requested, but {gpus} GPUs are visible "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}), and "
                "each process needs its own GPU."
            )
    if requested >= 1:
        return requested, "as requested"
    if config.device == "cpu":
        return 1, "one per visible GPU"
    return max(1, _visible_gpus()), "one per visible GPU"


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


# --- torch in this program's processes ---


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import torch in the block without garbage collection.

    Collections would take a sixth of the import's time, and free nothing.
    """
    gc.disable()
    try:
        yield
        # What has been imported stays to the end: later collections need not look at it.
        gc.freeze()
    finally:
        gc.enable()


def set_torch_variables() -> None:
    """Set variables that torch reads on import or at a GPU's first use, unless they are set."""
    # Lengths differ between steps, which fragments fixed segments. Set before imports: bitsandbytes
    # initializes CUDA.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # We report a lost rank in one sentence; torch would add pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


# --- the launcher ---


def _run_workers(
    processes: int, words: list[str], server_socket: socket.socket, *, raises: bool
) -> WorkersEnd:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        with (
            tempfile.TemporaryDirectory(prefix="fsdp_qlora_launch_") as folder,
            _environment_of_launcher(folder),
        ):
            if raises:
                os.environ[RAISED] = "1"
            port = server_socket.getsockname()[1]
            launch = _launch_config(processes, port=port, folder=folder)
            # The agent opens a server at this port too; multi_tenant makes it share this one.
            descriptor = server_socket.detach()
            server = TCPStore(
                "localhost", port, 1, True, multi_tenant=True, master_listen_fd=descriptor
            )
            try:
                elastic_launch(launch, sys.executable)(*words)
            finally:
                # Not earlier: the workers use it.
                del server
    except ChildFailedError as error:
        rank, exit_code, reason = _cause(error.failures)
        return WorkersEnd(_report_failure(rank, exit_code, reason, prints=not raises), reason)
    except SignalException as error:
        reason = f"Stopped by {error.sigval.name}; all processes have ended."
        write_line(reason)
        return WorkersEnd(_STATUS_OF_SIGNAL.get(error.sigval, 128 + error.sigval), reason)
    return WorkersEnd(0, "")


@contextlib.contextmanager
def _environment_of_launcher(folder: str) -> Iterator[None]:
    """Prepare the workers' environment; at the end restore it.

    A final ending is forwarded to an outer torchrun.
    """
    before = dict(os.environ)
    note = Path(folder) / "end.json"
    try:
        _prepare_environment()
        os.environ[NOTE_FILE] = str(note)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        # After that: an outer torchrun's variables say where its store is.
        forward_exit(note)


def _launch_config(processes: int, *, port: int, folder: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    handled = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
    # Under nohup a closed terminal must not stop the run.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled += ",SIGHUP"
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        # The prefix of the keys in the store, see `distributed.store.connect`.
        run_id=secrets.token_hex(16),
        # Uses one server for agent and workers; c10d would open a second one.
        rdzv_backend="static",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"rank": 0},
        # torch's default, the machine's full name, cannot be resolved everywhere.
        local_addr="localhost",
        max_restarts=0,
        # Deleted with the folder; the agent does not delete its own.
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle=handled,
    )


def _prepare_environment() -> None:
    """Set up the environment that the workers inherit."""
    os.environ.pop(_LAUNCHER_PID, None)  # inherited if a worker has started this launcher
    _end_with_parent()
    # Only the main thread may set handlers, and a Python program may call from another one.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        signal.signal(signal.SIGTSTP, _stop_with_workers)
    if is_restart():
        os.environ[AUTO_RESTART] = "1"
    # A stop waits for the step and its checkpoint, but less than the 30 s after which an outer
    # agent kills us.
    is_inner = "TORCHELASTIC_RUN_ID" in os.environ
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "20" if is_inner else "600")
    for name in filter(is_from_an_agent, list(os.environ)):
        del os.environ[name]
    os.environ[_LAUNCHER_PID] = str(os.getpid())
    # `-m fsdp_qlora` must find this package from any folder, and nothing else in the folder that it
    # is started in.
    os.environ["PYTHONSAFEPATH"] = "1"
    root = str(Path(__file__).resolve().parents[3])
    if root not in map(sysconfig.get_path, ("purelib", "platlib")):  # a clone
        paths = [root, os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # As torchrun does: several processes with a thread per core each would compete.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The agent logs each failed or stopped worker; our one line replaces that.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False


def _stop_with_workers(signum: int, frame: FrameType | None) -> None:
    """On Ctrl-Z, stop this process and the workers; `fg` and `bg` continue all."""
    # The workers have sessions of their own, so the terminal does not stop them. They are stopped
    # first and continued last, since this process hosts their store.
    workers = psutil.Process().children()
    for worker in workers:
        worker.suspend()
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)  # returns after SIGCONT
    signal.signal(signum, _stop_with_workers)
    for worker in workers:
        worker.resume()


def _cause(failures: "Mapping[int, ProcessFailure]") -> tuple[int, int, str]:
    """Rank, exit code and reason of the worker that most likely failed first.

    Other workers may fail in the same second as a consequence. Exit code 2 (bad input) is never a
    consequence; a signal often is.
    """

    def order(rank: int) -> tuple[int, bool, bool]:
        failure = failures[rank]
        return failure.timestamp, failure.exitcode != 2, failure.exitcode < 0

    rank = min(failures, key=order)
    message: Any = failures[rank].message  # written by errors.note_reason, or torch's own text
    reason = message["message"] if isinstance(message, dict) else str(message)
    return rank, failures[rank].exitcode, reason


def _report_failure(rank: int, exit_code: int, reason: str, *, prints: bool = True) -> int:
    """Print which rank failed, and record its reason for an outer torchrun.

    Returns the launcher's exit status. prints: otherwise only what has no reason of its own, the
    end by a signal, is printed.
    """
    note_reason(f"Rank {rank}: {reason}")
    if exit_code > 0:
        # Above 2 are the endings that all ranks share: no rank is to blame.
        shared = [ending.exit_code for ending in ENDINGS.values() if ending.exit_code > 2]
        if exit_code in shared:
            message = f"The run stopped with exit code {exit_code}; the reason is above."
        else:
            message = f"Rank {rank} failed with exit code {exit_code}; the error is above."
        status = exit_code
    else:
        # A negative one is the number of a signal. Shells report 128 and the number.
        message = f"Rank {rank} was ended by {signal.Signals(-exit_code).name}."
        status = 128 - exit_code
        if -exit_code == signal.SIGKILL:
            message += " The machine may have run out of memory: see dmesg."
    if prints or exit_code < 0:
        write_line(message)
    return status


# --- workers whose parent is killed ---


def _end_with_parent() -> None:
    """End this process soon after its launcher or torchrun has died, such as by SIGKILL."""
    parent = os.environ.get(_LAUNCHER_PID)
    if parent is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    process = int(parent or os.getppid())
    threading.Thread(target=_watch, args=(process,), daemon=True).start()


def _watch(parent: int) -> None:
    """When the parent has ended, send this process SIGTERM, so that it saves and ends.

    After 30 s it ends at once.
    """
    # An orphan gets another parent. Polled, as Linux's own signal for it (PR_SET_PDEATHSIG) comes
    # when the thread ends that has started this process.
    while os.getppid() == parent:
        time.sleep(1)
    with contextlib.suppress(OSError):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    os._exit(128 + signal.SIGTERM)
