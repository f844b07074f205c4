"""Samples that a server draws for a service (--rollout_url), asked for by the real client."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from tests.chaos.harness import wait_for
from tests.helpers.models import Models
from tests.helpers.run import ROOT, flags
from tests.rollouts.lora_server import LoraServer, Sampler
from tests.rollouts.test_server import ServerProcess
from tests.service.harness import Plain, Service, assert_equal, datums

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 33, 120, 7]
STEP = types.AdamParams(learning_rate=1e-2, eps=1e-8)


class ServerModel(Sampler):
    """Draws from the logits at a temperature; log-probabilities are the model's own.

    may_answer: answers wait for it. ignores: the adapters.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.ignores = False

    def __call__(self, adapter: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        assert self.may_answer.wait(60)
        return super().__call__("" if self.ignores else adapter, request)

    def sample(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        source = torch.Generator().manual_seed(request["seed"])
        tokens: list[int] = []
        logps: list[float] = []
        while len(tokens) < request["max_tokens"]:
            ids = torch.tensor([request["prompt"] + tokens])
            with torch.no_grad():
                logits = self.model(input_ids=ids).logits[0, -1].float()
            likely = logits if request["top_k"] < 0 else logits.topk(request["top_k"]).values
            logits_left = logits.masked_fill(logits < likely.min(), -torch.inf)
            drawn = (logits_left / max(request["temperature"], 1e-6)).softmax(dim=-1)
            tokens.append(int(torch.multinomial(drawn, 1, generator=source)))
            logps.append(float(logits.log_softmax(dim=-1)[tokens[-1]]))
            if tokens[-1] in request["stop_token_ids"]:
                break
        return tokens, logps


class SampleServer(LoraServer):
    """vLLM's routes around a model, whose answers end with what a request says."""

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        status, content = super().completions(body)
        if status == 200:
            [choice] = content["choices"]
            is_done = choice["token_ids"][-1] in body["stop_token_ids"]
            choice["finish_reason"] = "stop" if is_done else "length"
        return status, content

    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, body in self.asked if path == "/v1/completions"]


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[SampleServer]:
    folder = models()
    with SampleServer(folder.name, ServerModel(str(folder)), -1) as running:
        yield running


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def service(
    request: pytest.FixtureRequest,
    server: SampleServer,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("served") / "folder"
    running = Service(models(), folder, request.param, rollout_url=server.url, hang_minutes=0.5)
    yield running
    running.end()


@pytest.fixture(autouse=True)
def _as_before(server: SampleServer) -> Iterator[None]:
    yield
    server.faults.clear()
    server.choose.ignores = False  # type: ignore[attr-defined]
    server.choose.may_answer.set()  # type: ignore[attr-defined]


def sample(sampler: tinker.SamplingClient, count: int = 1, **params: Any) -> Any:
    """A future of samples."""
    options = types.SamplingParams(**{"max_tokens": 12, "seed": 1, **params})
    return sampler.sample(types.ModelInput.from_ints(PROMPT), count, options)


def tokens_of(answer: Any) -> list[list[int]]:
    return [each.tokens for each in answer.result().sequences]


def trained(service: Service, seed: int, name: str = "sampled") -> tuple[Any, Any, Plain]:
    """An adapter after three steps, its sampler, and the same in PEFT."""
    client = service.trainer(seed=seed)
    for step in range(3):
        client.forward_backward(datums(4, step + seed), "cross_entropy")
        client.optim_step(STEP).result()
    path = client.save_weights_for_sampler(name).result().path
    sampler = service.client().create_sampling_client(model_path=path).result()
    return client, sampler, Plain(service.model, service.saved(path))


def logprobs(plain: Plain, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of an answer to the prompt."""
    ids = torch.tensor([PROMPT + tokens])
    with torch.no_grad():
        every = plain.model(ids).logits[0].log_softmax(-1)
    return every[:-1].gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0]


def test_samples_are_drawn_from_the_saved_weights_as_asked(service, server):
    _, sampler, plain = trained(service, seed=4)
    server.asked.clear()
    asked = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "stop": [3, 4], "seed": 5}
    answer = sample(sampler, 8, **asked).result()
    for each in answer.sequences:
        assert_equal([torch.tensor(each.logprobs)], [logprobs(plain, each.tokens)])
        ends = each.tokens[-1] in server.bodies()[0]["stop_token_ids"]
        assert each.stop_reason == ("stop" if ends else "length")
    bodies = server.bodies()
    assert len({body["seed"] for body in bodies}) == len({body["model"] for body in bodies[:1]}) * 8
    wanted = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "max_tokens": 12, "ignore_eos": False}
    assert all(body.items() >= wanted.items() for body in bodies)
    assert all({3, 4} < {*body["stop_token_ids"]} for body in bodies)
    again = tokens_of(sample(sampler, 8, **asked))
    assert again == [each.tokens for each in answer.sequences]
    assert tokens_of(sample(sampler, 8, **{**asked, "seed": 6})) != again
    assert tokens_of(sample(sampler, stop=[], top_k=1)) == tokens_of(
        sample(sampler, stop=[], temperature=0.0, seed=9)
    )
    texts = sample(sampler, stop=["no such text"]).result()
    assert texts.sequences and server.bodies()[-1]["stop"] == ["no such text"]


def test_a_server_is_once_found_to_use_the_adapter_of_a_model(service, server):
    client, sampler, _ = trained(service, seed=5)
    before = service.log.read_text().count("The server uses the adapter")
    for seed in range(3):
        sample(sampler, 8, seed=seed).result()
    client.save_weights_and_get_sampling_client().result()
    assert service.log.read_text().count("The server uses the adapter") == before + 1


def test_short_answers_by_two_weights_in_turn_show_that_a_server_uses_them(service, server):
    client, sampler, _ = trained(service, seed=19)
    samplers = [sampler, client.save_weights_and_get_sampling_client().result()]
    before = service.log.read_text().count("The server uses the adapter")
    for seed in range(9):
        for each in samplers:
            sample(each, max_tokens=8, stop=[], seed=seed).result()
    assert service.log.read_text().count("The server uses the adapter") == before + 1


def test_prompts_are_scored_by_the_service_itself(service, server):
    _, sampler, plain = trained(service, seed=6)
    [answer] = sample(sampler).result().sequences
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT + answer.tokens)).result()
    assert scored[0] is None
    own = torch.tensor(scored[len(PROMPT) :])
    assert_equal([own], [logprobs(plain, answer.tokens)])


def test_the_base_is_sampled_from_without_an_adapter(service, server):
    base = service.client().create_sampling_client(base_model=service.model).result()
    _, adapted, _ = trained(service, seed=7)
    server.asked.clear()
    assert tokens_of(sample(base)) != tokens_of(sample(adapted))
    assert server.bodies()[0]["model"] == server.base != server.bodies()[1]["model"]


def test_training_goes_on_while_a_server_draws_samples(service, server):
    client, sampler, _ = trained(service, seed=8)
    sample(sampler, 8).result()
    server.choose.may_answer.clear()
    waiting = [sample(sampler, 16, seed=seed) for seed in range(20)]
    client.forward_backward(datums(4, 1), "cross_entropy").result(timeout=60)
    other = service.trainer(seed=9)
    other.forward_backward(datums(4, 1), "cross_entropy").result(timeout=60)
    assert not any(each.future().done() for each in waiting)
    server.choose.may_answer.set()
    assert all(len(each.result().sequences) == 16 for each in waiting)


def test_sessions_with_different_adapters_sample_at_the_same_time(service, server):
    made = [trained(service, seed=seed) for seed in (10, 11, 12)]
    answers = [sample(sampler, 4, seed=seed) for seed in range(4) for _, sampler, _ in made]
    for number, answer in enumerate(answers):
        for each in answer.result().sequences:
            expected = logprobs(made[number % 3][2], each.tokens)
            assert_equal([torch.tensor(each.logprobs)], [expected])


def test_unused_adapters_leave_the_server_and_the_folder(service, server):
    client, _, _ = trained(service, seed=13)
    for number in range(10):
        path = client.save_weights_for_sampler(f"of_{number}").result().path
        sample(service.client().create_sampling_client(model_path=path).result()).result()
    copies = {path.name for path in (service.folder / "rollout_adapters").iterdir()}
    assert len(copies) == 8 and copies <= server.adapters.keys()
    own = next(iter(copies)).rpartition("-")[0]
    assert sum(name.startswith(own) for name in server.adapters) <= 9


def test_a_restarted_server_draws_the_same_samples(service, server):
    _, sampler, _ = trained(service, seed=14)
    before = tokens_of(sample(sampler, 8))
    away = threading.Event()

    def restart(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        server.adapters.clear()
        return None if away.is_set() else (0, None)

    server.faults.append(restart)
    asked = sample(sampler, 8)
    with pytest.raises(TimeoutError):
        asked.result(timeout=2)
    away.set()
    server.faults.clear()
    assert tokens_of(asked) == before
    assert "answers again after" in service.log.read_text()


def test_a_killed_service_asks_the_server_again(service, server):
    _, sampler, _ = trained(service, seed=15)
    before = tokens_of(sample(sampler, 4))
    server.choose.may_answer.clear()
    asked = sample(sampler, 4)
    with pytest.raises(TimeoutError):
        asked.result(timeout=1)
    service.kill()
    server.choose.may_answer.set()
    service.start()
    assert tokens_of(asked) == before


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, {"error": {"message": "it is too long"}}), "refuses a request: HTTP 400: it is too"),
        ((200, {"model": "x", "choices": [{"finish_reason": "stop"}]}), "answers as x instead of"),
    ],
)
def test_a_refused_sample_fails_alone_with_the_reason(service, server, answer, said):
    _, sampler, _ = trained(service, seed=16)
    server.faults.append(lambda path, body: answer if "prompt" in body else None)
    with pytest.raises(tinker.RequestFailedError, match=said):
        sample(sampler, 4).result()
    server.faults.clear()
    assert len(tokens_of(sample(sampler, 4))) == 4


def test_a_server_that_stays_away_fails_the_samples_alone(service, server):
    client, sampler, _ = trained(service, seed=17)
    server.faults.append(lambda path, body: (503, {"error": {"message": "busy"}}))
    asked = sample(sampler)
    client.forward_backward(datums(2, 1), "cross_entropy").result(timeout=30)
    with pytest.raises(tinker.RequestFailedError, match="did not answer within 30 s"):
        asked.result(timeout=90)


def test_a_server_that_ignores_an_adapter_is_found_out(service, server):
    server.choose.ignores = True
    _, sampler, _ = trained(service, seed=18)
    with pytest.raises(tinker.RequestFailedError, match="The server ignores the adapter"):
        sample(sampler, 8).result()
    with pytest.raises(tinker.RequestFailedError, match="The server ignores the adapter"):
        sample(sampler).result()
    base = service.client().create_sampling_client(base_model=service.model).result()
    assert tokens_of(sample(base))


def test_requests_at_once_are_all_refused_if_an_adapter_is_ignored(service, server):
    server.choose.ignores = True
    _, sampler, _ = trained(service, seed=20)
    # Some wait for the ranks and others are at the server when it is found.
    asked = [sample(sampler, 8, stop=[], seed=seed) for seed in range(24)]
    for each in asked:
        with pytest.raises(tinker.RequestFailedError, match="The server ignores the adapter"):
            each.result()


@pytest.mark.parametrize("url", ["localhost:8000", "http://user:password@localhost:8000"])
def test_an_address_that_cannot_be_used_is_refused_at_once(tmp_path, url):
    words = flags(model_name="none", folder=tmp_path / "folder", rollout_url=url)
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_qlora", "serve", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Give a URL such as http://localhost:8000" in done.stderr
    assert "password@" not in done.stdout + done.stderr and not (tmp_path / "folder").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_server_of_another_model_is_refused_at_the_start(server, models, tmp_path, world_size):
    given = {
        "model_name": models(),
        "folder": tmp_path / "folder",
        "nproc_per_node": world_size,
        "train_type": "lora",
        "port": 0,
    }
    with LoraServer("other", ServerModel(str(models())), -1) as other:
        words = flags(**given, rollout_url=other.url)
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_qlora", "serve", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2 and "--served-model-name" in done.stdout + done.stderr
    assert not [*Path(tmp_path / "folder").glob("rollout_adapters/*")]


@pytest.mark.nightly
@pytest.mark.skipif(
    "FSDP_QLORA_VLLM" not in os.environ, reason="names no Python that has vLLM: docs/grpo.md"
)
def test_vllm_draws_the_samples_of_several_saved_weights(models, tmp_path):
    model = models(head_dim=32, max_position_embeddings=512)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name"
    words += f" {model.name} --enable-lora --max-loras 2 --dtype float32 --enforce-eager"
    command = [os.environ["FSDP_QLORA_VLLM"], *words.split(), "--port", "{port}"]
    vllm = ServerProcess(*command, log=tmp_path / "vllm.log", **environment)
    try:
        wait_for(vllm.answers)
        served = Service(model, tmp_path / "folder", 1, rollout_url=vllm.url)
        try:
            made = [trained(served, seed=seed) for seed in (1, 2, 3)]
            params = [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"stop": []}]
            for options in params:
                answers = [sample(sampler, 8, **options) for _, sampler, _ in made]
                for answer, (_, _, plain) in zip(answers, made, strict=True):
                    for each in answer.result().sequences:
                        expected = logprobs(plain, each.tokens)
                        assert_equal([torch.tensor(each.logprobs)], [expected], 1e-4)
            assert all(len(tokens) == 12 for tokens in tokens_of(sample(made[0][1], 4, stop=[])))
            again = [tokens_of(sample(made[0][1], 4)) for _ in range(2)]
            assert again[0] == again[1]
            base = served.client().create_sampling_client(base_model=served.model).result()
            assert tokens_of(sample(base))
            assert served.log.read_text().count("The server uses the adapter") == 3
        finally:
            served.end()
    finally:
        vllm.kill()
