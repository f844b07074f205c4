"""Training through the real client equals plain PEFT with torch's AdamW."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from tinker import RequestFailedError, types
from torch import Tensor

from fsdp_qlora.service import losses
from tests.service.harness import CLIPPED, Plain, assert_equal, datums, logprobs_of, on_two_ranks

pytestmark = pytest.mark.slow

PARAMS = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
LOSSES: list[tuple[str, Mapping[str, float]]] = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", CLIPPED),
    ("dro", {"beta": 0.1}),
    ("gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
]


def test_sft_equals_plain_peft_over_steps_of_several_requests(service):
    client = service.trainer(rank=4, seed=7)
    plain = Plain(
        service.model, service.saved(client.save_weights_for_sampler("start").result().path)
    )
    for step in range(5):
        params = PARAMS.model_copy(update={"grad_clip_norm": 0.5 if step % 2 else 0.0})
        first = datums(5, step)
        second = datums(3, 10 + step, likely=3 if step == 2 else 0)
        futures = [client.forward_backward(part, "cross_entropy") for part in (first, second)]
        client.optim_step(params).result()
        for future, part in zip(futures, (first, second), strict=True):
            loss, logprobs = plain.forward_backward(part, "cross_entropy")
            assert future.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
            assert_equal(logprobs_of(future.result()), logprobs)
        plain.optim_step(params)
    assert_equal(service.adapter(client, "end"), plain.adapter())


@on_two_ranks
@pytest.mark.parametrize(
    ("loss_fn", "config"), LOSSES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_losses_of_policies_equal_their_formulas(service, loss_fn, config):
    client = service.trainer(rank=2, seed=3)
    plain = Plain(
        service.model, service.saved(client.save_weights_for_sampler("start").result().path)
    )
    for step in range(5 if loss_fn in ("ppo", "gspo") else 2):
        data = datums(6, step, of_policy=True)
        if loss_fn == "gspo":
            for datum in data:
                is_answer = datum.loss_fn_inputs["advantages"].to_numpy() != 0
                datum.loss_fn_inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(
                    is_answer.astype(np.float32)
                )
        found = client.forward_backward(data, loss_fn, config)  # type: ignore[arg-type]
        client.optim_step(PARAMS).result()
        loss, logprobs = plain.forward_backward(data, loss_fn, config)
        plain.optim_step(PARAMS)
        assert found.result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert_equal(logprobs_of(found.result()), logprobs)
    assert_equal(service.adapter(client, "end"), plain.adapter())


def test_the_loss_cispo_has_the_bits_of_its_formula():
    p, advantages, q = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    given = {"logprobs": q, "advantages": advantages}
    found = losses.LOSSES["cispo"].sum(p, given, CLIPPED, lambda values: values)
    weight = (p - q).exp().clamp(*CLIPPED.values())
    assert torch.equal(found, -weight * p * advantages)


@on_two_ranks
def test_a_custom_loss_gives_its_own_gradient(service):
    client = service.trainer()
    plain = Plain(
        service.model, service.saved(client.save_weights_for_sampler("start").result().path)
    )
    data = datums(4, 5)

    def of_pairs(
        data: list[types.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        sums = [
            (each * datum.loss_fn_inputs["weights"].to_torch()).sum()
            for each, datum in zip(logprobs, data, strict=True)
        ]
        loss = -torch.nn.functional.logsigmoid(
            torch.stack(sums[::2]) - torch.stack(sums[1::2])
        ).sum()
        return loss, {"pairs": float(len(sums) // 2)}

    future = client.forward_backward_custom(data, of_pairs)
    client.optim_step(PARAMS).result()
    loss, _ = of_pairs(data, [plain.logprobs(datum) for datum in data])
    loss.backward()
    plain.optim_step(PARAMS)
    assert future.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert future.result().metrics["pairs"] == 2
    assert_equal(service.adapter(client, "end"), plain.adapter())


@on_two_ranks
def test_forward_alone_leaves_no_gradient(service):
    client = service.trainer()
    data = datums(3)
    before = service.adapter(client, "before")
    losses = [client.forward(data, "cross_entropy").result().metrics["loss:sum"] for _ in range(2)]
    client.optim_step(PARAMS.model_copy(update={"weight_decay": 0.0})).result()
    assert losses[0] == losses[1]
    assert_equal(service.adapter(client, "after"), before, 0)


@on_two_ranks
def test_a_request_larger_than_a_chunk_counts_as_a_whole(service):
    client = service.trainer(seed=2)
    plain_client = service.trainer(seed=2)
    client.holder._client_config = client.holder.get_client_config().model_copy(
        update={"fwdbwd_max_chunk_len": 2}
    )
    data = datums(7, 3)
    found, expected = (
        each.forward_backward(data, "cross_entropy").result() for each in (client, plain_client)
    )
    assert_equal(logprobs_of(found), logprobs_of(expected))
    for each in (client, plain_client):
        each.optim_step(PARAMS).result()
    assert_equal(service.adapter(client, "end"), service.adapter(plain_client, "end"))


def test_saved_states_go_on_with_and_without_the_optimizer(service):
    client = service.trainer(seed=5)

    def train(each: object, steps: range) -> None:
        for step in steps:
            each.forward_backward(datums(3, step), "cross_entropy")  # type: ignore[attr-defined]
            each.optim_step(PARAMS).result()  # type: ignore[attr-defined]

    train(client, range(2))
    path = client.save_state("middle").result().path
    plain = Plain(service.model, service.saved(path))
    train(client, range(2, 4))
    whole = service.adapter(client, "end")
    again = service.client().create_training_client_from_state_with_optimizer(path).result()
    train(again, range(2, 4))
    assert_equal(service.adapter(again, "end"), whole, 0)
    anew = service.client().create_training_client_from_state(path).result()
    train(anew, range(2, 4))
    for step in range(2, 4):
        plain.forward_backward(datums(3, step), "cross_entropy")
        plain.optim_step(PARAMS)
    assert_equal(service.adapter(anew, "end"), plain.adapter())
    with pytest.raises(RequestFailedError, match="middle"):
        client.save_state("middle").result()
    assert client.save_state("middle", overwrite=True).result().path == path


def test_two_clients_in_turns_equal_each_alone(service):
    def trained(*seeds: int) -> list[dict[str, Tensor]]:
        clients = [service.trainer(rank=2 + seed, seed=seed, train_mlp=seed != 1) for seed in seeds]
        for step in range(3):
            for client, seed in zip(clients, seeds, strict=True):
                client.forward_backward(datums(3, 100 * seed + step), "cross_entropy")
            for client in clients:  # their gradients wait while the other one computes
                client.optim_step(PARAMS).result()
        return [service.adapter(client, "end") for client in clients]

    first, second = trained(1, 2)
    assert_equal(first, *trained(1), tolerance=0)
    assert_equal(second, *trained(2), tolerance=0)
