"""Requests that no client sends: each gets an error, nothing is written outside the folder, and the
service goes on.
"""

import json
import random
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.helpers.run import all_slow_but
from tests.service.harness import (
    KEY,
    PROTOBUF,
    SESSION,
    STEP,
    Service,
    assert_equal,
    datums,
    on_two_ranks,
    training_message,
)
from tests.service.loop import main

OF_MODELS = ["optim_step", "save_weights", "save_weights_for_sampler", "load_weights"]
OTHERS = [
    "create_session",
    "create_model",
    "get_info",
    "create_sampling_session",
    "session_heartbeat",
    "weights_info",
]
JSON = [*OF_MODELS, *OTHERS, "asample", "retrieve_future"]
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e400,
    float("nan"),
    "",
    "x" * 100_000,
    [],
    {},
    [[]],
    "../../x",
    "\0",
]
STEPS = 6
UNKNOWN = ["/", "/api/v1/../../etc/passwd", "nothing", "/docs", "/api/v2/x", "/%00"]
BODIES = [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100_000, b'"x"', b"\0" * 999]
PATHS = [
    "../../../outside",
    "/outside",
    "a/b",
    "..",
    ".",
    ".hidden",
    "x\0y",
    "a" * 4_000,
    "tinker://a/weights/b",
    "",
]


ADAM = ["learning_rate", "beta1", "weight_decay", "eps", "grad_clip_norm"]
NAMES: list[Callable[[str], Any]] = [
    lambda name: "/tmp/x",
    lambda name: f"../{name}",
    lambda name: f"{name}/../../x",
    lambda name: f"{name}\n",
    lambda name: f"0{name[1:]}" if name[0] != "0" else f"1{name[1:]}",
    lambda name: name.upper() + "A",
    lambda name: "",
    lambda name: "\ud800",
    lambda name: [name],
    lambda name: {"a": name},
    lambda name: 10**40,
]


Request = tuple[str, Any, dict[str, str]]
"""A path, a body and headers."""


