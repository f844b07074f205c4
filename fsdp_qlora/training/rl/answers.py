"""The answers of a generation, with what reward functions and rollouts.jsonl get of them."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.training.episodes.transcript import Transcript
from fsdp_qlora.training.generation.sampling import Completion


class Answer(NamedTuple):
    """An answer to a prompt: one completion, or an episode."""

    prompt: Prompt
    completion: Completion
    """For an episode, all tokens behind its prompt."""
    text: str
    transcript: Transcript | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.transcript.prompt_ids if self.transcript else self.prompt.ids

    @property
    def shown_prompt(self) -> Any:
        """The prompt as reward functions get it: a text or messages."""
        return self.transcript.prompt if self.transcript else self.prompt.content

    @property
    def shown(self) -> Any:
        """The answer as reward functions get it. Answers to messages are messages too."""
        if self.transcript:
            return self.transcript.messages
        if isinstance(self.prompt.content, str):
            return self.text
        return [{"role": "assistant", "content": self.text}]


def answers_of_episodes(
    prompts: Sequence[Prompt],
    transcripts: Sequence[Transcript],
    text_of: Callable[[list[int]], str],
) -> list[Answer]:
    """The answers of episodes. The text of one is what the model has said last."""
    answers = []
    for prompt, transcript in zip(prompts, transcripts, strict=True):
        last = transcript.turns[-1].completion.token_ids if transcript.turns else []
        answers.append(Answer(prompt, transcript.completion, text_of(last), transcript))
    return answers


def batch_of(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """The arguments of reward functions, which are TRL's."""
    # Rows of several datasets may have other columns: a function gets None for a missing one.
    rows = [answer.prompt.for_rewards for answer in answers]
    names = dict.fromkeys(chain(*rows))
    arguments: dict[str, list[Any]] = {}
    for name in names:
        arguments[name] = [row.get(name) for row in rows]
    # Last, so that no column of the dataset replaces them.
    arguments["prompts"] = [answer.shown_prompt for answer in answers]
    arguments["completions"] = [answer.shown for answer in answers]
    arguments["completion_ids"] = [answer.completion.token_ids for answer in answers]
    return arguments
