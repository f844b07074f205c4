"""Rounds of the run's own model: the next turns of all episodes that are ready for one."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, NamedTuple

from fsdp_qlora.distributed.supervision.clock import begun
from fsdp_qlora.training.episodes.played_episode import Episode
from fsdp_qlora.training.generation.sampling import Completion

# An episode that is ready waits so long for others, which are answered in the same passes: at first
# for those that begin, and then for those whose environments work.
_BEGINNING_SECONDS = 5.0
_GATHERING_SECONDS = 0.5


class Request(NamedTuple):
    """A turn that the model is to write.

    place: of the episode. turn: its number in the episode. room: the maximum tokens.
    """

    place: int
    turn: int
    room: int
    token_ids: list[int]


class Rounds:
    """The episodes of a generation, on rank 0. Each waits for its environment in its own thread."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = episodes
        self._waiting = dict[Future[None], Episode]()
        self._ready = list[Episode]()
        self._seconds = _BEGINNING_SECONDS
        for episode in episodes:
            self._start(episode, episode.begin)

    def next(self) -> list[Request]:
        """Wait for episodes that are ready for a turn; there are none once all are over.

        Raises the error of an episode's thread.
        """
        seconds = None
        while self._waiting:
            done, _ = wait(self._waiting, seconds, FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                self._collect(future)
            if self._ready:
                seconds = self._seconds
        self._seconds = _GATHERING_SECONDS
        # In the order of their places: the order in which they came would be another one each time.
        ready = sorted(self._ready, key=lambda episode: episode.place)
        self._ready = []
        if ready:
            ready[0].write_round([episode.place for episode in ready])
        return [
            Request(episode.place, episode.turn, episode.room, episode.token_ids)
            for episode in ready
        ]

    def take(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Give each episode the turn that it has asked for, which its room holds."""
        for request, completion in zip(requests, completions, strict=True):
            episode = self._episodes[request.place]
            self._start(episode, partial(episode.take, completion))

    def _start(self, episode: Episode, work: Callable[[], Any]) -> None:
        self._waiting[begun(work)] = episode

    def _collect(self, future: Future[None]) -> None:
        episode = self._waiting.pop(future)
        future.result()
        if not episode.is_over:
            self._ready.append(episode)