class Stranger:
    """Makes wrong requests out of right ones: (path, body, headers)."""

    def __init__(self, service: Service, seed: int) -> None:
        self.choose = random.Random(seed)
        self.service = service
        self.trainer = service.trainer()
        self.number = 0  # of the trainer's last request: a hole would stop it
        self.session = self.trainer.holder.get_session_id()
        self.model = self.trainer.model_id
        sampler = service.client().create_sampling_client(base_model=service.model).result()
        self.sampler = sampler._sampling_session_id

    def right(self, kind: str) -> dict[str, Any]:
        """A request that would be answered."""
        of_model = {"model_id": self.model, "seq_id": self.number + 1} if kind in OF_MODELS else {}
        name = f"n{self.choose.randrange(10**9)}"
        asked = {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        bodies: dict[str, dict[str, Any]] = {
            "create_session": SESSION,
            "create_model": {
                "session_id": self.session,
                "model_seq_id": self.choose.randrange(10**6),
                "base_model": self.service.model,
                "lora_config": {"rank": 2},
            },
            "get_info": {"model_id": self.model},
            "optim_step": {"adam_params": {"learning_rate": 1e-3}},
            "save_weights": {"path": name},
            "save_weights_for_sampler": {"path": name},
            "load_weights": {"path": f"tinker://{self.model}/weights/none", "optimizer": True},
            "asample": {
                "sampling_session_id": self.sampler,
                "seq_id": self.choose.randrange(10**9),
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]},
                "sampling_params": asked,
            },
            "create_sampling_session": {
                "session_id": self.session,
                "sampling_session_seq_id": self.choose.randrange(10**9),
                "base_model": self.service.model,
            },
            "session_heartbeat": {"session_id": self.session},
            "retrieve_future": {"request_id": "x"},
            "weights_info": {"tinker_path": f"tinker://{self.model}/weights/none"},
        }
        return {**bodies[kind], **of_model}

    def ask(self, count: int) -> None:
        """Send wrong requests, each of which must be refused."""
        for number in range(count):
            path, body, headers = self.wrong()
            shown = body[:200] if isinstance(body, bytes) else json.dumps(body)[:400]
            assert is_refused(self.service, path, body, headers), (number, path, shown, headers)
            # Its number counts as used where it was taken, though it failed.
            last = {"request_id": f"{self.model}:{self.number + 1}"}
            self.number += self.service.ask("retrieve_future", last)[0] == 200

    def wrong(self) -> Request:
        makers: list[Callable[[], Request]] = [
            self.odd_value,
            self.odd_value,
            self.bad_path,
            self.no_json,
            self.odd_tensor,
            self.odd_prompt,
            self.no_key,
            self.unknown,
            self.rubbish,
            self.odd_name,
            self.odd_number,
            self.flipped_bits,
        ]
        return self.choose.choice(makers)()

    def odd_value(self) -> Request:
        """A field that is missing, has another type, or is not known."""
        kind = self.choose.choice(JSON)
        body = self.right(kind)
        free = {"tags", "user_metadata", "model_id", "seq_id", "sampling_session_id"}
        name = self.choose.choice(sorted(body.keys() - free) or ["model_id"])
        odd = [value for value in ODD if type(value) is not type(body[name])]
        body[name] = self.choose.choice(odd[name == "path" :])  # weights may have no name
        if self.choose.random() < 0.3:
            body = (
                {**self.right(kind), "surplus": 1} if kind in ("optim_step", "save_weights") else {}
            )
        return kind, body, {}

    def bad_path(self) -> Request:
        name = self.choose.choice(PATHS)
        kind = self.choose.choice([*OF_MODELS[1:], "create_sampling_session", "weights_info"])
        body = self.right(kind)
        body |= {"tinker_path": name} if kind == "weights_info" else {"path": name}
        if kind == "create_sampling_session":
            body = {**self.right(kind), "model_path": name}
            del body["base_model"]
        return kind, body, {}

    def no_json(self) -> Request:
        return self.choose.choice(JSON), self.choose.choice(BODIES), {}

    def odd_tensor(self) -> Request:
        """A forward_backward with something wrong in it."""
        [datum] = datums(1, self.choose.randrange(99))
        request = training_message(self.model, self.number + 1, [datum])
        first = request.data[0]
        how = self.choose.randrange(12)
        weights = first.loss_fn_inputs["weights"]
        targets = first.loss_fn_inputs["target_tokens"]
        if how == 0:
            weights.shape[0] += 1
        elif how == 1:
            weights.dtype = 99  # type: ignore[assignment]
        elif how == 2:
            del first.loss_fn_inputs["target_tokens"]
        elif how == 3:
            first.model_input[0].encoded_text.tokens = b"\xff\xff\xff\x7f" * len(
                datum.model_input.to_ints()
            )
        elif how == 4:
            first.model_input[0].encoded_text.tokens = b"123"
        elif how == 5:
            first.model_input[0].image.data = b"no picture"
        elif how == 6:
            request.loss_fn = self.choose.choice(
                ["", "custom", "stable_reinforce", "__class__", "x" * 9_999]
            )
        elif how == 7:
            targets.dense = b"\xff" * len(targets.dense)
        elif how == 8:
            targets.shape[:] = [2**40, 2**40]
        elif how == 9:
            targets.sparse_csr.crow_indices = b"\x01" * 64
        elif how == 10:
            del request.data[:]
        else:
            first.model_input[0].encoded_text.tokens *= 1_000
        return "forward_backward", request.SerializeToString(), PROTOBUF

    def odd_prompt(self) -> Request:
        body = self.right("asample")
        odd: list[dict[str, Any]] = [
            {"prompt": {"chunks": []}},
            {"prompt": "text"},
            *(
                {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ids}]}}
                for ids in ([-5], [10**7], [3] * 9_999)
            ),
            {"prompt": {"chunks": [{"type": "image", "data": "AAAA", "format": "png"}]}},
            *({"num_samples": each} for each in (0, 10**9)),
            *({"sampling_params": {"max_tokens": each}} for each in (-1, "many")),
            *({"sampling_params": {"max_tokens": 2, "temperature": each}} for each in (-1, 1e400)),
            *(
                {"sampling_params": each}
                for each in ({"top_p": 0}, {"stop": {"a": 1}}, {"top_k": -9})
            ),
            *(
                {name: 10**9}
                for name in (
                    "topk_prompt_logprobs",
                    "prompt_alt_tokens_k",
                    "prompt_logprobs_last_n",
                )
            ),
            *({"sampling_session_id": each, "seq_id": None} for each in ("none", None)),
        ]
        return "asample", body | self.choose.choice(odd), {}

    def odd_name(self) -> Request:
        """A model, session or sampler that is none."""
        kind = self.choose.choice(
            [*OF_MODELS, "get_info", "asample", "create_model", "session_heartbeat"]
        )
        body = self.right(kind)
        name = next(
            name for name in ("model_id", "sampling_session_id", "session_id") if name in body
        )
        body[name] = self.choose.choice(NAMES)(body[name])
        return kind, body, {}

    def odd_number(self) -> Request:
        """A number that overflows somewhere."""
        kind, changed = self.choose.choice(
            [
                *(
                    ("optim_step", {"adam_params": {name: value}})
                    for name in ADAM
                    for value in (-1.0, 1e39, 1e308)
                ),
                *(("save_weights", {"ttl_seconds": value}) for value in (0, -1, 10**18, 10**400)),
                *(("optim_step", {"seq_id": value}) for value in (0, -1, 10**6, 2**62, 2**64)),
                ("create_model", {"lora_config": {"rank": 2**40}}),
                ("create_model", {"model_seq_id": 10**30}),
                ("asample", {"seq_id": 2**63}),
                ("asample", {"sampling_params": {"max_tokens": 2, "stop": ["x"] * 5_000}}),
                ("asample", {"sampling_params": {"max_tokens": 2, "top_p": 2.0}}),
            ]
        )
        return kind, {**self.right(kind), **changed}, {}

    def flipped_bits(self) -> Request:
        """A forward_backward whose bits are flipped, or its numbers huge. Where it is still one, it
        is for no model.
        """
        data = datums(1, self.choose.randrange(99))
        request = training_message(f"{self.model}0", self.number + 1, data)
        body = bytearray(request.SerializeToString())
        for _ in range(self.choose.choice([1, 3, 30])):
            body[self.choose.randrange(len(body))] ^= 1 << self.choose.randrange(8)
        return "forward_backward", bytes(body), PROTOBUF

    def no_key(self) -> Request:
        kind = self.choose.choice(["create_session", "healthz", "retrieve_future"])
        body = self.right("create_session") if kind == "create_session" else {}
        key = self.choose.choice(["", KEY[:-1], KEY + "x", "tml-\xe9"])
        return kind, body, {"X-API-Key": key}

    def unknown(self) -> Request:
        return self.choose.choice(UNKNOWN), {}, {}

    def rubbish(self) -> Request:
        size = self.choose.choice([1, 100, 10_000, 70_000_000])
        body = (self.choose.randbytes(min(size, 10_000)) * (size // min(size, 10_000)))[:size]
        kind = self.choose.choice(["forward_backward", "optim_step", "asample"])
        content_type = self.choose.choice([PROTOBUF["Content-Type"], "a" * 99])
        return kind, body, {"Content-Type": content_type}


def is_refused(service: Service, path: str, body: Any, headers: dict[str, str]) -> bool:
    """Whether a request is answered with an error, at once or by its future."""
    status, answer = service.ask(path, body, **headers)
    if status != 200:
        # at which the client would try again
        return 400 <= status < 500 and status not in (408, 409, 429)
    if "request_id" not in (answer or {}):
        return False
    status, answer = service.ask("retrieve_future", {"request_id": answer["request_id"]})
    return status == 200 and "error" in answer


def outside(service: Service) -> dict[Path, int]:
    """What is around the service's folder, with its sizes."""
    around = service.folder.parent
    return {
        path: path.stat().st_size
        for path in around.rglob("*")
        if path.is_file() and service.folder not in path.parents and path != service.log
    }


@pytest.fixture
def before(service: Service) -> dict[Path, int]:
    return outside(service)


@on_two_ranks
@pytest.mark.parametrize(
    "count",
    [pytest.param(60, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.nightly)],
)
def test_hostile_requests_change_nothing_of_two_clients(service, tmp_path, count):
    """Two loops train while a stranger asks; they end with the bytes of one that
    nobody disturbs.
    """

    def trained(name: str) -> Path:
        main(service.url, service.model, tmp_path / name, STEPS)
        return tmp_path / name

    def adapter(log: Path) -> bytes:
        last = json.loads(log.read_text().splitlines()[-1])
        return (service.saved(last["path"]) / "adapter_model.safetensors").read_bytes()

    undisturbed = adapter(trained("alone"))
    stranger = Stranger(service, count)
    before = outside(service)
    with ThreadPoolExecutor() as pool:
        loops = [pool.submit(trained, name) for name in ("first", "second")]
        stranger.ask(count)
        assert [adapter(loop.result()) for loop in loops] == [undisturbed] * 2
    after = outside(service)
    assert {path for path in after.keys() - before.keys() if path.parent != tmp_path} == set()
    assert "Traceback" not in service.log.read_text()


@on_two_ranks
@pytest.mark.parametrize("seed", all_slow_but("", "01234", nightly="1234"))
def test_wrong_requests_get_an_error_each(service, before, seed):
    Stranger(service, int(seed)).ask(40)
    assert outside(service) == before
    names = {path.name for path in service.folder.rglob("*") if path.is_file()}
    assert all(set(name) <= {*string.ascii_letters, *string.digits, *"._-"} for name in names)
    # it goes on, and counts right
    client, twin = (service.trainer(seed=9) for _ in range(2))
    for each in (client, twin):
        each.forward_backward(datums(2), "cross_entropy").result()
        each.optim_step(STEP).result()
    assert_equal(service.adapter(client, "end"), service.adapter(twin, "end"), 0)


@pytest.mark.slow
@on_two_ranks
def test_what_is_not_served_is_refused_by_name_and_the_next_goes_on(service):
    client = service.trainer()
    data = datums(2)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("save_weights_external", lambda: client.save_weights_external("files")),
        ("stable_reinforce", lambda: client.forward_backward(data, "stable_reinforce")),
        ("sessions", tinker.RestClient(base_url=service.url, api_key=KEY).list_sessions),
    ]
    for name, ask in refused:
        with pytest.raises(tinker.TinkerError, match=name):
            ask().result(timeout=60)
        assert (
            client.forward_backward(data, "cross_entropy").result(timeout=60).metrics["loss:sum"]
            > 0
        )
