"""Answers from a server: what it is asked, what is waited for, what ends a run, and runs whose
server is killed.
"""

import json
import math
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.training.rl import waiting
from fsdp_qlora.training.rl.client import check_server
from fsdp_qlora.utils.errors import RankError, RolloutError, RunStopped
from tests.chaos.harness import Job, adapter, ended, finish, steps_done, wait_for
from tests.helpers.models import Models
from tests.rollouts.lora_server import LoraServer, Sampler
from tests.rollouts.runs import rollouts_of
from tests.rollouts.server_runs import (
    END,
    LONGEST,
    PROMPTS,
    ServerProcess,
    asked,
    choose,
    once,
    options_of,
    says_once,
)


@pytest.mark.quick
def test_ranks_wait_for_rank_0_by_gloo_whatever_their_device(engine):
    # as a GPU, with which NCCL's kernels would wait
    ranks = Ranks(0, 0, 1, 1, torch.device("meta"))
    assert waiting.run_on_rank_0(lambda: "42", Control(), ranks, 0) == "42"


@pytest.mark.quick
def test_each_answer_is_asked_of_the_newest_adapter_with_its_own_seed(engine, server):
    engine.server._patience = 60.0
    first = engine.complete(PROMPTS, 0, 0)
    bodies = asked(server, "completions")
    assert len(first) == len({body["seed"] for body in bodies}) == 6
    by_prompt = sorted(
        (tuple(body["prompt"]), choose(server.adapters[body["model"]], body)) for body in bodies
    )
    found = [(tuple(p), (a.token_ids, a.logps)) for p, a in zip(PROMPTS, first, strict=True)]
    assert sorted(found) == by_prompt
    assert all(answer.is_done == (answer.token_ids[-1] == END) for answer in first)
    settings = {"temperature": 0.7, "max_tokens": LONGEST, "top_p": 1.0, "top_k": -1}
    settings |= {"stop_token_ids": [END]}
    assert all(body.items() >= settings.items() for body in bodies)
    assert engine.complete(PROMPTS, 1, 1) != first
    engine.complete(PROMPTS, 2, 2)
    names = [body["lora_name"] for body in asked(server, "load_lora_adapter")]
    assert [name.rpartition("-")[0] for name in names] == ["run-v0", "run-v1", "run-v2"]
    assert len({*names}) == 3
    assert [body["lora_name"] for body in asked(server, "unload_lora_adapter")] == names[:2]
    kept = sorted(path.name for path in engine.prefix.parent.iterdir())
    assert kept == ["run-v1", "run-v2"]  # what it may still read


ABORTED = {"model": "x", "choices": [{"finish_reason": "abort"}]}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (once("models", 0, None), "Waiting for the server"),
        (once("completions", 0, None), "Waiting for the server"),
        (once("completions", 200, ABORTED), "ended with 'abort'"),
        (says_once("completions", 503, "busy"), "HTTP 503: busy"),
        (says_once("load_lora_adapter", 404, "no such folder"), "no such folder"),
        (None, "it had lost the adapter"),  # as when it starts again
    ],
)
def test_transient_server_errors_are_retried_without_other_completions(
    engine, server, lines, fault, said
):
    loses = once("completions", 0, None)

    def forget(path: str, body: dict[str, Any]) -> None:
        if loses(path, body):
            server.adapters.clear()

    server.faults.append(fault or forget)
    engine.server._patience = 60.0
    found = engine.complete(PROMPTS, 0, 0)
    bodies = asked(server, "completions")
    wanted = {json_key(body): choose(f"{engine.prefix}-v0", body)[0] for body in bodies}
    assert sorted(answer.token_ids for answer in found) == sorted(wanted.values())
    assert any(said in line for line in lines) and any("answers again" in line for line in lines)


def json_key(body: dict[str, Any]) -> tuple[int, ...]:
    return (*body["prompt"], body["seed"])


