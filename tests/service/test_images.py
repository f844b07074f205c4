"""Images that the real client sends: training equals PEFT's, and what is wrong fails alone."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import RequestFailedError, types

from fsdp_qlora.data.text.image_processor import ImageProcessor
from tests.parity.test_image_rows import FAMILIES, make_family
from tests.parity.test_images import Image  # which skips these, too, where images cannot be read
from tests.rollouts.lora_server import LoraServer
from tests.service.harness import Service, assert_equal, logprobs_of, on_two_ranks
from tests.service.image_data import Alone, Pictures, PlainWithImages, make_image_model

pytestmark = pytest.mark.slow
PARAMS = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("images")
    model = make_image_model(folder / "model")
    teacher = {"teacher": make_image_model(folder / "teacher")} if request.param == 2 else {}
    running = Service(model, folder / "folder", request.param, **teacher)
    yield running
    running.end()


def test_data_with_images_train_as_in_plain_peft(service):
    pictures = Pictures(Path(service.model))
    client = service.trainer(rank=4, seed=7)
    start = client.save_weights_for_sampler("start").result().path
    plain = PlainWithImages(service.model, service.saved(start))
    for step in range(3):
        first = pictures.data(5, step)
        second = pictures.data(1, 10 + step)
        futures = [client.forward_backward(part, "cross_entropy") for part in (first, second)]
        client.optim_step(PARAMS).result()
        for future, part in zip(futures, (first, second), strict=True):
            loss, logprobs = plain.forward_backward(part, "cross_entropy")
            assert future.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
            assert_equal(logprobs_of(future.result()), logprobs)
        plain.optim_step(PARAMS)
        if step == 0:
            service.kill()
            service.start()
    found = service.adapter(client, "end")
    expected = plain.adapter()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() < 2e-4 * expected[name].norm()


@pytest.fixture(scope="module")
def trained(service: Service) -> tuple[tinker.SamplingClient, PlainWithImages]:
    """A sampler of an adapter after three steps, and the same in PEFT."""
    pictures = Pictures(Path(service.model))
    client = service.trainer(seed=4)
    for step in range(3):
        client.forward_backward(pictures.data(4, step), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_weights_for_sampler("sampled").result().path
    sampler = service.client().create_sampling_client(model_path=path).result()
    return sampler, PlainWithImages(service.model, service.saved(path))


def test_samples_of_prompts_with_images_have_the_logprobs_of_peft(service, trained):
    sampler, plain = trained
    pictures = plain.pictures
    prompts = [pictures.prompt(seed, num_images) for seed, num_images in ((1, 2), (2, 1), (3, 0))]
    options = types.SamplingParams(max_tokens=6, temperature=0.7, seed=3, stop=[])
    # At the same time, so that those with images are answered together.
    futures = [sampler.sample(prompt, 2, options) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        first, second = future.result().sequences
        assert first.tokens != second.tokens
        for answer in (first, second):
            whole = prompt.append(types.EncodedTextChunk(tokens=answer.tokens))
            expected, _ = plain.scores(whole)
            assert_equal([torch.tensor(answer.logprobs)], [expected[prompt.length - 1 :]])
            found = sampler.compute_logprobs(whole).result()
            assert found[0] is None
            assert_equal([torch.tensor(found[1:])], [expected])
    hot = types.SamplingParams(max_tokens=16, temperature=9.0, seed=3, stop=[])
    drawn = sampler.sample(prompts[0], 64, hot).result().sequences
    # Data with them would be refused.
    processor = ImageProcessor(Path(service.model), "model")
    image_ids = {*processor.image_ids}
    assert not image_ids & {token for each in drawn for token in each.tokens}


def test_greedy_answers_to_images_equal_those_of_peft(trained):
    sampler, plain = trained
    prompt = plain.pictures.prompt(5, 2)
    options = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    answer = sampler.sample(
        prompt, 1, options, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    expected, likely = plain.scores(prompt)
    assert_equal([torch.tensor(answer.prompt_logprobs[1:])], [expected])
    found = [[token for token, _ in each] for each in answer.topk_prompt_logprobs[1:]]
    assert found == likely[:-1].topk(2).indices.tolist()
    whole = prompt
    for token in answer.sequences[0].tokens:
        assert token == int(plain.scores(whole)[1][-1].argmax())
        whole = whole.append(types.EncodedTextChunk(tokens=[token]))


@on_two_ranks
def test_a_teacher_is_asked_with_images(service, trained):
    _, plain = trained
    teacher = service.client().create_sampling_client(base_model=service.teacher).result()
    prompt = plain.pictures.prompt(6, 2)
    found = teacher.compute_logprobs(prompt).result()
    # It has the weights of the base.
    with plain.model.disable_adapter():
        expected, _ = plain.scores(prompt)
    assert_equal([torch.tensor(found[1:])], [expected])


def file_of(width: int, height: int, kind: str) -> bytes:
    """An image of one colour, which is few bytes."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return file.getvalue()


