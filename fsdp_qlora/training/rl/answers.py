"""The answers of a generation, with what reward functions and rollouts.jsonl get of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.training.episodes.transcript import FAILED, Transcript
from fsdp_qlora.training.generation.sampling import Completion


class Answer(NamedTuple):
    """An answer to a prompt: one completion, or an episode."""

    prompt: Prompt
    completion: Completion
    """For an episode, all tokens behind its prompt."""
    text: str
    transcript: Transcript | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it can be scored: not an episode that failed, or ended before its first turn."""
        transcript = self.transcript
        return transcript is None or (bool(transcript.turns) and transcript.end != FAILED)

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


def answers_of_prompts(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    text_of: Callable[[list[int]], str],
) -> list[Answer]:
    """The answers of one completion each. text_of: gives the text of tokens."""
    answers = []
    for prompt, completion in zip(prompts, completions, strict=True):
        answers.append(Answer(prompt, completion, text_of(completion.token_ids)))
    return answers


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