def answer_of(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    logps = {"token_logprobs": [-1.0] * len(changes.get("token_ids") or [1] * LONGEST)}
    choice = {"token_ids": [1] * LONGEST, "finish_reason": "length", "logprobs": logps, **changes}
    return {"model": changes.get("model", body["model"]), "choices": [choice]}


def answer(**changes: Any) -> Any:
    """A fault: each answer differs in this from a right one."""
    return lambda path, body: (200, answer_of(body, **changes)) if "prompt" in body else None


def of_logps(logps: Any) -> Any:
    """A fault: each answer has these log-probabilities."""
    return answer(logprobs={"token_logprobs": logps})


def says(content: Any, status: int = 200, to: str = "prompt") -> Any:
    """A fault: each answer to requests with this key is this, or what this makes."""
    made = content if callable(content) else lambda: content
    return lambda path, body: (status, made()) if to in body else None


def always(content: Any, status: int = 200) -> Any:
    """A fault: each answer is this."""
    return lambda path, body: (status, content)


def knows(*models: dict[str, Any]) -> Any:
    """A fault: the server has these models."""
    return always({"data": [*models]})


BEHIND_VOCABULARY = "returns the token 10, and the model's vocabulary has 10"
UNWEIGHED = "no log-probability of each token, by which tokens are weighed, but none. It must"
OK = b"HTTP/1.1 200 OK\r\n\r\n"


def slowly(first: bytes, then: bytes) -> Any:
    """An answer without an end, whose pieces come one after the other."""

    def pieces() -> Iterator[bytes]:
        yield first
        while True:
            time.sleep(0.02)
            yield then

    return says(pieces)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answer(model="run-v7"), "answers as run-v7 instead of run-v0-"),
        (answer(token_ids=None), "text alone"),
        (answer(token_ids=[1, 2, 3, 10]), BEHIND_VOCABULARY),
        (answer(token_ids=[1, 2, True, 3]), "returns the token True"),
        (answer(token_ids=[1] * 5), "returns 5 tokens, cut, instead of 4"),
        (answer(token_ids=[1] * 3000, finish_reason="stop"), "returns 3,000 tokens"),
        (answer(token_ids=[1]), "returns 1 tokens, cut, instead of 4"),
        (answer(token_ids=[1, END, 1, 1]), "goes on behind the token that ends an answer"),
        (of_logps([-(10**400)] * LONGEST), "no log-probability"),
        (says(b"[" * 200_000), "answers /v1/completions with no JSON"),
        (says(b"<html><body>Not here</body></html>"), "no JSON, but with '<html><body>Not here"),
        (says(b""), "no JSON, but with ''"),
        (says([]), "answers /v1/completions without choices"),
        (says({"model": "x", "choices": []}), "answers /v1/completions without choices[0]"),
        (answer(finish_reason=None), "with null as choices[0].finish_reason, which is a text"),
        (answer(model=7), "with 7 as model, which is a text"),
        (says(b" " * 2**22), "answers /v1/completions with more than"),
        (says({"error": {"message": "x\ud800" * 10**4}}, 400), r"HTTP 400: x\ud800x"),
        (says("http://localhost:1/", 302), "HTTP 302: http://localhost:1/"),
        (slowly(OK, b" "), "did not answer within 0.3 s: timed out"),
        (slowly(b"HTTP/1.1 200 OK\r\nX: ", b"a"), "did not answer within 0.3 s: timed out"),
        (slowly(OK, b" " * 2**20), "answers /v1/completions with more than"),
        (answer(finish_reason="stop"), "leaves out the token that ends an answer"),
        (of_logps([None] * LONGEST), "no log-probability"),
        (of_logps([-math.inf] * LONGEST), "no log-probability"),
        (of_logps([-1.0] * 3), "no log-probability of each token"),
        (of_logps([-1.0, -1.0, 0.5, -1.0]), "but 0.5 for one"),
        (of_logps([-1.0, -1.0, math.nan, -1.0]), "but nan for one"),
        (of_logps([-1.0, -1.0, False, -1.0]), "but false for one"),
        (of_logps("none"), "logprobs: 0"),
        (answer(logprobs={}), "vllm serve MODEL --enable-lora"),
        (answer(logprobs=None), UNWEIGHED),
        (says({"error": {"message": "too long"}}, 400), "HTTP 400: too long"),
        (knows({"id": "other"}), "--served-model-name /models/base"),
        (says({}, 500, to="lora_path"), "does not load the adapter"),
        (says(None, 0), "did not answer within 0.3 s"),
    ],
)
def test_unusable_rollout_server_ends_the_run_in_one_sentence(engine, server, fault, said):
    server.faults.append(fault)
    with pytest.raises(RolloutError) as caught:
        engine.complete(PROMPTS, 0, 0)
    message = str(caught.value)
    assert said in message and server.url in message and len(message) < 1000
    assert not re.search(r"\wError\(|NoneType|subscript", message)


_WORDS = b'null true -1 1e999 {} "\\ud800" \xff \0 NaN'
_PARTS = (b"", *_WORDS.split(), b"9" * 400, b"[" * 10**5)


