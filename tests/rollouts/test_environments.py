"""Environments: tools and their schemas, episodes side by side, broken environments, and hostile
arguments and results.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from transformers.utils import get_json_schema

from fsdp_qlora.training.environments.channel import MOST_BYTES
from fsdp_qlora.training.environments.episode import EpisodeFailed, Limits
from fsdp_qlora.training.environments.keeper import MOST_OUTPUT
from fsdp_qlora.training.environments.pool import Environments
from fsdp_qlora.training.environments.turns import add_observation, first_messages
from fsdp_qlora.training.environments.user_class import MOST_CHARACTERS
from fsdp_qlora.training.environments.words import parse_environments
from fsdp_qlora.utils.errors import RankError, UserError
from tests.helpers.run import ROOT
from tests.rollouts.environment_files import (
    FOREVER,
    left_processes,
    running,
    wait_until_gone,
    write_broken,
    write_game,
)


def test_words_name_files_and_environments_of_verifiers():
    [one] = parse_environments(["a/b.py:C"])
    assert (one.name, str(one.path), one.member) == (None, "a/b.py", "C")
    two = parse_environments(["game=a.py:A", "code=verifiers:wordle"])
    assert [(each.name, each.member) for each in two] == [("game", "A"), ("code", "wordle")]
    assert two[1].path is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["game.py"], r"--environment game\.py: give FILE\.py:CLASS or verifiers:NAME"),
        (["verifiers:"], "give FILE"),
        (["game.txt:Game"], "give FILE"),
        (["a.py:A", "b=b.py:B"], r"needs a name.* such as NAME=a\.py:A"),
        (["a=a.py:A", "a=b.py:B"], "two are called a"),
    ],
)
def test_words_of_another_form_are_refused(words, said):
    with pytest.raises(UserError, match=said):
        parse_environments(words)


def test_an_episode_is_played_as_trl_plays_it(shared):
    environments = shared[0]
    with environments.open("game", {"target": 5, "prompt": [{"role": "user"}]}) as episode:
        assert episode.reset() == "Reach 5."
        assert episode.call("add", {"amount": 2}) == ("The sum is 2.", False)
        assert not episode.is_over
        assert episode.message("hm") is None
        for tool in ("subtract", "reset", "get_reward", "__init__"):
            said = f"{{'error': 'Tool {tool} not found.'}}"
            assert episode.call(tool, {}) == (said, True)
        text, is_error = episode.call("add", {"number": 1})
        assert is_error and "unexpected keyword argument" in text
        assert episode.call("add", ["1"]).is_error
        assert episode.call("add", {"amount": 3}).text == "The sum is 5."
        assert episode.is_over
        assert episode.reward([]) == 1
    # Another episode begins anew.
    with environments.open("game", {"target": 5}) as episode:
        episode.reset()
        assert episode.call("add", {"amount": 1}).text == "The sum is 1."
        assert episode.reward([]) == 0


def test_schemas_are_those_of_transformers(tmp_path):
    word = write_game(tmp_path)
    variables = {}
    exec((tmp_path / "game.py").read_text(), variables)
    game = variables["Game"]()
    environments = Environments([word], call_seconds=60, episode_seconds=120)
    facts = environments.start()[None]
    environments.close()
    tools = (game.add, game.echo, game.wait_for)
    assert facts.tools == [get_json_schema(tool) for tool in tools]
    assert (facts.class_name, facts.has_reward, facts.has_message) == ("Game", True, False)
    assert facts.described.startswith("game.py:Game (sha256 ")


def test_rows_choose_among_environments_by_name(shared):
    environments = shared[0]
    row = {"environment": "broken", "reset": "result = str(sorted(row))"}
    with environments.open("broken", row) as episode:
        assert episode.reset() == "['reset']"
    with environments.open("game", {"target": 1}) as episode:
        assert episode.reset() == "Reach 1."
    with pytest.raises(RankError, match=r"has 'chess'\. There are: game, broken\."):
        environments.open("chess", {})


def call_of(tool, **arguments):
    function = {"name": tool, "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_an_episode_is_a_conversation_until_it_is_over(shared):
    prompt = [{"role": "user", "content": "Play. "}]
    first = [{"role": "user", "content": "Play. Reach 3."}]
    with shared[0].open("game", {"target": 3, "prompt": prompt}) as episode:
        turn = episode.next(None)
        assert turn.messages == first
        assert [tool["function"]["name"] for tool in turn.tools] == ["add", "echo", "wait_for"]
        answer = call_of("add", amount=2)
        result = {"role": "tool", "name": "add", "content": "The sum is 2."}
        assert episode.next(answer).messages == [*first, answer, result]
        assert episode.next(call_of("add", amount=1)) is None
        assert episode.reward([]) == 1
    with shared[0].open("game", {"target": 3}) as episode:
        assert episode.next(None).messages == [{"role": "user", "content": "Reach 3."}]
        # It calls no tool, and this environment has no answer to that.
        assert episode.next({"role": "assistant", "content": "3"}) is None
    assert shared[0].rows("game") is None


CHAT = """
class Chat:
    done = False

    async def reset(self, **row):
        return [{"role": "user", "content": "Count."}]

    def message(self, text):
        self.done = text == "2"
        return None if text == "bye" else f"After {text}?"

    def reward(self, messages):
        return len(messages)
