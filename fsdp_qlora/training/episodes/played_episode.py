"""Plays one episode: what follows each turn of the model, until the episode ends."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fsdp_qlora.data.content import BadRow, texts_of
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.text.tool_calls import ParsedTurn
from fsdp_qlora.training.environments.episode import Episode as Process
from fsdp_qlora.training.environments.episode import EpisodeFailed
from fsdp_qlora.training.environments.turns import Message
from fsdp_qlora.training.environments.turns import Turn as Request
from fsdp_qlora.training.episodes.transcript import (
    ANSWERED,
    ENVIRONMENT,
    FAILED,
    LENGTH,
    MAX_TURNS,
    Transcript,
    Turn,
)
from fsdp_qlora.training.episodes.turns_file import TurnsFile
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.generation.tool_turns import ToolTurns

log = logging.getLogger("fsdp_qlora")


class Opens(Protocol):
    """Starts the process of an episode; see `Environments.open`."""

    def open(self, name: str | None, row: Mapping[str, Any]) -> Process: ...

    def close(self) -> None: ...


class Limits(NamedTuple):
    """The limits of an episode. max_tokens: of all that follows the row's prompt."""

    max_turns: int
    max_tokens: int


@dataclass(frozen=True)
class Stage:
    """All that the episodes of a run have in common, on rank 0."""

    environments: Opens
    tool_turns: ToolTurns
    limits: Limits
    file: TurnsFile
    filling: threading.Lock
    """Guards `tool_turns`, whose process takes one request at a time."""