def damaged(content: bytes, seed: int) -> bytes:
    """The content after some of the things that can happen to it."""
    choose = random.Random(seed)
    for _ in range(choose.randint(1, 3)):
        start = choose.randrange(len(content))
        end = choose.randint(start, min(len(content), start + choose.choice((1, 8, 80))))
        part = choose.choice((*_PARTS, b"a" * 2**21, content[start:end] * 3))
        content = content[:start] + part + content[end:]
    return content


def damaging(seed: int, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
    return (200, damaged(json.dumps(answer_of(body)).encode(), seed)) if "prompt" in body else None


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)], ids=["20", "180"]
)
def test_damaged_answers_end_in_a_sentence_and_take_little_memory(engine, server, seeds, tmp_path):
    this = psutil.Process()
    ends = Counter[str]()
    before = this.memory_info().rss
    processes = set(this.children(recursive=True))
    for seed in seeds:
        server.faults[:] = [partial(damaging, seed)]
        engine.prefix = tmp_path / str(seed) / "run"
        try:
            ends[f"{len(engine.complete(PROMPTS[:2], 0, 0))} answers"] += 1
        except RolloutError as error:
            assert len(str(error)) < 1000
            ends["refused"] += 1
        engine.server.is_closed = False
    assert ends.total() == len(seeds) and ends["refused"] > len(seeds) / 2, ends
    assert this.memory_info().rss - before < 2**30
    assert set(this.children(recursive=True)) <= processes


@pytest.mark.quick
def test_run_waiting_for_a_server_can_be_stopped(engine, server):
    def stop(path: str, body: dict[str, Any]) -> None:
        if "prompt" in body:
            engine.control.signals.requested = 4
            time.sleep(0.2)

    server.faults.append(stop)
    before = engine.control.heartbeat.at
    with pytest.raises(RunStopped, match=r"step 8 waited for answers \(SIGTERM\)"):
        engine.complete(PROMPTS, 7, 7)
    assert engine.control.heartbeat.at > before and engine.control.heartbeat.step == 7


@pytest.mark.quick
def test_no_thread_asks_the_server_after_a_run_has_stopped(engine, server):
    def away(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        engine.control.signals.requested = 4 if "prompt" in body else 0
        return (0, None) if "prompt" in body else None

    server.faults.append(away)
    engine.server._patience = 1e6
    others = {*threading.enumerate()}
    with pytest.raises(RunStopped):
        engine.complete(PROMPTS, 0, 0)

    def calls() -> list[str]:
        return [each.name for each in {*threading.enumerate()} - others]

    wait_for(lambda: "begun-call" not in calls(), 20)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, ""),
        (once("load_lora_adapter", 404, {"detail": "Not Found"}), "RUNTIME_LORA"),
        (knows({"id": "other"}), "has the model other, and the run trains hub/base"),
        (always([]), "answers /v1/models without data"),
        (knows({"id": None}), "with null as data[0].id, which is a text"),
        (knows({"id": "a", "parent": "b"}), "answers /v1/models without a base model"),
        (always(b"<html>"), "answers /v1/models with no JSON"),
        (always(None, 0), "did not answer within"),
    ],
)
def test_the_server_is_asked_before_the_run_begins(server, fault, said):
    if fault is None:
        check_server(server.url, ["hub/base"])
        return
    server.faults.append(fault)
    with pytest.raises(RankError) as caught:
        check_server(server.url, ["hub/base"], start_seconds=0.1)
    assert "--rollout_url" in str(caught.value) and said in str(caught.value)


# --- whole runs ---


@pytest.fixture(scope="module")
def whole(
    lora_server: ServerProcess,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, object], Path]:
    """Options of a run, and its folder: nothing has disturbed it."""
    folder = tmp_path_factory.mktemp("whole")
    options = options_of(lora_server, models(), folder, "out")
    output = finish(options, folder / "logs").output()
    assert "Waiting for the server" not in output.partition("Proof:")[2]
    assert output.count("The server uses the adapter: ") == 1
    return options, folder / "out"


def farthest(records: list[dict[str, Any]]) -> float:
    """The largest difference between a log-probability of the server and that of the trainer at
    that version.
    """
    pairs = [zip(record["sampled_logps"], record["old_logps"], strict=True) for record in records]
    return max(abs(a - b) for each in pairs for a, b in each)


