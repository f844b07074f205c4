"""Plays one episode: what follows each turn of the model, until the episode ends."""

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fsdp_qlora.data.content import BadRow, Chat
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.data.text.tool_calls import ParsedTurn
from fsdp_qlora.training.environments.episode import Episode as Process
from fsdp_qlora.training.environments.episode import EpisodeFailed
from fsdp_qlora.training.episodes.transcript import (
    ANSWERED,
    ENVIRONMENT,
    FAILED,
    LENGTH,
    MAX_TURNS,
    Message,
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
        """Start the environment, and repeat the calls that it has had before this start."""
        if self.is_over or self._process is not None:
            return
        with self._failing():
            prompt = self._prompt
            row = dict(prompt.for_rewards) | {"prompt": prompt.content}
            self._process = self._stage.environments.open(prompt.environment or None, row)
            observation = self._process.reset()
            if self._transcript is None:
                self._open(observation)
            else:
                self._repeat_calls(self._process)
            if self.room < 1 and not self.is_over:
                self._end(LENGTH)

    def take(self, completion: Completion) -> None:
        """Take the model's next turn, and let the environment answer it."""
        with self._failing():
            self._take(completion)

    def abandon(self) -> None:
        """End the environment; what a thread is still told of the episode is not written."""
        self._is_abandoned = True
        self._close()

    def _close(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.close()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        """End the episode where its environment fails in the block."""
        try:
            yield
        except EpisodeFailed as error:
            if self._is_abandoned:
                return
            if self._transcript is None:
                self._transcript = Transcript(self._prompt.ids, list(self._prompt.content))
                self._write(begun=self._begun())
            self._end(FAILED, str(error))

    def _open(self, observation: Any) -> None:
        """Begin the transcript. observation: what reset returns, for the last message."""
        chat = self._prompt.chat
        assert chat is not None
        ids = self._prompt.ids
        if observation is not None:
            chat = with_observation(chat, observation)
            with self._stage.filling:
                try:
                    ids = self._stage.tool_turns.prompt_ids(
                        chat.messages, chat.tools, chat.template_kwargs
                    )
                except BadRow as reason:
                    raise EpisodeFailed(f"its reset cannot be shown: {reason}") from reason
        self._transcript = Transcript(ids, chat.messages)
        self._write(begun=self._begun())

    def _begun(self) -> dict[str, Any]:
        return {"prompt_ids": self.transcript.prompt_ids, "prompt": self.transcript.prompt}

    def _repeat_calls(self, process: Process) -> None:
        """Bring the environment to where it was, by the turns that are known."""
        for number, turn in enumerate(self.transcript.turns):
            following, _ = self._answers(process, self._parsed(turn.completion))
            if following != turn.following:
                log.warning(
                    "The environment of row %d answers turn %d in another way than before the run "
                    "was stopped. Its episode goes on behind the first answer.",
                    self._prompt.row_number,
                    number + 1,
                )

    def _take(self, completion: Completion) -> None:
        assert self._process is not None
        parsed = self._parsed(completion)
        message = self._stage.tool_turns.message(parsed)
        if not completion.is_done:
            self._add(Turn(completion, message, [], []))
            self._end(LENGTH)
            return
        following, num_failed = self._answers(self._process, parsed)
        is_last = self.turn + 1 >= self._stage.limits.max_turns
        end = ""
        if not following:
            end = ANSWERED
        elif self._process.is_over:
            end = ENVIRONMENT
        elif is_last:
            end = MAX_TURNS
        following_ids: list[int] = []
        if not end:
            following_ids = self._ids_of(following, completion)
            # As in TRL, a result that leaves no room for a turn goes, and the episode ends.
            if len(completion.token_ids) + len(following_ids) >= self.room:
                end = LENGTH
        if end:
            following = []
            following_ids = []
        num_calls = len(parsed.calls)
        self._add(Turn(completion, message, following, following_ids, num_calls, num_failed))
        if end:
            self._end(end)

    def _answers(self, process: Process, parsed: ParsedTurn) -> tuple[list[Message], int]:
        """The environment's answer to a turn, and the number of calls that have failed.

        There are no messages if the model has said its last word.
        """
        messages: list[Message] = []
        num_failed = 0
        for call in parsed.calls:
            result = process.call(call.name, call.arguments)
            messages.append({"role": "tool", "name": call.name, "content": result.text})
            num_failed += result.is_error
        if not parsed.calls:
            reply = process.message(parsed.content)
            if reply is not None:
                messages.append({"role": "user", "content": str(reply)})
        return messages, num_failed

    def _ids_of(self, following: list[Message], completion: Completion) -> list[int]:
        """The tokens of the environment's messages, with what begins the model's next turn."""
        tool_turns = self._stage.tool_turns
        last = completion.token_ids
        with self._stage.filling:
            try:
                if following[0]["role"] == "user":
                    return tool_turns.user_ids(following[0]["content"], last)
                results = [(message["name"], message["content"]) for message in following]
                return tool_turns.result_ids(results, last)
            except BadRow as reason:
                raise EpisodeFailed(f"its answer cannot be shown: {reason}") from reason

    def _parsed(self, completion: Completion) -> ParsedTurn:
        tools = self._prompt.chat.tools if self._prompt.chat else None
        return self._stage.tool_turns.parse(completion.token_ids, tools or [])

    def _add(self, turn: Turn) -> None:
        self.transcript.turns.append(turn)
        self._write(turn=turn.to_json())

    def _end(self, end: str, problem: str = "") -> None:
        """End the episode, and have the environment score it unless it has failed."""
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
        self._write(end=end, problem=problem, reward=transcript.reward)

    def _write(self, **record: Any) -> None:
        if not self._is_abandoned:
            self._stage.file.append(self._step, self.place, **record)


def with_observation(chat: Chat, observation: Any) -> Chat:
    """The conversation with what reset returns at the end of its last message, as TRL has it.

    Raises EpisodeFailed for other values than text and lists of parts with text.
    """
    last = chat.messages[-1]
    content = last.get("content") or ""
    if isinstance(observation, str) and isinstance(content, str):
        joined: Any = content + observation
    elif isinstance(observation, str | list):
        joined = _parts(content) + _parts(observation)
    else:
        kind = type(observation).__name__
        raise EpisodeFailed(f"its reset returned {kind}, not text for the prompt's last message")
    return chat_with(chat, [*chat.messages[:-1], last | {"content": joined}])


def chat_with(chat: Chat, messages: list[Message]) -> Chat:
    """The conversation with other messages."""
    return Chat(messages, chat.tools, template_kwargs=chat.template_kwargs)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
