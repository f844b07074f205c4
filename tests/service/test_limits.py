"""Numbers, sizes and times of a request: one that cannot be done fails alone, before it takes
memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker

from tests.service.harness import KEY, ServedModel, assert_equal, on_two_ranks

pytestmark = on_two_ranks
TEN_YEARS = 10 * 365 * 24 * 3600
OTHER_NUMBERS = [0, -1, 2**62, 2**70, 1.5, "1", None, True, 50_000]


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": 1e39},
        {"learning_rate": 1e308},
        {"learning_rate": 3e38},
        {"learning_rate": 1e-3, "weight_decay": 1e300},
        {"learning_rate": 1e-3, "eps": 1e300},
    ],
    ids=lambda each: ",".join(f"{name}={value:g}" for name, value in each.items()),
)
def test_a_step_that_overflows_fails_and_is_not_kept(service, params):
    model, twin = (ServedModel(service, seed=3) for _ in range(2))
    for each in (model, twin):
        each.train()
        assert "error" not in each.step()
        each.train(seed=1)
    refused = model.step(**params)
    assert "error" in refused and "category" in refused
    assert "error" in twin.step(beta1=2.0)  # is never begun
    for each in (model, twin):  # the gradients of before are still there
        assert "error" not in each.step()
    assert_equal(model.adapter("end"), twin.adapter("end"), 0)


WRONG_SECONDS: list[Any] = [10**18, 10**400, -5, 0, 1, 3599, 10**10]
NO_SECONDS: list[Any] = [True, 3600.5, [3600], float("nan")]


def test_times_to_live_have_bounds_and_listings_go_on(service):
    model = ServedModel(service)
    uri = model.save("kept")["path"]
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    run = uri.removeprefix("tinker://").partition("/")[0]

    def put(seconds: Any) -> int:
        path = f"training_runs/{run}/checkpoints/weights/kept/ttl"
        return service.ask(path, {"ttl_seconds": seconds}, "PUT")[0]

    for seconds in (*WRONG_SECONDS, *NO_SECONDS):
        assert "error" in model.save("other", ttl_seconds=seconds), seconds
        assert put(seconds) == 400, seconds
    assert put("3600") == 400  # which the client's own types take for a number
    assert "error" not in model.save("an_hour", ttl_seconds=3600)
    assert put(TEN_YEARS) == 200
    checkpoints = rest.list_checkpoints(run).result().checkpoints
    found = {each.tinker_path: each.expires_at for each in checkpoints}
    assert found[uri] is not None and len(found) == 2
    assert put(None) == 200
    assert rest.list_training_runs(limit=1000).result().training_runs


def wide(width: int) -> Callable[[Any], None]:
    """Make all targets of a message sparse, of so many a token."""

    def change(message: Any) -> None:
        for datum in message.data:
            length = datum.loss_fn_inputs["target_tokens"].shape[0]
            for name in ("target_tokens", "weights"):
                tensor = datum.loss_fn_inputs[name]
                tensor.shape[:] = [length, width]
                tensor.sparse_csr.crow_indices = np.zeros(length + 1, "<i8").tobytes()
                tensor.sparse_csr.col_indices = tensor.sparse_csr.values = b""

    return change


@pytest.mark.parametrize("width", [321, 524_288, 2**40, 2**62])
def test_a_small_request_of_many_values_takes_no_memory(service, width):
    model = ServedModel(service)
    processes = service.processes()
    before = sum(each.memory_info().rss for each in processes)
    assert "targets each" in model.train(wide(width))["error"]
    assert sum(each.memory_info().rss for each in processes) - before < 64 * 2**20
    assert "error" not in model.train(wide(64))


def test_settings_and_targets_that_are_no_numbers_are_refused(service):
    model = ServedModel(service)

    def fractions(message: Any) -> None:
        tensor = message.data[0].loss_fn_inputs["target_tokens"]
        tensor.dtype = message.data[0].loss_fn_inputs["weights"].dtype
        tensor.dense = np.full(tensor.shape[0], 2.5, "<f4").tobytes()

    def infinite(message: Any) -> None:
        message.loss_fn = "dro"
        message.loss_fn_config["beta"] = float("inf")

    def of_no_memory(message: Any) -> None:
        message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [2] * 70

    for change in (fractions, infinite, of_no_memory):
        assert "error" in model.train(change)
    assert "error" not in model.train()


def test_stop_texts_are_few_and_short(service):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}

    def sample(stop: Any) -> Any:
        params = {"max_tokens": 3, "stop": stop}
        body = {"base_model": service.model, "prompt": prompt, "sampling_params": params}
        return service.outcome("asample", body)

    for stop in (["x"] * 10_000, ["y" * 5_000], [""]):
        assert "stop" in sample(stop)["error"]
    for stop in ([], "x", ["x", "yz"], [7, 8], None):
        assert "error" not in sample(stop), stop


def test_metadata_is_bounded_json(service):
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    for metadata in ({"x": "y" * 100_000}, {"x": float("nan")}):
        assert service.create_session(user_metadata=metadata)[0] == 400
        refused = ServedModel(service).save("a", user_metadata=metadata)
        assert "user_metadata" in refused["error"]
    assert service.create_session(user_metadata={"x": deep})[0] in (200, 400)
    assert service.ask("training_runs?limit=1000", b"", "GET")[0] == 200


def test_odd_numbers_of_requests_are_refused_and_used_ones_answered(service):
    model = ServedModel(service)
    step = {"model_id": model.name, "adam_params": {"learning_rate": 1e-3}}
    for number in OTHER_NUMBERS:
        assert service.ask("optim_step", {"seq_id": number, **step})[0] == 400, number
    assert "error" not in model.step()
    assert service.outcome("optim_step", {"seq_id": 1, **step})["metrics"]


def test_a_model_of_text_refuses_images_in_one_sentence(service):
    chunk = {"type": "image", "data": "AAAA", "format": "png"}
    sampled = service.outcome(
        "asample",
        {
            "base_model": service.model,
            "prompt": {"chunks": [chunk]},
            "sampling_params": {"max_tokens": 1},
        },
    )
    model = ServedModel(service)

    def show(message: Any) -> None:
        message.data[0].model_input.add().image.data = b"an image"

    ending = f"has an image, and {service.model} takes text alone: serve a model for images."
    assert sampled["error"] == f"The prompt {ending}"
    assert model.train(show)["error"] == f"Datum 0 {ending}"
    assert "error" not in model.train()