"""


def test_an_environment_without_tools_answers_by_messages(tmp_path):
    (tmp_path / "chat.py").write_text(CHAT)
    with running(f"{tmp_path}/chat.py:Chat") as environments:
        with environments.open(None, {}) as episode:
            assert episode.next(None) == ([{"role": "user", "content": "Count."}], [])
            turn = episode.next({"role": "assistant", "content": "1"})
            assert turn.messages[2:] == [{"role": "user", "content": "After 1?"}]
            assert episode.next({"role": "assistant", "content": "2"}) is None
            assert episode.reward(turn.messages) == 3
        with environments.open(None, {}) as episode:
            episode.next(None)
            assert episode.next({"role": "assistant", "content": "bye"}) is None
            assert not episode.is_over


BLOCK = {"type": "text", "text": "b"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        (None, [{"role": "user", "content": "a"}]),
        ("b", [{"role": "user", "content": "ab"}]),
        ([BLOCK], [{"role": "user", "content": [{"type": "text", "text": "a"}, BLOCK]}]),
        ([SYSTEM], [{"role": "user", "content": "a"}, SYSTEM]),
    ],
)
def test_an_observation_joins_the_prompt_as_trl_joins_it(observation, messages):
    prompt = [{"role": "user", "content": "a"}]
    assert add_observation(prompt, observation) == messages
    assert prompt == [{"role": "user", "content": "a"}]


def test_an_environment_can_give_the_whole_prompt():
    assert add_observation(first_messages({}), [SYSTEM]) == [SYSTEM]
    blocks = [{"role": "user", "content": [BLOCK]}]
    assert add_observation(blocks, "c")[0]["content"] == [BLOCK, {"type": "text", "text": "c"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Game:\n    x = 1 / 0", r"game\.py:2 cannot be run: ZeroDivisionError"),
        ("class Chess: pass", r"has no class 'Game'\. It has: Chess\."),
        ("class Game: pass", "Game has no method reset"),
        ("import os; os._exit(3)", "the process that runs the file has ended"),
        (
            "class Game:\n    def reset(self): pass\n    def move(self, x): pass",
            r"the method move \(.*game\.py:3\) is a tool, .*docstring",
        ),
        (
            'class Game:\n    def reset(self): pass\n    def move(self, x):\n        """M."""',
            r"the method move \(.*game\.py:3\) is a tool, .*type hint",
        ),
        ("class Game:\n    def __init__(self): open('none')", r"__init__ raised FileNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(text, said, tmp_path):
    path = tmp_path / "game.py"
    path.write_text(text)
    environments = Environments([f"{path}:Game"], call_seconds=60, episode_seconds=120)
    with pytest.raises(RankError, match=said):
        environments.start()
    environments.close()


def test_a_file_that_does_not_end_is_refused(tmp_path):
    path = tmp_path / "game.py"
    path.write_text("while True: pass")
    environments = Environments([f"{path}:Game"], call_seconds=1, episode_seconds=1)
    with pytest.raises(RankError, match="the file did not run within 1 s"):
        environments.start()


BROKEN = {
    "hangs in reset": ({"reset": FOREVER}, "reset did not return within 4 s"),
    "hangs in a tool": ({"tool": FOREVER}, "tool did not return within 4 s"),
    "raises in reset": ({"reset": "1 / 0"}, r"reset raised ZeroDivisionError.*\(broken\.py:\d+\)"),
    "raises in the reward": ({"reward": "none"}, "get_reward raised NameError"),
    "calls sys.exit": ({"tool": "sys.exit(3)"}, "tool raised SystemExit: 3"),
    "calls os._exit": ({"tool": "os._exit(3)"}, r"the process has ended \(status 3\)"),
    "is killed": ({"tool": "os.kill(os.getpid(), 9)"}, r"killed by signal 9 \(is there too little"),
    "takes memory": ({"tool": "bytearray(5 << 30)"}, "takes more than 4 GiB of memory"),
    "takes memory in reset": ({"reset": "bytearray(5 << 30)"}, "takes more than 4 GiB"),
    "closes files": ({"tool": "os.closerange(0, 999)"}, "has closed its connection to the run"),
    "writes into the reply": (
        {"tool": "[os.write(n, b'{}\\n') for n in sockets()]"},
        "something else has written into the reply",
    ),
    "writes no JSON": (
        {"tool": "[os.write(n, b'\\xff\\0{\\n') for n in sockets()]"},
        "the reply cannot be read: it is no JSON",
    ),
    "writes without end": (
        {"tool": "[os.write(n, b'x' * (1 << 20)) for _ in range(99) for n in sockets()]"},
        f"it has more than {MOST_BYTES >> 20} MiB",
    ),
    "a reward of NaN": ({"reward": "result = float('nan')"}, "returned nan, which is no finite"),
    "a reward of text": ({"reward": "result = '1'"}, "returned '1', which is no finite number"),
    "a circle": ({"reset": "result = [{'text': 'a'}]; result[0]['self'] = result"}, "is no JSON"),
    "another kind": ({"reset": "result = 3"}, "reset returned a int, not None"),
    "a huge observation": ({"reset": "result = 'a' * (17 << 20)"}, "more than 16 MiB"),
    "children that outlive a hang": (
        {"tool": f"outlive(row['mark'])\n{FOREVER}"},
        "tool did not return",
    ),
    "children that outlive its end": (
        {"tool": "outlive(row['mark']); os._exit(0)"},
        r"ended \(status 0\)",
    ),
    "children that hold its files": (
        {"tool": "[os.fork() or time.sleep(600) for _ in range(3)]; os._exit(4)"},
        r"ended \(status 4\)",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A sound and a broken environment, whose calls may take long or 4 seconds."""
    folder = tmp_path_factory.mktemp("shared")
    words = (f"game={write_game(folder)}", f"broken={write_broken(folder)}")
    with running(*words) as patient, running(*words, call_seconds=4) as impatient:
        yield patient, impatient


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_environment_fails_alone_and_leaves_nothing(kind, shared, tmp_path):
    code, said = BROKEN[kind]
    environments = shared["did not return" in said]
    before = set(psutil.Process().children(recursive=True))
    with environments.open("game", {"target": 1}) as other:
        other.reset()
        episode = environments.open("broken", code | {"mark": str(tmp_path)})
        with pytest.raises(EpisodeFailed, match=said) as failure:
            play(episode)
        reason = str(failure.value)
        assert "\n" not in reason and reason.startswith("broken.py:Broken (sha256 ")
        with pytest.raises(EpisodeFailed, match=said):
            episode.reset()
        assert left_processes(str(tmp_path)) == []
        assert other.call("add", {"amount": 1}) == ("The sum is 1.", False)
    left = set(psutil.Process().children(recursive=True)) - before
    wait_until_gone([process.pid for process in left])


