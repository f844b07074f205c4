"""Episodes in an environment on the stand-in with values, beside the same runs on the CPU."""

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stand_in.beside_cpu import Beside, Differences, run_both
from stand_in.environment import Rank, run
from tests.episodes.runs import inputs, make_counting_agent
from tests.helpers.run import flags
from tests.rollouts.lora_server import LoraServer
from tests.rollouts.runs import rollouts_of

# Advantages cancel: see test_train.py.
FP32 = Differences(loss=1e-3, grad_norm=1e-4, weights=1e-3)
HALVES = Differences(loss=2e-2, grad_norm=2e-2, weights=5e-2)
PLAIN = {"optimizer": "sgd", "lr": 0.1, "recompute": "all", "sharding_strategy": "full_shard"}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_counting_agent(tmp_path_factory.mktemp("agent"))


def start(
    agent: Path, changes: dict[str, Any], folder: Path, settings: dict[str, Any]
) -> list[Rank]:
    """Two ranks of a run, on the stand-in or on the CPU."""
    folder.mkdir()
    options = inputs(folder, agent, max_steps=2, num_epochs=2, batch_size=4, **PLAIN, **changes)
    options |= {"gradient_accumulation_steps": 2, "log_to": "stdout"}
    words = ["train.py", *flags(**options, output_dir=folder / "output")]
    settings |= {"LOCAL_WORLD_SIZE": 2, "PHANTOM_CC": 90}
    ended = run(words, folder, ranks=2, settings=settings)
    assert [rank.status for rank in ended] == [0, 0], ended[0].output[-4000:]
    return ended


def compared(agent: Path, folder: Path, **changes: Any) -> Beside:
    begin: Callable[..., list[Rank]] = partial(start, agent, changes)
    beside = run_both(begin, folder, agent)
    assert beside.strays == {}
    of_both = [rollouts_of(folder / place / "output") for place in ("device", "cpu")]
    for first, second in zip(*of_both, strict=True):
        assert first["token_ids"] == second["token_ids"]
        assert first["episode"] == second["episode"]
    assert max(line["episode"]["num_turns"] for line in of_both[0]) > 1
    return beside


@pytest.mark.slow
def test_episodes_of_the_model_itself_have_the_numbers_of_the_cpu(agent, tmp_path):
    found = compared(agent, tmp_path, train_type="qlora").differences
    assert all(map(operator.le, found, FP32)), found


def scripted(
    call: int, end: int, adapter: str, request: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """A turn that calls the tool or not, whatever the weights are."""
    tokens = [call, end] if request["seed"] % 3 else [end]
    return tokens, [-1.0] * len(tokens)


@pytest.mark.slow
def test_episodes_in_16_bits_with_the_base_on_the_host_have_them_too(agent, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(agent)
    end = tokenizer.eos_token_id
    [call] = tokenizer('<tool_call>\n{"name": "take", "arguments": {}}\n</tool_call>')["input_ids"]
    with LoraServer("agent", partial(scripted, call, end), end) as server:
        changes = {"rollout_url": server.url, "base_name": "hub/agent", "precision": "bf16"}
        changes |= {"train_type": "qlora", "use_cpu_offload": True}
        found = compared(agent, tmp_path, **changes).differences
    assert all(map(operator.le, found, HALVES)), found
