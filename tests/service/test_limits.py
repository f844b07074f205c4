"""Numbers, sizes and times of a request: one that cannot be done fails alone, before it takes
memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.service.harness import KEY, Service, assert_equal, datums, outcome, said, tensors

pytestmark = pytest.mark.parametrize("service", [2], ids=["two_ranks"], indirect=True)
STEP = types.AdamParams(learning_rate=1e-3)
PROTOBUF = {"Content-Type": "application/x-protobuf"}


class Model:
    """A model whose requests are made by hand, with their numbers."""

    def __init__(self, service: Service, seed: int = 1) -> None:
        self.service = service
        self.client = service.trainer(seed=seed)
        self.name = self.client.model_id
        self.number = 0

    def ask(self, kind: str, **body: Any) -> Any:
        self.number += 1
        return outcome(
            self.service, f"/api/v1/{kind}", {"model_id": self.name, "seq_id": self.number, **body}
        )

    def train(self, change: Callable[[Any], object] = lambda message: None, seed: int = 0) -> Any:
        """A forward_backward after `change` has changed its message; `error` says why it failed."""
        self.number += 1
        batch = types.ForwardBackwardInput(data=datums(2, seed), loss_fn="cross_entropy")
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(batch, self.name, self.number)
        )
        change(message)
        return outcome(
            self.service, "/api/v1/forward_backward", message.SerializeToString(), **PROTOBUF
        )

    def adapter(self, name: str) -> Any:
        path = self.ask("save_weights_for_sampler", path=name)["path"]
        return tensors(self.service.saved(path))


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
    model = Model(service, seed=3)
    twin = Model(service, seed=3)
    for each in (model, twin):
        each.train()
        assert "error" not in each.ask("optim_step", adam_params=STEP.model_dump())
        each.train(seed=1)
    refused = model.ask("optim_step", adam_params=params)
    assert "error" in refused and "category" in refused
    assert "error" in twin.ask("optim_step", adam_params={"beta1": 2.0})  # is never begun
    for each in (model, twin):  # the gradients of before are still there
        assert "error" not in each.ask("optim_step", adam_params=STEP.model_dump())
    assert_equal(model.adapter("end"), twin.adapter("end"), 0)


def test_times_to_live_have_bounds_and_listings_go_on(service):
    model = Model(service)
    uri = model.ask("save_weights", path="kept")["path"]
    rest = tinker.RestClient(base_url=service.url, api_key=KEY)
    run = uri.removeprefix("tinker://").partition("/")[0]
    at = f"/api/v1/training_runs/{run}/checkpoints/weights/kept/ttl"
    odd: list[Any] = [
        10**18,
        10**400,
        -5,
        0,
        1,
        3599,
        10**10,
        True,
        "3600",
        3600.5,
        [3600],
        float("nan"),
    ]
    for seconds in odd:
        if seconds != "3600":  # the client's own types take it for a number
            assert "error" in model.ask("save_weights", path="other", ttl_seconds=seconds), seconds
        status, _ = said(service, at, {"ttl_seconds": seconds}, "PUT")
        assert status == 400, seconds
    assert "error" not in model.ask("save_weights", path="an_hour", ttl_seconds=3600)
    assert said(service, at, {"ttl_seconds": 10 * 365 * 24 * 3600}, "PUT")[0] == 200
    found = {
        each.tinker_path: each.expires_at
        for each in rest.list_checkpoints(run).result().checkpoints
    }
    assert found[uri] is not None and len(found) == 2
    assert said(service, at, {"ttl_seconds": None}, "PUT")[0] == 200
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
    model = Model(service)
    processes = [
        psutil.Process(service.process.pid),
        *psutil.Process(service.process.pid).children(recursive=True),
    ]
    before = sum(each.memory_info().rss for each in processes)
    assert "targets each" in model.train(wide(width))["error"]
    assert sum(each.memory_info().rss for each in processes) - before < 64 * 2**20
    assert "error" not in model.train(wide(64))


def test_settings_and_targets_that_are_no_numbers_are_refused(service):
    model = Model(service)

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

    def sample(stop: Any, **other: Any) -> Any:
        params = {"max_tokens": 3, "stop": stop, **other}
        return outcome(
            service,
            "/api/v1/asample",
            {"base_model": service.model, "prompt": prompt, "sampling_params": params},
        )

    for stop in (["x"] * 10_000, ["y" * 5_000], [""]):
        assert "stop" in sample(stop)["error"]
    for stop in ([], "x", ["x", "yz"], [7, 8], None):
        assert "error" not in sample(stop), stop


def test_metadata_is_bounded_json(service):
    session = {"tags": [], "sdk_version": "1"}
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    for metadata in ({"x": "y" * 100_000}, {"x": float("nan")}):
        assert (
            said(service, "/api/v1/create_session", {**session, "user_metadata": metadata})[0]
            == 400
        )
        assert (
            "user_metadata"
            in Model(service).ask("save_weights", path="a", user_metadata=metadata)["error"]
        )
    assert said(service, "/api/v1/create_session", {**session, "user_metadata": {"x": deep}})[
        0
    ] in (200, 400)
    assert said(service, "/api/v1/training_runs?limit=1000", b"", "GET")[0] == 200


def test_odd_numbers_of_requests_are_refused_and_used_ones_answered(service):
    model = Model(service)
    step = {"adam_params": STEP.model_dump()}
    for number in (0, -1, 2**62, 2**70, 1.5, "1", None, True, 50_000):
        body = {"model_id": model.name, "seq_id": number, **step}
        assert said(service, "/api/v1/optim_step", body)[0] == 400, number
    assert "error" not in model.ask("optim_step", **step)
    assert outcome(service, "/api/v1/optim_step", {"model_id": model.name, "seq_id": 1, **step})[
        "metrics"
    ]
