"""Single episodes with an environment in this process: how they end, go on, and are scored."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdp_qlora.data.content import Chat
from fsdp_qlora.data.prompts import Prompt
from fsdp_qlora.training.environments.episode import EpisodeFailed
from fsdp_qlora.training.environments.turns import Turn as Request
from fsdp_qlora.training.episodes.play import Episodes
from fsdp_qlora.training.episodes.played_episode import Episode, Limits, Stage
from fsdp_qlora.training.episodes.turns_file import TurnsFile
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.generation.tool_turns import ToolTurns
from fsdp_qlora.training.rl.answers import answers_of_episodes
from fsdp_qlora.training.rl.scoring import reward_arguments
from fsdp_qlora.utils.errors import RolloutError

pytestmark = pytest.mark.quick

ASKED = [{"role": "user", "content": "count 2"}]
TOOLS = [{"type": "function", "function": {"name": "take", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "take", "arguments": {}}\n</tool_call>'


class Counter:
    """The process of an episode: every call is answered by a number."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.answers: list[dict[str, Any]] = []
        self.num_failed_calls = 0
        self.is_over = False

    def next(self, answer: dict[str, Any] | None) -> Request | None:
        if self.world.fails:
            raise EpisodeFailed("the service is down")
        if answer is not None:
            self.answers.append(answer)
            if not answer.get("tool_calls"):
                return None
        messages = [*ASKED, *self.world.more]
        for place, said in enumerate(self.answers):
            messages += [said, {"role": "tool", "name": "take", "content": str(place)}]
        return Request(messages, TOOLS)

    def reward(self, messages: list[Any]) -> float | None:
        if self.world.is_killed_at_reward:
            raise SystemExit
        return float(len(self.answers))

    def close(self) -> None:
        self.world.closed += 1

    kill = close


class World:
    """Opens environments, as `Environments` does."""

    def __init__(self) -> None:
        self.fails = False
        self.is_killed_at_reward = False
        self.more: list[dict[str, Any]] = []
        self.closed = 0

    def open(self, name: str | None, row: Mapping[str, Any]) -> Any:
        return Counter(self)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer(agent: Path) -> Any:
    return AutoTokenizer.from_pretrained(agent)


@pytest.fixture(scope="module")
def tool_turns(tokenizer: Any) -> ToolTurns:
    return ToolTurns(tokenizer)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def stage(world: World, tool_turns: ToolTurns, tmp_path: Path) -> Stage:
    file = TurnsFile(tmp_path / "episodes.jsonl")
    return Stage(world, tool_turns, Limits(3, 80), file, threading.Lock())


@pytest.fixture
def prompt(tool_turns: ToolTurns) -> Prompt:
    ids = tool_turns.prompt_ids(ASKED, TOOLS)
    return Prompt(1, ids, ASKED, {}, chat=Chat(ASKED, TOOLS))


def said(tokenizer: Any, *texts: str) -> list[Completion]:
    found = [tokenizer(text + "<|im_end|>")["input_ids"] for text in texts]
    return [Completion(ids, is_done=True, logps=[-1.0] * len(ids)) for ids in found]


def play(episode: Episode, turns: Sequence[Completion]) -> Episode:
    episode.begin()
    for turn in turns:
        if not episode.is_over:
            episode.take(turn)
    return episode


@pytest.mark.parametrize(
    ("texts", "end", "reward"),
    [
        (["done"], "answered", 1),
        ([CALL, "done"], "answered", 2),
        ([CALL, CALL, CALL, "done"], "max_turns", 3),
        ([CALL, "done" * 29], "length", 1),
    ],
)
def test_an_episode_goes_on_until_a_word_says_why_not(texts, end, reward, stage, prompt, tokenizer):
    turns = said(tokenizer, *texts)
    if end == "length":
        turns[-1] = turns[-1]._replace(is_done=False)
    transcript = play(Episode(stage, prompt, 0, 0), turns).transcript
    assert (transcript.end, transcript.reward) == (end, reward)
    assert len(transcript.turns) == min(len(texts), 3)
    [known] = stage.file.read(0).values()
    assert known == transcript


def test_an_episode_that_was_stopped_at_its_reward_is_only_scored(stage, prompt, tokenizer, world):
    turns = said(tokenizer, CALL, "done")
    whole = play(Episode(stage, prompt, 0, 0), turns).transcript
    world.is_killed_at_reward = True
    with pytest.raises(SystemExit):
        play(Episode(stage, prompt, 0, 1), turns)
    world.is_killed_at_reward = False
    again = Episode(stage, prompt, 0, 1, stage.file.read(0)[1])
    again.begin()
    assert again.is_over and again.transcript == whole


def test_a_reset_without_room_for_a_turn_leaves_the_rows_prompt(stage, prompt, world):
    world.more = [{"role": "user", "content": "count " * 200}]
    episode = Episode(stage, prompt, 0, 0)
    episode.begin()
    assert episode.transcript.end == "length" and episode.transcript.prompt_ids == prompt.ids
    assert stage.file.read(0)[0] == episode.transcript


def test_a_run_goes_on_once_its_environment_is_mended(stage, prompt, tokenizer, world, alone):
    turns = said(tokenizer, CALL, "done")

    def engine(episodes: Sequence[Episode], *_: int) -> None:
        for episode in episodes:
            play(episode, turns)

    episodes = Episodes(engine, stage, alone, {"": "Counter"})
    world.fails = True
    with pytest.raises(RolloutError, match="failed in 3 of 3 episodes"):
        episodes.play([prompt] * 3, 0, 0)
    world.fails = False
    assert [each.reward for each in episodes.play([prompt] * 3, 0, 0)] == [2, 2, 2]
    world.more = [{"role": "user", "content": "count " * 200}]
    with pytest.raises(RolloutError, match="leave no room for a turn in 3 of 3"):
        episodes.play([prompt] * 3, 1, 1)


def test_functions_get_episodes_in_which_the_model_said_something(stage, prompt, tokenizer, world):
    whole = play(Episode(stage, prompt, 0, 0), said(tokenizer, CALL, "done")).transcript
    world.fails = True
    failed = play(Episode(stage, prompt, 0, 1), []).transcript
    answers = answers_of_episodes([prompt] * 2, [whole, failed], str)
    assert [answer.is_sound for answer in answers] == [True, False]
    [messages] = reward_arguments(answers[:1])["completions"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert failed.problem == "the service is down" and failed.reward is None


def test_an_abandoned_episode_writes_nothing_more(stage, prompt, tokenizer, world):
    episode = Episode(stage, prompt, 0, 0)
    episode.begin()
    before = stage.file.path.read_bytes()
    episode.abandon()
    world.fails = True
    episode.take(said(tokenizer, CALL)[0])
    assert world.closed and stage.file.path.read_bytes() == before
    late = Episode(stage, prompt, 0, 1)
    late.abandon()
    late.begin()
    assert stage.file.path.read_bytes() == before


def test_a_round_with_a_missing_turn_is_sampled_again_as_a_whole(stage, prompt, tokenizer):
    turns = said(tokenizer, CALL, "done")
    episodes = [Episode(stage, prompt, 0, place) for place in range(2)]
    for episode in episodes:
        episode.begin()
    episodes[0].write_round([0, 1])
    for episode in episodes:
        episode.take(turns[0])
    episodes[0].write_round([0, 1])
    before = stage.file.read(0)
    assert [len(transcript.turns) for transcript in before.values()] == [1, 1]
    episodes[0].write_round([0, 1])
    episodes[0].take(turns[1])
    assert episodes[0].is_over and stage.file.read(0) == before
    assert stage.file.path.read_bytes().count(b"round") == 1
