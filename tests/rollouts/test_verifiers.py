"""Environments of verifiers, played through the same interface; they need that library and uv."""

import shutil

import pytest

from fsdp_qlora.utils.errors import RankError
from tests.rollouts.environment_files import running

pytest.importorskip("verifiers.v1", reason="pip install 'fsdp_qlora[environments]'")
pytestmark = pytest.mark.skipif(not shutil.which("uv"), reason="needs uv")

TASKSET = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Doubling(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def double(self, number: int) -> str:
        """Double a number."""
        return f"Twice is {2 * number}."


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Doubling(vf.ToolsetConfig())]

    @vf.reward
    async def is_double(self, trace: vf.Trace) -> float:
        return float(str(2 * self.data.number) in (trace.last_reply or ""))


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in (3, 4):
            yield Task(Data(prompt=f"Double {number}.", number=number), self.config.task)


__all__ = ["Tasks"]

if __name__ == "__main__":
    Doubling.run()
'''


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taskset")
    (folder / "doubling_v1.py").write_text(TASKSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with running("verifiers:doubling-v1", call_seconds=100, episode_seconds=300) as started:
            yield started


def test_rows_are_the_tasks(environments):
    prompts = [f"Double {number}." for number in (3, 4)]
    assert environments.rows(None) == [
        {"task": place, "prompt": [{"role": "user", "content": prompt}]}
        for place, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("said", "reward"), [("It is 8.", 1), ("No idea.", 0)])
def test_an_episode_asks_for_answers_and_calls_its_own_tools(said, reward, environments):
    with environments.open(None, environments.rows(None)[1]) as episode:
        turn = episode.next(None)
        assert turn.messages == [{"role": "user", "content": "Double 4."}]
        [tool] = [tool["function"] for tool in turn.tools]
        assert "double" in tool["name"] and tool["description"] == "Double a number."
        function = {"name": tool["name"], "arguments": {"number": 4}}
        calls = [{"type": "function", "function": function}]
        turn = episode.next({"role": "assistant", "content": "", "tool_calls": calls})
        assert [message["role"] for message in turn.messages] == ["user", "assistant", "tool"]
        assert "Twice is 8." in str(turn.messages[-1]["content"])
        assert episode.next({"role": "assistant", "content": said}) is None
        assert episode.is_over and episode.reward([]) == reward


def test_an_unknown_environment_is_refused():
    said = "no-such-v1 cannot be loaded: ModuleNotFoundError: taskset 'no-such-v1' not found"
    with pytest.raises(RankError, match=said), running("verifiers:no-such-v1"):
        pass
