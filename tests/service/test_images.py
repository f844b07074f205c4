"""Images that the real client sends: training equals PEFT's, and what is wrong fails alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import types
from transformers import AutoImageProcessor

from tests.service.harness import Service, assert_equal, logprobs_of

pytest.importorskip("PIL")
if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )

from tests.service.image_data import Pictures, PlainWithImages, make_image_model

PARAMS = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("images")
    model = make_image_model(folder / "model")
    running = Service(model, folder / "folder", request.param)
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
