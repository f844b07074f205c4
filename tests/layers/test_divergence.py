"""The divergence from a teacher in chunks of a head: the same as of whole logits in float64, with
its gradients.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from fsdp_qlora.model.adapters.token_rows import NewTokens, TokenRows
from fsdp_qlora.training.attach_loss import attach_head_loss
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.divergence import Divergence
from fsdp_qlora.training.head_loss import chunked_loss
from fsdp_qlora.training.token_loss import Head, LogitForm, TokenLoss, whole_head
from fsdp_qlora.training.top_tokens import TopTokens
from tests.layers.test_head_loss import (
    HIDDEN,
    SEVEN_TOKENS,
    TOKENS,
    VOCABULARY,
    NewTensors,
    parts_of_a_head,
    targets_of_tokens,
)

FORMS = [LogitForm(), LogitForm(scale=2.0, cap=3.0, temperature=1.5)]
K = 8
WANTED = TopTokens(K, VOCABULARY)


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Of log-probabilities, for each token, by torch's own KL divergences."""
    if beta in (0, 1):
        own, other = (student, teacher) if beta == 0 else (teacher, student)
        return F.kl_div(own, other, reduction="none", log_target=True).sum(-1)
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    parts = [
        F.kl_div(mixture, side, reduction="none", log_target=True).sum(-1)
        for side in (teacher, student)
    ]
    return beta * parts[0] + (1 - beta) * parts[1]


def grouped(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens `ids` and of any other token."""
    others = logps.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logps.gather(-1, ids), others], dim=-1)


def whole_logits(parts: list[torch.Tensor], form: LogitForm) -> torch.Tensor:
    logits = F.linear(*parts) * form.scale
    return (
        logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    ) / form.temperature


@torch.no_grad()
def top_tokens(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The values of `WANTED`, [N, 2 * K + 1]."""
    return chunked_loss(hidden, head, targets_of_tokens(), WANTED, SEVEN_TOKENS).T


def teacher_states() -> torch.Tensor:
    return 0.5 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("beta", "is_whole"), [*itertools.product([0.0, 0.3, 1.0], [True, False])])
def test_divergence_and_gradients_are_those_of_whole_logits(dtype, beta, is_whole):
    tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for form in FORMS:
        parts = parts_of_a_head(dtype)
        states = teacher_states().to(dtype)
        targets = targets_of_tokens()
        exact = [part.detach().double().requires_grad_() for part in parts]
        student, of_teacher = (
            whole_logits([hidden, *exact[1:]], form).log_softmax(-1)
            for hidden in (exact[0], states.double())
        )
        of_teacher, best = of_teacher.detach(), of_teacher.argmax(-1)
        head = whole_head(parts[1], parts[2], form)
        loss = Divergence(beta, hidden=states)
        if not is_whole:
            found = top_tokens(states, head)
            ids = of_teacher.topk(K).indices if dtype == torch.float32 else found[:, :K].long()
            assert dtype != torch.float32 or torch.equal(found[:, :K].long(), ids)
            student = grouped(student, ids)
            of_teacher = grouped(of_teacher, ids)
            best = ids[:, 0]
            torch.testing.assert_close(
                found[:, K:].double(), of_teacher, rtol=tolerance, atol=10 * tolerance
            )
            loss = Divergence(beta, ids=ids, logps=of_teacher.float())
        agree = whole_logits(exact, form).argmax(-1) == best
        expected = divergence(student, of_teacher, beta) * (targets != -100)
        (64 * expected.sum()).backward()
        losses, agreement = chunked_loss(parts[0], head, targets, loss, SEVEN_TOKENS)
        (64 * losses.sum()).backward()
        torch.testing.assert_close(
            losses.double(), expected.detach(), rtol=tolerance, atol=tolerance
        )
        if dtype == torch.float32:
            assert torch.equal(agreement.bool(), agree & (targets != -100))
        with torch.no_grad():
            assert torch.equal(chunked_loss(parts[0], head, targets, loss, SEVEN_TOKENS)[0], losses)
        for part, reference in zip(parts, exact, strict=True):
            assert part.grad is not None and reference.grad is not None and part.grad.dtype == dtype
            assert (part.grad - reference.grad).norm() / reference.grad.norm() < tolerance