def play(episode):
    episode.reset()
    episode.call("tool", {})
    episode.reward([])


def test_what_an_episode_prints_is_bounded_and_has_no_secrets(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "geheimnis-123")
    tool = (
        "print(os.environ['SOME_TOKEN'])\nprint('x' * 99)\n"
        "for _ in range(1 << 10): os.write(2, b'y' * (1 << 20))"
    )
    word = write_broken(tmp_path)
    with running(word) as environments, environments.open(None, {"tool": tool}) as episode:
        episode.reset()
        assert episode.call("tool", {}) == ("None", False)
    said = capfd.readouterr().err
    assert "geheimnis" not in said and "[secret]" in said
    assert len(said) < 2 * MOST_OUTPUT
    assert "an episode has printed 1,073,741,938 bytes." in said
    assert f"The first {MOST_OUTPUT:,} are shown." in said


def test_a_slow_tool_holds_no_other_episode(shared, tmp_path):
    mark = tmp_path / "there"
    environments = shared[0]
    slow = environments.open("game", {"target": 1})
    results = []
    thread = threading.Thread(
        target=lambda: results.append(slow.call("wait_for", {"path": str(mark)}))
    )
    thread.start()
    with environments.open("game", {"target": 1}) as quick:
        quick.reset()
        assert quick.call("add", {"amount": 1}).text == "The sum is 1."
    assert not results
    mark.touch()
    thread.join()
    assert results == [("It is there.", False)]
    slow.close()


