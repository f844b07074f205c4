"""The process that has run an environment's file, and makes a process for each episode by fork."""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from fsdp_qlora.distributed.supervision.clock import limit_memory
from fsdp_qlora.training.environments.actor import Environment, act
from fsdp_qlora.training.environments.channel import Channel
from fsdp_qlora.training.environments.episode import CLOSED
from fsdp_qlora.training.environments.keeper import adopt_orphans, keep
from fsdp_qlora.training.environments.user_class import load_class
from fsdp_qlora.training.environments.verifiers_bridge import load_verifiers
from fsdp_qlora.training.environments.words import VERIFIERS, EnvironmentWord
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.processes import end_with_parent
from fsdp_qlora.utils.redact import guard_output
from fsdp_qlora.utils.user_files import MEMORY_BYTES

_MOST_REQUEST = 2**16


def work() -> None:
    """Obey the requests on the socket that is stdin.

    The first one names an environment, and has a descriptor for the reply; each other one has two
    for an episode: its channel and its lifeline.
    """
    end_with_parent()  # also if the run is killed
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    guard_output()
    limit_memory(MEMORY_BYTES)
    word, [reply] = _receive(control)
    channel = Channel(reply)
    try:
        make, described = _load(EnvironmentWord(*word))
    except UserError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"described": described})
    channel.close()
    if threading.active_count() > 1:
        print(
            f"{described}: the file starts threads, which the processes of episodes do not have. "
            "Start them in __init__.",
            file=sys.stderr,
        )
    # A signal to all processes of a job is for the run, which ends this one. A handler of Python is
    # not inherited by programs that an environment starts.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # Children that have ended need no wait.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A collection in a child would copy the memory that it shares with this process.
    gc.collect()
    gc.freeze()
    while True:
        _, connections = _receive(control)
        if not connections:
            return
        _start_episode(control, connections, make, described)


def _receive(control: socket.socket) -> tuple[Any, list[socket.socket]]:
    """A request with its connections; no connection at the end of the run."""
    text, descriptors, _, _ = socket.recv_fds(control, _MOST_REQUEST, 2)
    connections = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return json.loads(text or "null"), connections


def _load(word: EnvironmentWord) -> tuple[Callable[[], Environment], str]:
    """A function that makes an environment, and the environment's description."""
    if word.word.startswith(VERIFIERS):
        return load_verifiers(word)
    return load_class(word)


def _start_episode(
    control: socket.socket,
    connections: list[socket.socket],
    make: Callable[[], Environment],
    described: str,
) -> None:
    """Start the keeper of an episode, which starts the episode's process."""
    channel, lifeline = connections
    # Otherwise each child would write it, too.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        is_child = os.fork() == 0
    except OSError as error:
        with contextlib.suppress(OSError):
            Channel(channel).send({"failed": f"no process can be started: {error.strerror}"})
        is_child = False
    if is_child:
        control.close()
        _keep(channel, lifeline, make, described)
    channel.close()
    lifeline.close()


def _keep(
    channel: socket.socket,
    lifeline: socket.socket,
    make: Callable[[], Environment],
    described: str,
) -> NoReturn:
    """Be the keeper of an episode."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # the host may end before
        adopt_orphans()
        output, end_of_output = os.pipe()
        pid = os.fork()
        if pid == 0:
            lifeline.close()
            os.close(output)
            _act(channel, end_of_output, make)
        channel.close()
        os.close(end_of_output)
        keep(lifeline, output, pid, described)
    finally:
        os._exit(0)


def _act(channel: socket.socket, output: int, make: Callable[[], Environment]) -> NoReturn:
    """Be the process of an episode, a leader of its session."""
    status = CLOSED
    try:
        os.setsid()
        end_with_parent()
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        # The keeper removes secrets.
        sys.stdout = _open_output(1)
        sys.stderr = _open_output(2)
        limit_memory(MEMORY_BYTES)
        _seed_numpy()
        act(Channel(channel), make)
        status = 0
    # The environment has closed it, or written into it.
    except (OSError, ValueError):
        pass
    finally:
        os._exit(status)


def _open_output(descriptor: int) -> Any:
    return os.fdopen(descriptor, "w", 1, errors="backslashreplace", closefd=False)


def _seed_numpy() -> None:
    """Give the process random numbers of its own. Python's own generator does so itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