class Episode:
    """One episode. Its methods may wait for its environment; any thread may call them in turn.

    Args:
        place: among the answers of its generation.
        transcript: as far as it had come before this start of the run.
    """

    def __init__(
        self,
        stage: Stage,
        prompt: Prompt,
        step: int,
        place: int,
        transcript: Transcript | None = None,
    ) -> None:
        self.place = place
        self._stage = stage
        self._prompt = prompt
        self._step = step
        self._process: Process | None = None
        self._is_abandoned = False
        self._working = threading.Lock()
        self._transcript = transcript

    @property
    def transcript(self) -> Transcript:
        """The course of the episode, which has begun."""
        assert self._transcript is not None
        return self._transcript

    @property
    def is_over(self) -> bool:
        """Whether the model has no further turn."""
        return self._transcript is not None and bool(self._transcript.end)

    @property
    def turn(self) -> int:
        """The number of the model's next turn, from 0."""
        return len(self.transcript.turns)

    @property
    def token_ids(self) -> list[int]:
        """The tokens before the model's next turn."""
        return self.transcript.prompt_ids + self.transcript.completion.token_ids

    @property
    def room(self) -> int:
        """The maximum tokens of the model's next turn."""
        return len(self._prompt.ids) + self._stage.limits.max_tokens - len(self.token_ids)

    def begin(self) -> None:
        """Start the environment, and repeat the answers that it has had before this start."""
        if self.is_over or self._process is not None:
            return
        prompt = self._prompt
        row = dict(prompt.for_rewards) | {"prompt": prompt.content}
        process = self._stage.environments.open(prompt.environment or None, row)
        with self._working, self._failing():
            self._process = process
            # It may have waited for a place while the run has stopped.
            if self._is_abandoned:
                process.kill()
                return
            request = process.next(None)
            if self._transcript is None:
                self._open(request)
            else:
                self._repeat_answers(process)

    def take(self, completion: Completion) -> None:
        """Take the model's next turn, and let the environment answer it."""
        with self._working, self._failing():
            if not self._is_abandoned:
                self._take(completion)

    def abandon(self) -> None:
        """End the environment; what a thread is still told of the episode is not written.

        An environment that works is killed. Another one may close itself first.
        """
        self._is_abandoned = True
        process = self._process
        if process is None:
            return
        if not self._working.acquire(blocking=False):
            process.kill()
            return
        process.close()
        self._working.release()

    def _close(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End the episode where its environment fails in the block."""
        try:
            yield
        except EpisodeFailed as error:
            if self._is_abandoned:
                return
            begun = {}
            if self._transcript is None:
                self._transcript = Transcript(self._prompt.ids, list(self._prompt.content), [])
                begun = self._begun()
            self._end(FAILED, str(error), **begun)

    def _open(self, request: Request | None) -> None:
        """Begin the transcript. request: the environment's first one."""
        chat = self._prompt.chat
        assert chat is not None
        if request is None:
            raise EpisodeFailed("it has ended before the model's first turn")
        ids = self._prompt.ids
        if request.messages != chat.messages or (request.tools or None) != chat.tools:
            with self._stage.filling, self._showing("its first messages"):
                ids = self._stage.tool_turns.prompt_ids(
                    request.messages, request.tools, chat.template_kwargs
                )
        self._transcript = Transcript(ids, request.messages, request.tools)
        if self.room >= 1:
            self._write(**self._begun())
            return
        # Its row must not be longer than the run has planned.
        self._transcript.prompt_ids = self._prompt.ids
        self._end(LENGTH, **self._begun())

    def _begun(self) -> dict[str, Any]:
        """The beginning of the episode for a line of the file."""
        transcript = self.transcript
        begun = {
            "prompt_ids": transcript.prompt_ids,
            "prompt": transcript.prompt,
            "tools": transcript.tools,
        }
        return {"begun": begun}

    def _repeat_answers(self, process: Process) -> None:
        """Bring the environment to where it was, by the turns that are known.

        If the last of them ends the episode, the environment scores it.
        """
        known = [*self.transcript.prompt]
        for number, turn in enumerate(self.transcript.turns):
            # The environment has not had a turn that was cut.
            if not turn.completion.is_done:
                break
            known.append(turn.message)
            following = new_messages(process.next(turn.message), known)
            known += turn.following
            if not turn.ending and following != turn.following:
                log.warning(
                    "The environment of row %d answers turn %d in another way than before the run "
                    "was stopped. Its episode goes on behind the first answer.",
                    self._prompt.row_number,
                    number + 1,
                )
        ending = self.transcript.turns[-1].ending if self.transcript.turns else ""
        if ending:
            self._end(ending)

    def _take(self, completion: Completion) -> None:
        process = self._process
        assert process is not None
        tool_turns = self._stage.tool_turns
        parsed = tool_turns.parse(completion.token_ids, self.transcript.tools)
        message = tool_turns.message(parsed)
        if not completion.is_done:
            self._add(Turn(completion, message, [], [], ending=LENGTH))
            self._end(LENGTH)
            return
        known = [*self.transcript.prompt, *self.transcript.messages, message]
        num_failed = process.num_failed_calls
        request = process.next(message)
        following = new_messages(request, known)
        end = ""
        if request is None:
            end = ENVIRONMENT if process.is_over else ANSWERED
        elif self.turn + 1 >= self._stage.limits.max_turns:
            end = MAX_TURNS
        following_ids: list[int] = []
        if not end:
            following_ids = self._ids_of(following, parsed, completion)
            # As in TRL, a result that leaves no room for a turn goes, and the episode ends.
            if len(completion.token_ids) + len(following_ids) >= self.room:
                end = LENGTH
        if end:
            following = []
            following_ids = []
        counts = len(parsed.calls), process.num_failed_calls - num_failed
        self._add(Turn(completion, message, following, following_ids, *counts, ending=end))
        if end:
            self._end(end)

    def _ids_of(
        self, following: list[Message], parsed: ParsedTurn, completion: Completion
    ) -> list[int]:
        """The tokens of the environment's messages, with what begins the model's next turn."""
        tool_turns = self._stage.tool_turns
        last = completion.token_ids
        roles = [message["role"] for message in following]
        texts = ["".join(texts_of(message)) for message in following]
        with self._stage.filling, self._showing("its answer"):
            if roles == ["user"]:
                return tool_turns.user_ids(texts[0], last)
            if roles == ["tool"] * len(parsed.calls):
                names = [call.name for call in parsed.calls]
                return tool_turns.result_ids([*zip(names, texts, strict=True)], last)
        raise EpisodeFailed(
            f"it answers {len(parsed.calls)} calls with messages of {', '.join(roles) or 'nobody'}"
        )

    @contextlib.contextmanager
    def _showing(self, messages: str) -> Iterator[None]:
        """Fail the episode where the chat template refuses some messages in the block."""
        try:
            yield
        except BadRow as reason:
            raise EpisodeFailed(f"{messages} cannot be shown: {reason}") from reason

    def _add(self, turn: Turn) -> None:
        self.transcript.turns.append(turn)
        self._write(turn=turn.to_json())

    def _end(self, end: str, problem: str = "", **begun: Any) -> None:
        """End the episode, and have the environment score it unless it has failed.

        begun: as of `_begun`, if no line has it yet.
        """
        transcript = self.transcript
        if end != FAILED and self._process is not None:
            try:
                transcript.reward = self._process.reward(transcript.prompt + transcript.messages)
            except EpisodeFailed as error:
                if self._is_abandoned:
                    return
                end = FAILED
                problem = str(error)
        transcript.end = end
        transcript.problem = problem
        self._close()
        self._write(**begun, end=end, problem=problem, reward=transcript.reward)

    def write_round(self, places: Sequence[int]) -> None:
        """Write that its next turn is sampled together with those of other episodes."""
        self._stage.file.append_round(self._step, places)

    def _write(self, **record: Any) -> None:
        if not self._is_abandoned:
            self._stage.file.append(self._step, self.place, **record)


def new_messages(request: Request | None, known: Sequence[Message]) -> list[Message]:
    """The messages of a request behind those that are known; none without a request.

    Raises EpisodeFailed if others are in their place: what was sampled could not be learned.
    """
    if request is None:
        return []
    before = [message["role"] for message in request.messages[: len(known)]]
    if before != [message["role"] for message in known]:
        raise EpisodeFailed("it has changed earlier messages of the conversation")
    return request.messages[len(known) :]