def test_a_teacher_that_the_student_equals_costs_nothing():
    hidden, weight, bias = (part.detach() for part in parts_of_a_head())
    head = whole_head(weight, bias)
    for beta, teacher in itertools.product([0.0, 0.5, 1.0], ["whole", "top tokens"]):
        of_teacher: dict[str, Any] = {"hidden": hidden}
        if teacher == "top tokens":
            found = top_tokens(hidden, head)
            of_teacher = {"ids": found[:, :K].long(), "logps": found[:, K:]}
        own = hidden.clone().requires_grad_()
        losses, agreement = chunked_loss(
            own, head, targets_of_tokens(), Divergence(beta, **of_teacher)
        )
        losses.sum().backward()
        assert own.grad is not None and own.grad.abs().max() < 1e-5 and losses.abs().max() < 1e-5
        assert agreement.sum() == TOKENS - 2


def test_a_teacher_beside_makes_no_tensor_larger_than_a_chunk():
    tokens = 16
    size = 2 * tokens * VOCABULARY * 4
    hidden, weight, bias = (part.detach() for part in parts_of_a_head())
    head = whole_head(weight, bias)
    found = top_tokens(teacher_states(), head)
    losses = (
        Divergence(0.5, hidden=teacher_states()),
        Divergence(0.5, ids=found[:, :K].long(), logps=found[:, K:]),
    )
    for loss in losses:
        with NewTensors() as made:
            chunked_loss(hidden.requires_grad_(), head, targets_of_tokens(), loss, size)
        chunks = [elements for elements in made.elements if elements > tokens * VOCABULARY // 4]
        assert max(chunks) <= 2 * tokens * VOCABULARY < TOKENS * VOCABULARY


@pytest.mark.parametrize("name", ["sum", "of each token", "divergence"])
def test_new_tokens_of_an_unshared_head_train_with_every_loss(name, models):
    model: Any = AutoModelForCausalLM.from_pretrained(
        models("llama", tie_word_embeddings=False), dtype=torch.float32
    ).requires_grad_(False)
    head = model.get_output_embeddings()
    new = [3, 250]
    rows = TokenRows(NewTokens(tuple(new)), head.weight[new] + 0.5)
    head.add_module("token_adapter", rows)
    input_ids = torch.arange(1, 9)[None]
    places = torch.arange(7)
    targets = input_ids[0, 1:]
    teacher = torch.randn(7, 320, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    ids = teacher.topk(K).indices
    losses: dict[str, TokenLoss] = {
        "sum": CrossEntropy(),
        "of each token": CrossEntropy(by_token=True),
        "divergence": Divergence(0.0, ids=ids, logps=grouped(teacher, ids)),
    }
    found = attach_head_loss(model, LogitForm())(
        {"input_ids": input_ids}, places, targets, losses[name]
    )
    (found[0] if found.dim() else found).sum().backward()

    weight = head.weight.detach().clone()
    weight[new] = rows.trainable_tokens_delta.detach()
    weight.requires_grad_()
    student = F.linear(model.base_model(input_ids)[0][0, :7], weight).log_softmax(-1)
    if name == "divergence":
        expected = divergence(grouped(student, ids), grouped(teacher, ids), 0.0).sum()
    else:
        expected = -student.gather(1, targets[:, None]).sum()
    expected.backward()
    gradient = rows.trainable_tokens_delta.grad
    assert gradient is not None and weight.grad is not None
    torch.testing.assert_close(gradient, weight.grad[new], rtol=1e-4, atol=1e-6)
