"""Samples of the real client: their log-probabilities, ends, seeds and weights."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.service.harness import KEY, Plain, Service, assert_equal, datums, on_two_ranks

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 33, 120, 7]
STEP = types.AdamParams(learning_rate=1e-2, eps=1e-8)


def sample(
    sampler: tinker.SamplingClient, count: int = 1, **params: Any
) -> list[types.SampledSequence]:
    options = types.SamplingParams(**{"max_tokens": 12, **params})
    return [*sampler.sample(types.ModelInput.from_ints(PROMPT), count, options).result().sequences]


@pytest.fixture(scope="module")
def trained(service: Service) -> tuple[tinker.TrainingClient, tinker.SamplingClient, Plain]:
    """An adapter after three steps, its sampler, and the same in PEFT."""
    client = service.trainer(seed=4)
    for step in range(3):
        client.forward_backward(datums(4, step), "cross_entropy")
        client.optim_step(STEP).result()
    path = client.save_weights_for_sampler("sampled").result().path
    sampler = service.client().create_sampling_client(model_path=path).result()
    return client, sampler, Plain(service.model, service.saved(path))


Trained = tuple[tinker.TrainingClient, tinker.SamplingClient, Plain]


def test_logprobs_of_samples_equal_those_computed_for_them(trained):
    _, sampler, plain = trained
    for params in (
        {"seed": 3},
        {"seed": 4, "temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 5},
    ):
        [answer] = sample(sampler, **params)
        tokens = PROMPT + answer.tokens
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert scored[0] is None and len(scored) == len(tokens)
        with torch.no_grad():
            every = plain.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert_equal([torch.tensor(scored[1:])], [expected])
        assert_equal([torch.tensor(answer.logprobs)], [expected[len(PROMPT) - 1 :]])


def test_greedy_answers_equal_those_of_peft(trained):
    _, sampler, plain = trained
    tokens = [*PROMPT]
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(plain.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    [answer] = sample(sampler, temperature=0.0, stop=[])
    assert answer.tokens == tokens[len(PROMPT) :] and answer.stop_reason == "length"
    assert [each.tokens for each in sample(sampler, 2, top_k=1, stop=[])] == [answer.tokens] * 2
    assert sample(sampler, top_p=1e-6, stop=[])[0].tokens == answer.tokens


@on_two_ranks
def test_seeds_repeat_answers_and_samples_differ(trained):
    _, sampler, _ = trained
    first, again, other = (
        [each.tokens for each in sample(sampler, 4, seed=seed, temperature=2.0)]
        for seed in (1, 1, 2)
    )
    assert first == again != other and len({tuple(each) for each in first}) == 4
    unseeded = [sample(sampler, temperature=2.0)[0].tokens for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@on_two_ranks
def test_answers_end_with_what_stops_them(service, trained):
    _, sampler, _ = trained
    [whole] = sample(sampler, temperature=0.0, stop=[])
    place = next(
        i for i, token in enumerate(whole.tokens) if i > 1 and token not in whole.tokens[:i]
    )
    [stopped] = sample(sampler, temperature=0.0, stop=[whole.tokens[place]])
    assert stopped.tokens == whole.tokens[: place + 1] and stopped.stop_reason == "stop"
    tokenizer = AutoTokenizer.from_pretrained(service.model)
    until = tokenizer.decode(whole.tokens[: place + 1])[-2:]
    [stopped] = sample(sampler, temperature=0.0, stop=[until])
    assert stopped.stop_reason == "stop" and until in tokenizer.decode(stopped.tokens)
    assert until not in tokenizer.decode(stopped.tokens[:-1])


@on_two_ranks
def test_prompts_get_their_likeliest_tokens(trained):
    _, sampler, plain = trained
    prompt = types.ModelInput.from_ints(PROMPT)
    options = types.SamplingParams(max_tokens=1)
    answer = sampler.sample(
        prompt, 1, options, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    found = answer.topk_prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(PROMPT)
    with torch.no_grad():
        top = plain.model(torch.tensor([PROMPT])).logits[0].log_softmax(-1).topk(3)
    assert [[token for token, _ in each] for each in found[1:]] == top.indices[:-1].tolist()  # type: ignore[union-attr]
    values = torch.tensor([[logprob for _, logprob in each] for each in found[1:]])  # type: ignore[union-attr]
    assert_equal([values], [top.values[:-1]])


@on_two_ranks
def test_samplers_keep_their_weights_while_training_goes_on(service, trained):
    client, sampler, _ = trained
    base = service.client().create_sampling_client(base_model=service.model).result()
    unnamed = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    before = [each.compute_logprobs(prompt).result()[1:] for each in (sampler, base, unnamed)]
    client.forward_backward(datums(4, 9), "cross_entropy")
    client.optim_step(STEP).result()
    later = (
        client.save_weights_and_get_sampling_client().result().compute_logprobs(prompt).result()[1:]
    )
    after = [each.compute_logprobs(prompt).result()[1:] for each in (sampler, base, unnamed)]
    assert before == after
    assert before[0] == before[2] and not np.allclose(later, before[2], atol=1e-3)
    assert not np.allclose(before[0], before[1], atol=1e-3)


@on_two_ranks
def test_a_larger_teacher_is_sampled_from_and_asked(service, trained):
    teacher = service.client().create_sampling_client(base_model=service.teacher).result()
    plain = AutoModelForCausalLM.from_pretrained(service.teacher)
    [answer] = sample(trained[1], seed=3)
    for tokens in (PROMPT + answer.tokens, PROMPT + sample(teacher, seed=3)[0].tokens):
        with torch.no_grad():
            every = plain(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = every[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        scored = teacher.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert_equal([torch.tensor(scored[1:])], [expected])
    [best] = sample(teacher, temperature=0.0, stop=[], max_tokens=1)
    with torch.no_grad():
        assert best.tokens == [int(plain(torch.tensor([PROMPT])).logits[0, -1].argmax())]
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    served = rest.get_server_capabilities().result().supported_models
    assert [each.model_name for each in served] == [service.model, service.teacher]
    with pytest.raises(tinker.RequestFailedError, match="is not trained here"):
        service.client().create_lora_training_client(service.teacher, rank=4).result()
