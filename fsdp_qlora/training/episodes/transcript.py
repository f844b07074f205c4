"""An episode as it is learned from: the turns of the model and what its environment wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_qlora.training.environments.turns import Message
from fsdp_qlora.training.generation.sampling import Completion

# Why an episode has ended.
ANSWERED = "answered"  # the last turn calls no tool
ENVIRONMENT = "environment"  # the environment has ended it
MAX_TURNS = "max_turns"
LENGTH = "length"  # there was no room for a turn, or for what the environment wrote
FAILED = "failed"  # the environment has failed


class Turn(NamedTuple):
    """One turn of the model, and what follows it."""

    completion: Completion
    message: Message
    """The turn as a message."""
    following: list[Message]
    """The messages of the environment that follow it; none if the episode ends with it."""
    following_ids: list[int]
    """Their tokens, from the end of the turn to the beginning of the next one."""
    num_calls: int = 0
    num_failed_calls: int = 0
    ending: str = ""
    """Why the episode ends with it; empty if it goes on."""

    def to_json(self) -> dict[str, Any]:
        """The turn as an object of JSON."""
        return self._asdict() | {"completion": self.completion._asdict()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Turn":
        """The reverse of `to_json`. Raises KeyError or TypeError for other objects."""
        return cls(**dict(record) | {"completion": Completion(**record["completion"])})


class EpisodeRecord(NamedTuple):
    """The course of an episode in rollouts.jsonl, besides its tokens.

    messages: those behind the prompt. environment_spans: where the completion has tokens that the
    environment wrote, as [start, end]. end, problem: as of a transcript.
    """

    messages: list[Message]
    environment_spans: list[list[int]]
    end: str
    problem: str
    num_turns: int
    num_calls: int
    num_failed_calls: int

    @property
    def num_written(self) -> int:
        """The number of the environment's tokens."""
        return sum(end - start for start, end in self.environment_spans)


@dataclass
class Transcript:
    """The course of an episode."""

    prompt_ids: list[int]
    """The tokens before the first turn."""
    prompt: list[Message]
    """The same as messages, with what the environment has added."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the prompt shows."""
    turns: list[Turn] = field(default_factory=list)
    end: str = ""
    """Why it has ended, in one of the words above; empty while it goes on."""
    problem: str = ""
    """How the environment has failed."""
    reward: float | None = None
    """The environment's own reward."""

    @property
    def completion(self) -> Completion:
        """All tokens behind the prompt. Those of the environment have log-probabilities of 0."""
        token_ids: list[int] = []
        logps: list[float] = []
        for turn in self.turns:
            token_ids += turn.completion.token_ids + turn.following_ids
            own = turn.completion.logps or [0.0] * len(turn.completion.token_ids)
            logps += own + [0.0] * len(turn.following_ids)
        is_done = bool(self.turns) and self.turns[-1].completion.is_done
        has_logps = all(turn.completion.logps is not None for turn in self.turns)
        return Completion(token_ids, is_done, logps if has_logps else None)

    @property
    def record(self) -> EpisodeRecord:
        """The course of the episode besides its tokens."""
        spans = []
        start = 0
        for turn in self.turns:
            end_of_turn = start + len(turn.completion.token_ids)
            start = end_of_turn + len(turn.following_ids)
            if turn.following_ids:
                spans.append([end_of_turn, start])
        return EpisodeRecord(
            self.messages,
            spans,
            self.end,
            self.problem,
            len(self.turns),
            sum(turn.num_calls for turn in self.turns),
            sum(turn.num_failed_calls for turn in self.turns),
        )

    @property
    def messages(self) -> list[Message]:
        """The messages behind the prompt."""
        messages: list[Message] = []
        for turn in self.turns:
            messages += [turn.message, *turn.following]
        return messages

    def to_json(self) -> dict[str, Any]:
        """The transcript as an object of JSON."""
        return vars(self) | {"turns": [turn.to_json() for turn in self.turns]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Transcript":
        """The reverse of `to_json`. Raises KeyError or TypeError for other objects."""
        return cls(**dict(record) | {"turns": [Turn.from_json(turn) for turn in record["turns"]]})