@on_two_ranks
def test_images_that_cannot_be_used_fail_alone(service):
    pictures = Pictures(Path(service.model))
    whole = pictures.chunk(1)
    extra = types.EncodedTextChunk(tokens=[pictures.image_token])
    large = pictures.chunk(1, data=file_of(6_600, 6_600, "png"))
    wrong: list[tuple[list[Any], str]] = [
        ([pictures.chunk(1, data=b"no picture")], "is no image"),
        ([pictures.chunk(1, data=whole.data[:-200])], "cannot be read"),
        ([pictures.chunk(1, data=file_of(56, 56, "gif"))], "is no image"),
        ([pictures.chunk(1, data=file_of(12_000, 12_000, "png"))], "megapixels"),
        ([large] * 2, "the row has more than 44 megapixels"),
        ([pictures.chunk(1, data=file_of(4_000, 4, "png"))], "processor refuses"),
        ([pictures.chunk(1, expected_tokens=9)], "expected_tokens 9, and .* writes 4 tokens"),
        ([whole, extra], "stands for an image"),
        ([whole] * 40, "first 32 images have 128 tokens"),
        ([whole] * 1_025, "more than 1,024 images"),
    ]
    client, twin = (service.trainer(seed=3) for _ in range(2))
    data = pictures.data(3)
    for each in (client, twin):
        each.forward_backward(data, "cross_entropy").result()
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    options = types.SamplingParams(max_tokens=1)
    for chunks, reason in wrong:
        prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), *chunks])
        targets = [0] * prompt.length
        datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets})
        with pytest.raises(RequestFailedError, match=reason):
            client.forward_backward([*data, datum], "cross_entropy").result()
        with pytest.raises(RequestFailedError, match=reason):
            sampler.sample(prompt, 1, options).result()
    spread = types.Datum(
        model_input=types.ModelInput(chunks=[large]), loss_fn_inputs={"target_tokens": [0] * 4}
    )
    with pytest.raises(RequestFailedError, match="more than 134 megapixels"):
        client.forward_backward([spread] * 4, "cross_entropy").result()
    pointer = types.ImageAssetPointerChunk(format="png", location="/etc/passwd", expected_tokens=4)
    with pytest.raises(RequestFailedError, match="image_asset_pointer"):
        sampler.sample(types.ModelInput(chunks=[pointer]), 1, options).result()
    for each in (client, twin):
        each.optim_step(PARAMS).result()
    assert_equal(service.adapter(client, "end"), service.adapter(twin, "end"), 0)


def test_ranks_answer_prompts_with_images_where_a_server_draws_others(tmp_path):
    model = make_image_model(tmp_path / "model")
    pictures = Pictures(model)
    with LoraServer(model.name, lambda adapter, request: ([7], [-1.0]), -1) as server:
        service = Service(model, tmp_path / "folder", 1, rollout_url=server.url)
        try:
            sampler = service.client().create_sampling_client(base_model=service.model).result()
            prompt = pictures.prompt(1)
            options = types.SamplingParams(max_tokens=1, stop=[])
            [answer] = sampler.sample(prompt, 1, options).result().sequences
            whole = prompt.append(types.EncodedTextChunk(tokens=answer.tokens))
            scored = sampler.compute_logprobs(whole).result()
            assert answer.logprobs == pytest.approx(scored[-1:], abs=1e-5)
            assert not [path for path, _ in server.asked if path == "/v1/completions"]
            text = types.ModelInput.from_ints([5, 9])
            assert sampler.sample(text, 1, options).result().sequences[0].logprobs == [-1.0]
        finally:
            service.end()


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen3_vl", "qwen2_5_vl", "mistral3"}))
def test_data_with_images_have_the_logprobs_of_transformers(family, tmp_path):
    (tmp_path / "model").mkdir()
    model = make_family(tmp_path / "model", family)
    alone = Alone(model)
    data = [alone.datum(row, num_images) for row, num_images in enumerate((2, 0, 1, 1, 0))]
    service = Service(model, tmp_path / "folder", 2, context_length=256)
    try:
        client = service.trainer(rank=2)
        found = logprobs_of(client.forward(data, "cross_entropy").result())
        assert_equal(found, [alone.logprobs(datum) for datum in data])
    finally:
        service.end()
