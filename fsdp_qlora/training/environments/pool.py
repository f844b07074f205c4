"""The environments of a run: a host process for each, and a process for each of their episodes."""

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.distributed.supervision.clock import work_command
from fsdp_qlora.training.environments.channel import Channel
from fsdp_qlora.training.environments.episode import Episode, EpisodeFailed, Limits
from fsdp_qlora.training.environments.words import EnvironmentWord, parse_environments
from fsdp_qlora.utils.errors import RankError, RolloutError
from fsdp_qlora.utils.text import printable

_HOST = "fsdp_qlora.training.environments.host"
_SECONDS_TO_END = 5


class EnvironmentFacts(NamedTuple):
    """The tools and methods of an environment, known before its first episode."""

    tools: list[dict[str, Any]]
    """JSON schemas, as chat templates take them."""
    has_reward: bool
    has_message: bool
    """Whether it answers what calls no tool."""
    asks: bool
    """Whether it asks for answers itself (`Episode.next`), as those of verifiers do."""
    class_name: str
    described: str
    """FILE.py:CLASS with the file's hash."""


class Environments:
    """Runs the environments of --environment on one rank. Threads may open episodes at a time.

    Args:
        words: of --environment.
        call_seconds: for each reset, tool and reward.
        episode_seconds: for all of an episode together, and for each file.
        at_a_time: most processes of episodes; more of them wait in `open`.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        call_seconds: float,
        episode_seconds: float,
        at_a_time: int = 64,
    ) -> None:
        limits = Limits(call_seconds, episode_seconds)
        self._hosts = {word.name: _Host(word, limits) for word in parse_environments(words)}
        self._places = threading.BoundedSemaphore(at_a_time)

    def start(self) -> dict[str | None, EnvironmentFacts]:
        """Run the environments' files, and ask an object of each class for its tools.

        Returns:
            Name of the environment -> facts; None is the name of an only one.
        Raises:
            RankError: an environment cannot be used.
        """
        return {name: host.start() for name, host in self._hosts.items()}

    def open(self, name: str | None, row: Mapping[str, Any]) -> Episode:
        """Start the process of an episode; wait for a place if there are too many.

        Args:
            name: of the environment.
            row: of the dataset, the arguments of `reset`.
        Raises:
            RankError: there is no such environment.
            RolloutError: the environment's host has ended.
        """
        if name not in self._hosts:
            names = ", ".join(map(str, self._hosts))
            raise RankError(
                f"--environment: a row's column environment has {name!r}. There are: {names}."
            )
        # The column has done its work.
        arguments = {key: value for key, value in row.items() if not name or key != "environment"}
        self._places.acquire()
        try:
            return self._hosts[name].open(arguments, self._places.release)
        except BaseException:
            self._places.release()
            raise

    def rows(self, name: str | None) -> list[dict[str, Any]] | None:
        """The rows of an environment that has its own; None for one that needs a dataset.

        Raises RankError if they cannot be read.
        """
        try:
            with self.open(name, {}) as episode:
                return episode.rows()
        except EpisodeFailed as error:
            raise RankError(f"--environment: {error}") from error

    def close(self) -> None:
        """End all processes, also those of open episodes."""
        for host in self._hosts.values():
            host.close()


class _Host:
    """The process that has run an environment's file."""

    def __init__(self, word: EnvironmentWord, limits: Limits) -> None:
        self._word = word
        self._limits = limits
        self._described = word.word
        self._tools: list[dict[str, Any]] | None = []
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self._episodes = set[Episode]()

    def start(self) -> EnvironmentFacts:
        """Run the file, and describe the environment. Raises RankError if it cannot be used."""
        try:
            self._described = self._run_file()
            with self.open({}, lambda: None) as episode:
                facts = episode.facts()
        except (EpisodeFailed, RolloutError) as error:
            self.close()
            raise RankError(f"--environment {self._word.word}: {error}") from error
        found = EnvironmentFacts(**facts, described=self._described)
        self._tools = None if found.asks else found.tools
        return found

    def _run_file(self) -> str:
        """Start the process. Returns the environment's description."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        started = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(theirs, started), name="environment-host", daemon=True
        )
        thread.start()
        started.wait()
        end, reply = socket.socketpair()
        channel = Channel(end)
        self._send(self._word, [reply])
        seconds = self._limits.episode
        try:
            answer = channel.receive(seconds)
        except TimeoutError:
            answer = {"error": f"the file did not run within {seconds:g} s"}
        except (OSError, ValueError):
            answer = {"error": "the process that runs the file has ended"}
        channel.close()
        if "described" not in answer:
            self.close()
            said = printable(str(answer.get("error")))
            raise RankError(f"--environment {self._word.word}: {said}")
        return str(answer["described"])

    def _run(self, theirs: socket.socket, started: threading.Event) -> None:
        # Linux ends the process with the thread that has started it: this one stays.
        try:
            self._process = subprocess.Popen(
                work_command(_HOST), stdin=theirs.fileno(), start_new_session=True
            )
        finally:
            theirs.close()
            started.set()
        self._process.wait()

    def _send(self, value: Any, connections: Sequence[socket.socket]) -> None:
        """Send a request with connections, which are closed here."""
        assert self._control is not None
        descriptors = [connection.fileno() for connection in connections]
        message = json.dumps(value).encode()
        try:
            with self._lock:
                socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise RolloutError(
                f"{self._described}: the process that starts episodes has ended. No weight was "
                "updated."
            ) from error
        finally:
            for connection in connections:
                connection.close()

    def open(self, row: Mapping[str, Any], on_end: Any) -> Episode:
        """Start an episode. on_end: called once when it has ended."""
        channel, their_channel = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()

        def end() -> None:
            self._episodes.discard(episode)
            on_end()

        episode = Episode(
            channel,
            lifeline,
            described=self._described,
            tools=self._tools,
            limits=self._limits,
            on_end=end,
            row=row,
        )
        self._send({}, [their_channel, their_lifeline])
        self._episodes.add(episode)
        return episode

    def close(self) -> None:
        """End the process, and those of all episodes."""
        for episode in list(self._episodes):
            episode.kill()
        if self._control is not None:
            self._control.close()
            self._control = None
        process = self._process
        if process is None:
            return
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