def test_an_episode_too_many_waits_for_a_place(tmp_path):
    with running(write_game(tmp_path), at_a_time=1) as environments:
        first = environments.open(None, {"target": 1})
        opened = []
        thread = threading.Thread(
            target=lambda: opened.append(environments.open(None, {"target": 2}))
        )
        thread.start()
        assert first.reset() == "Reach 1." and not opened
        first.close()
        first.close()  # gives back no second place
        thread.join()
        assert opened[0].reset() == "Reach 2."
        opened[0].close()


def test_the_calls_of_an_episode_have_a_limit_together(tmp_path):
    with running(write_broken(tmp_path)) as environments:
        host = environments._hosts[None]
        host._limits = Limits(call=60, episode=2)
        episode = environments.open(None, {"tool": "time.sleep(0.7)"})
        episode.reset()
        said = "the episode's calls took more than 2 s in all"
        with pytest.raises(EpisodeFailed, match=said):
            for _ in range(5):
                episode.call("tool", {})


TEXTS = ["", "\0", "\ud800", "\udfff x", "\u2028", "\r\n", "{'a'", "\x1b[", "x" * 70_000]
LEAVES = [None, True, -1, 10**40, 1e308, float("nan"), float("-inf"), *TEXTS]


def value_of(source: random.Random, depth: int = 0) -> object:
    """A value such as a model or an environment makes by mistake."""
    if depth > 3 or source.random() < 0.5:
        return source.choice(LEAVES)
    values = [value_of(source, depth + 1) for _ in range(source.randrange(4))]
    if source.random() < 0.5:
        return values
    return {source.choice(TEXTS[:8]) + str(place): value for place, value in enumerate(values)}


def expected_text(value: object) -> str:
    """What a model gets of a value: no lone surrogates, and at most the first characters."""
    line = json.dumps(value).replace("\\ud800", "?").replace("\\udfff", "?")
    text = str(json.loads(line))
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[The result is cut here: it has {len(text):,} characters.]"


def test_hostile_arguments_and_results_arrive_or_are_errors(shared):
    source = random.Random(7)
    with shared[0].open("game", {"target": 1}) as episode:
        episode.reset()
        for _ in range(200):
            value = value_of(source)
            assert episode.call("echo", {"value": value}) == (expected_text(value), False)
            assert episode.call("echo", value).is_error
        loop: list[object] = []
        loop.append(loop)
        with pytest.raises(EpisodeFailed, match="cannot be read: Circular"):
            episode.call("echo", {"value": loop})


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("result = b'\\x00\\xff'", "b'\\x00\\xff'"),
        ("result = '\\ud800\\x00'", "?\0"),
        ("result = []; result.append(result)", "[[...]]"),
        ("raise ValueError('\\udfff')", "{'error': '\\udfff'}"),
        ("raise RecursionError()", "{'error': ''}"),
        ("result = type('A', (), {'__str__': lambda a: 1 / 0})()", "{'error': 'division by zero'}"),
    ],
)
def test_results_of_a_tool_are_text_whatever_they_are(tool, text, shared):
    with shared[0].open("broken", {"tool": tool}) as episode:
        episode.reset()
        assert episode.call("tool", {}).text == text


PARENT = """
import sys, time
from fsdp_qlora.training.environments.pool import Environments
environments = Environments([sys.argv[1]], call_seconds=60, episode_seconds=60)
environments.start()
row = {"reset": "outlive(row['mark']); time.sleep(1)", "tool": "while True: pass"}
episode = environments.open(None, row | {"mark": sys.argv[2]})
episode.reset()
print("ready", flush=True)
episode.call("tool", {})
"""


def test_a_killed_run_leaves_no_process(tmp_path):
    mark = f"{tmp_path}/mark"
    command = [sys.executable, "-c", PARENT, write_broken(tmp_path), mark]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        pids = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        # a host, a keeper, a process of an episode, and five that have left them
        assert len(pids) >= 8
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
    assert left_processes(mark) == []
