"""A service that a test may kill and start again, and the plain PEFT loop that it is
compared with.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from torch import Tensor
from transformers import AutoModelForCausalLM

from stand_in.environment import free_port
from tests.helpers.run import ROOT, flags

KEY = "tml-of-the-tests"  # the client takes no other beginning
VOCABULARY = 320
PROTOBUF = {"Content-Type": "application/x-protobuf"}
SESSION: dict[str, Any] = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
STEP = types.AdamParams(learning_rate=1e-3)
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SECONDS = 180

on_two_ranks = pytest.mark.parametrize("service", [2], ids=["two_ranks"], indirect=True)


class Service:
    """`fsdp-qlora serve` in processes of its own."""

    def __init__(self, model: Path, folder: Path, world_size: int, **options: object) -> None:
        self.model = str(model)
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.teacher = str(options.get("teacher"))
        usual = {
            "train_type": "lora",
            "precision": "fp32",
            "lora_rank": 8,
            "quant_cache": "off",
            "context_length": 128,
        }
        given = {**usual, "nproc_per_node": world_size, **options}
        given |= {"model_name": model, "folder": folder, "port": self.port}
        program = os.environ.get("FSDP_QLORA_SERVE", f"{sys.executable} -m fsdp_qlora serve")
        self._command = [*program.split(), *flags(**given)]
        self.log = folder.parent / "service.log"
        self.environment = {**os.environ, "TINKER_API_KEY": KEY}
        self._clients: list[tinker.ServiceClient] = []
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
            )
        for _ in range(_SECONDS * 10):
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            with contextlib.suppress(OSError):
                if self.ask("healthz", b"", "GET")[0] != 413:
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-6000:])

    def kill(self) -> None:
        """End all its processes at once, as a machine that loses its power does."""
        found = self.processes() if self.process.poll() is None else []
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(found[1:], timeout=60)
        self.process.wait()

    def end(self) -> None:
        """Kill it for good. A client that lived on would go on calling, and warn that nobody
        answers.
        """
        try:
            deadline = time.monotonic() + 60
            for closing in [each.close("success") for each in self._clients]:
                with contextlib.suppress(TimeoutError):
                    closing.result(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self.kill()

    def client(self) -> tinker.ServiceClient:
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=KEY))
        return self._clients[-1]

    def trainer(self, rank: int = 4, seed: int = 1, **which: bool) -> tinker.TrainingClient:
        return (
            self.client()
            .create_lora_training_client(self.model, rank=rank, seed=seed, **which)
            .result()
        )

    def saved(self, uri: str) -> Path:
        """The folder of saved weights."""
        kind, name = uri.split("/")[3:]
        run = uri.split("/")[2]
        [folder] = [
            path.parent
            for path in self.folder.rglob("adapter_config.json")
            if path.parent.name == name
            and path.parents[1].name == kind
            and path.parents[2].name in (run, safe(run))
        ]
        return folder

    def adapter(self, client: tinker.TrainingClient, name: str) -> dict[str, Tensor]:
        """The tensors of the adapter as it is now, out of the folder that PEFT would load."""
        return tensors(self.saved(client.save_weights_for_sampler(name).result().path))

    def ask(
        self, kind: str, body: object = None, method: str = "POST", **headers: str | None
    ) -> tuple[int, Any]:
        """Status and answer of a request by hand, the body as JSON if it is not bytes; 413 if it
        is not read to its end.

        Args:
            kind: the path behind /api/v1, or a whole path. headers: None leaves one out.
        """
        path = kind if kind.startswith("/") else f"/api/v1/{kind}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"X-API-Key": KEY, "Content-Type": "application/json"}
        head = {name: value for name, value in {**usual, **headers}.items() if value is not None}
        request = urllib.request.Request(f"{self.url}{path}", data, head, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, content_of(answer, {})
        except urllib.error.HTTPError as error:
            return error.code, content_of(error, None)
        except urllib.error.URLError as error:
            if isinstance(error.reason, BrokenPipeError | ConnectionResetError):
                return 413, None
            raise

    def outcome(self, kind: str, body: object, **headers: str) -> Any:
        """The answer to a request that ranks work on, or to one that is refused at once: `error`
        says why.
        """
        status, answer = self.ask(kind, body, **headers)
        if status != 200 or "request_id" not in (answer or {}):
            return answer
        for _ in range(4):  # each waits for 25 s
            status, found = self.ask("retrieve_future", {"request_id": answer["request_id"]})
            if status != 408:
                return found
        raise AssertionError(f"no result: {kind} {str(body)[:200]}")

    def create_session(self, **about: Any) -> tuple[int, Any]:
        return self.ask("create_session", {**SESSION, **about})

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


class ServedModel:
    """A model whose requests are made by hand, with their numbers."""

    def __init__(self, service: Service, seed: int = 1) -> None:
        self.service = service
        self.client = service.trainer(seed=seed)
        self.name = self.client.model_id
        self.number = 0  # of its last request: a hole would stop it

    def ask(self, kind: str, **body: Any) -> Any:
        """The outcome of its next request; `error` says why it failed."""
        self.number += 1
        numbered = {"model_id": self.name, "seq_id": self.number, **body}
        return self.service.outcome(kind, numbered)

    def train(self, change: Callable[[Any], object] = lambda message: None, seed: int = 0) -> Any:
        """A forward_backward after `change` has changed its message."""
        self.number += 1
        message = training_message(self.name, self.number, datums(2, seed))
        change(message)
        return self.service.outcome("forward_backward", message.SerializeToString(), **PROTOBUF)

    def step(self, **params: float) -> Any:
        return self.ask("optim_step", adam_params={"learning_rate": 1e-3, **params})

    def save(self, path: str, **options: Any) -> Any:
        return self.ask("save_weights", path=path, **options)

    def adapter(self, name: str) -> dict[str, Tensor]:
        path = self.ask("save_weights_for_sampler", path=name)["path"]
        return tensors(self.service.saved(path))


def training_message(model: str, seq: int, data: Sequence[types.Datum]) -> Any:
    """A forward_backward as the client sends it."""
    batch = types.ForwardBackwardInput(data=[*data], loss_fn="cross_entropy")
    return forward_backward_request_to_proto(types.ForwardBackwardRequest(batch, model, seq))


def content_of(answer: Any, otherwise: Any) -> Any:
    """The JSON of an answer, or what stands for another kind of content."""
    content = answer.read()
    is_json = answer.headers["Content-Type"] == "application/json"
    return json.loads(content or b"null") if is_json else otherwise


def safe(run: str) -> str:
    return run.replace(":", "_")


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


class Plain:
    """One adapter in transformers and PEFT, with torch's own AdamW; the losses are written after
    the public docs.
    """

    def __init__(self, model: str, adapter: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def logprobs(self, datum: types.Datum) -> Tensor:
        """Of each target of a datum, in its targets' shape."""
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        all_logprobs = (
            self.model(torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
        )
        return all_logprobs.gather(1, targets.reshape(len(targets), -1)).view(targets.shape)

    def forward_backward(
        self, data: Sequence[types.Datum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> tuple[float, list[Tensor]]:
        """The summed loss and the targets' log-probabilities; gradients add up."""
        found = [self.logprobs(datum) for datum in data]
        inputs = [
            {name: each.to_torch() for name, each in datum.loss_fn_inputs.items()} for datum in data
        ]
        loss = sum(
            plain_loss(loss_fn, p, given, config or {})
            for p, given in zip(found, inputs, strict=True)
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.item(), [each.detach() for each in found]

    def optim_step(self, params: types.AdamParams) -> None:
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, params.grad_clip_norm)
        [group] = self.optimizer.param_groups
        group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
        group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        self.optimizer.step()
        self.optimizer.zero_grad()

    def adapter(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in get_peft_model_state_dict(self.model).items()}


def plain_loss(
    loss_fn: str, p: Tensor, given: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    """Of one datum, in the formulas of tinker-docs' pages about losses."""
    if loss_fn == "cross_entropy":
        return -(p * given["weights"]).sum()
    q = given["logprobs"]
    advantages = given["advantages"]
    config = {**CLIPPED, "beta": 0.05, **config}
    ratio = torch.exp(p - q)
    bounds = (config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "cispo":
        return -(ratio.clamp(*bounds).detach() * p * advantages).sum()
    if loss_fn == "dro":
        return -(p * advantages - 0.5 * config["beta"] * (p - q) ** 2).sum()
    if loss_fn == "gspo":
        mean = (p.detach() - q)[given["sequence_ratio_mask"] != 0].mean()
        ratio = torch.exp(mean + p - p.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages).sum()


def datums(
    count: int, seed: int = 0, *, of_policy: bool = False, likely: int = 0
) -> list[types.Datum]:
    """Random sequences of uneven lengths.

    Args:
        of_policy: with advantages and the log-probabilities of a policy that drew the tokens, else
        with weights. likely: targets of each position, if several.
    """
    numbers = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(numbers.integers(4, 40))
        tokens = numbers.integers(2, VOCABULARY - 1, length + 1)
        prompt = int(numbers.integers(1, length))
        is_answer = (np.arange(length) >= prompt).astype(np.float32)
        given: dict[str, Any] = {"target_tokens": tokens[1:]}
        if of_policy:
            # a random model's, so that some ratios are clipped
            drawn = -5.8 + 0.3 * numbers.standard_normal(length)
            given |= {"logprobs": (drawn * is_answer).astype(np.float32)}
            given |= {
                "advantages": (numbers.standard_normal(length) * is_answer).astype(np.float32)
            }
        elif likely:
            given["target_tokens"] = numbers.integers(2, VOCABULARY - 1, (length, likely))
            given["weights"] = numbers.random((length, likely)).astype(np.float32)
        else:
            given["weights"] = (numbers.random(length) * is_answer).astype(np.float32)
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=given
            )
        )
    return made


def logprobs_of(output: types.ForwardBackwardOutput) -> list[Tensor]:
    return [each["logprobs"].to_torch() for each in output.loss_fn_outputs]


def assert_equal(
    found: Mapping[str, Tensor] | Sequence[Tensor], expected: Any, tolerance: float = 1e-5
) -> None:
    """That tensors, in a list or under names, differ by 1e-5 at most."""
    assert len(found) == len(expected)
    for key in found if isinstance(found, Mapping) else range(len(found)):
        torch.testing.assert_close(found[key], expected[key], rtol=tolerance, atol=tolerance)  # type: ignore[index]
