"""What a teacher's server tells of tokens: read as it is meant, or refused in a sentence."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.server_teacher import ServerTeacher
from fsdp_qlora.utils.errors import RolloutError
from tests.rollouts.lora_server import LoraServer

pytestmark = pytest.mark.quick

K = 2
VOCABULARY = 10
PROMPT = [1, 2]
COMPLETION = [3, 4]


@pytest.fixture
def server() -> Iterator[LoraServer]:
    with LoraServer("hub/teacher", lambda *_: ([], []), 1) as found:
        yield found


@pytest.fixture
def teacher(server: LoraServer, alone: Ranks) -> ServerTeacher:
    return ServerTeacher(Server(server.url, ["hub/teacher"], 0.5), K, VOCABULARY, alone, Control())


def logp(value: Any) -> dict[str, Any]:
    return {"logprob": value, "rank": 1}


HALF = math.log(0.5)
QUARTER = math.log(0.25)
TOLD = {"7": logp(HALF), "5": logp(QUARTER)}


def tells(server: LoraServer, found: Any) -> None:
    content = {"choices": [{"prompt_logprobs": found}]}
    server.faults.append(
        lambda path, body: (200, json.dumps(content).encode()) if "prompt" in body else None
    )


def test_the_likeliest_tokens_and_the_rest_are_read(teacher, server):
    # more than asked; 12 is the teacher's alone
    unknown = {"12": logp(QUARTER), "5": logp(HALF), "9": logp(-9999.0)}
    tells(server, [None, TOLD, TOLD, unknown])
    teacher.request([PROMPT], [COMPLETION], 0)
    never = torch.tensor(1e-30).log().item()
    expected = [[7, 5, HALF, QUARTER, QUARTER], [5, -1, HALF, never, HALF]]
    torch.testing.assert_close(teacher._values, torch.tensor(expected))


def last(found: dict[str, Any]) -> list[Any]:
    """What is told where the last token has these likely ones."""
    return [None, TOLD, TOLD, found]


def last_also(token: str, found: Any) -> list[Any]:
    return last({**TOLD, token: found})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "with null as choices[0].prompt_logprobs, which is a list"),
        ([None, TOLD, TOLD], "but 3 for 4 tokens"),
        ([None, TOLD, TOLD, None], "but null for one token"),
        (last({}), "but 0 tokens where --top_k 2 are asked"),
        (last({"7": logp(HALF)}), "but 1 tokens where --top_k 2 are asked"),
        (last_also("-1", logp(-9.0)), 'the id "-1"'),
        (last_also("07", logp(-9.0)), 'the id "07"'),
        (last_also("blue", logp(-9.0)), 'the id "blue"'),
        (last_also("9" * 400, logp(-9.0)), "a token with the id"),
        (last_also("3", None), "null as the log-probability of the token 3"),
        (last_also("3", logp(math.nan)), "nan as the log-probability of the token 3"),
        (last_also("3", logp(10**300)), "as the log-probability of the token 3"),
        (last_also("3", logp(True)), "true as the log-probability of the token 3"),
        (last_also("3", logp(HALF)), "probabilities add up to 1.25"),
    ],
)
def test_what_a_teachers_server_cannot_mean_is_refused(teacher, server, found, said):
    tells(server, found)
    with pytest.raises(RolloutError) as caught:
        teacher.request([PROMPT], [COMPLETION], 0)
    message = str(caught.value)
    assert said in message and server.url in message and "--max-logprobs 2" in message
    assert len(message) < 1000
    assert not re.search(r"\wError\(|NoneType|subscript", message)