@pytest.mark.slow
def test_a_killed_server_is_waited_for_and_changes_no_byte(lora_server, whole, tmp_path):
    records = rollouts_of(whole[1])
    assert [record["version"] for record in records[::8]] == [*range(8)]
    assert farthest(records) < 1e-4
    of_one_row = [record for record in records if record["row"] == records[0]["row"]]
    assert len({record["sampled_logps"][0] for record in of_one_row}) > 4
    with ended(Job(whole[0] | {"output_dir": tmp_path / "out"}, tmp_path / "logs")) as job:
        wait_for(lambda: "step 2/8" in job.output())
        lora_server.kill()
        wait_for(lambda: job.output().partition("step 2/8")[2].count("Waiting for the server"))
        lora_server.start()
        assert job.wait() == [0, 0], job.output()
    assert "answers again after" in job.output()
    assert adapter(tmp_path / "out") == adapter(whole[1])
    assert rollouts_of(tmp_path / "out") == records


class Base(Sampler):
    """Loads adapters, and changes nothing."""

    def __call__(self, adapter: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        return self.sample(request)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_a_server_that_ignores_adapters_ends_the_run(ahead, models, tmp_path):
    sampler = Base(str(models()))
    with LoraServer("tiny", sampler, sampler.end) as server:
        options = options_of(server, models(), tmp_path, "out", precision="bf16")
        options["rollout_ahead"] = ahead
        output = finish(options, tmp_path / "logs", [1, 1]).output()
    assert "[rank 1] error: The server ignores the adapter" in output
    assert "uses the adapter:" not in output
    [(to_base, to_model), *_] = re.findall(r"are (\S+) from the base's and (\S+) from", output)
    assert float(to_base) < 0.01 < 0.02 < float(to_model)
    assert 1 <= steps_done(tmp_path / "out") < 8 and [*(tmp_path / "out" / "checkpoints").iterdir()]


@pytest.mark.nightly
def test_a_killed_and_a_stopped_run_resume_with_a_server_that_was_away(
    lora_server, whole, tmp_path
):
    options = whole[0] | {"output_dir": tmp_path / "out"}
    with ended(Job(options, tmp_path / "logs_killed")) as job:
        wait_for(lambda: "step 4/8" in job.output())
        for rank in (0, 1):
            job.kill(rank)
        job.wait()
    lora_server.kill()
    with ended(Job(options, tmp_path / "logs_stopped")) as job:  # from step 3
        wait_for(lambda: "Waiting for the server" in job.output())
        lora_server.start()
        wait_for(lambda: "step 5/8" in job.output())
        lora_server.kill()
        wait_for(lambda: job.output().count("Waiting for the server") > 1)
        job.kill(1, signal.SIGTERM)
        assert job.wait() == [75, 75], job.output()
    lora_server.start()
    finish(options, tmp_path / "logs_resumed")
    assert adapter(tmp_path / "out") == adapter(whole[1])
    assert len(list((tmp_path / "out" / "rollout_adapters").iterdir())) == 2


@pytest.mark.nightly
def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint(lora_server, whole, tmp_path):
    options = whole[0] | {"output_dir": tmp_path / "out", "save_every": "none", "hang_minutes": 0.1}
    with ended(Job(options, tmp_path / "logs")) as job:
        wait_for(lambda: steps_done(tmp_path / "out") >= 1)
        lora_server.kill()
        assert job.wait() == [1, 1], job.output()
    lora_server.start()
    options |= {"base_name": "hub/other", "output_dir": tmp_path / "other"}
    refused = finish(options, tmp_path / "logs_other", [2, 2]).output()
    assert "--served-model-name" in refused and "Tokenizing" not in refused
    assert "[rank 1] error: The server" in job.output()
    assert "did not answer within 6 s" in job.output()
    saved = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()]
    assert saved == [f"step_{steps_done(tmp_path / 'out'):06}"]


@pytest.mark.nightly
@pytest.mark.skipif(
    "FSDP_QLORA_VLLM" not in os.environ, reason="names no Python that has vLLM: docs/grpo.md"
)
def test_vllm_answers_with_the_newest_adapter(models, tmp_path):
    model = models(head_dim=32, max_position_embeddings=512)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny"
    words += " --enable-lora --dtype float32 --enforce-eager --port {port}"
    command = [os.environ["FSDP_QLORA_VLLM"], *words.split()]
    server = ServerProcess(*command, log=tmp_path / "vllm.log", **environment)
    try:
        wait_for(server.answers)
        finish(options_of(server, model, tmp_path, "out"), tmp_path / "logs")
    finally:
        server.kill()
    records = rollouts_of(tmp_path / "out")
    assert [record["version"] for record in records[::8]] == [*range(8)]
    assert farthest(records) < 1e-3
