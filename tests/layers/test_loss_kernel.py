"""Loss and gradient in one kernel are as near to float64 as by torch's operators."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_qlora.model.kernels import token_loss
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, Ways, using_ways
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.token_loss import LogitForm, whole_head
from tests.layers.shards import relative_error

pytestmark = pytest.mark.quick

TOKENS = 24
SCALE = 64.0
# The second one is more than a program reads at a time, and ends inside of a block.
VOCABULARIES = (300, token_loss.BLOCK + 905)
FORMS = (LogitForm(), LogitForm(scale=1.3, temperature=0.7))
Errors = list[float]


@contextlib.contextmanager
def counted_calls() -> Iterator[list[Any]]:
    """Notes the arguments with which the kernel is called."""
    calls: list[Any] = []
    by_triton = token_loss.WAYS[TRITON]

    def noted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return by_triton(*args)

    token_loss.WAYS[TRITON] = noted
    yield calls
    token_loss.WAYS[TRITON] = by_triton


def errors(
    vocabulary: int, form: LogitForm, dtype: torch.dtype, by_probability: bool
) -> tuple[Errors, Errors, float, bool]:
    """Relative errors of losses and gradients by both ways, the part of the gradients that differ,
    and whether only the second way used the kernel.
    """
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, 32).to(dtype)
    weight = torch.randn(vocabulary, 32).mul(1.5).to(dtype)
    targets = torch.randint(vocabulary, (TOKENS,))
    targets[3] = -100
    targets[-1] = vocabulary - 1
    hidden[5] = 2 * weight[targets[5]]  # a target whose probability is almost 1
    weights = torch.rand(TOKENS) + 0.1
    head = whole_head(weight, form=form)
    exact = F.linear(hidden, weight).double().requires_grad_()
    logits = exact * form.scale / form.temperature
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none") * weights
    if by_probability:
        probabilities = logits.softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        losses = losses * probabilities.detach()
    (grad,) = torch.autograd.grad(losses.sum() * SCALE, exact)
    results = []
    counts = []
    for way in (PLAIN, TRITON):
        with using_ways(Ways(loss=way)), counted_calls() as calls:
            loss = CrossEntropy(weights, by_probability=by_probability)
            values, found = loss.of_chunk(hidden, targets, head, SCALE)
            again, none = loss.of_chunk(hidden, targets, head, None)
        assert none is None and found is not None and found.dtype == dtype
        assert torch.equal(again, values) and not found[3].any()
        results.append((values[0], found))
        counts.append(len(calls))
    of_losses = [relative_error(values, losses.detach()) for values, _ in results]
    of_grads = [relative_error(found, grad) for _, found in results]
    plain, fused = (found for _, found in results)
    is_used = counts == [0, 3 if by_probability else 2]
    return of_losses, of_grads, (plain != fused).double().mean().item(), is_used


@pytest.mark.parametrize("by_probability", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_chunk_is_as_near_to_float64(form, vocabulary, dtype, by_probability, interpreted):
    of_losses, of_grads, differing, is_used = interpreted(
        errors, vocabulary, form, dtype, by_probability
    )
    assert is_used and differing < 1e-3
    assert of_grads[1] <= 1.1 * of_grads[0]
    if by_probability:
        # The probability is exp of a rounded loss.
        assert of_losses[1] < 1e-5
    else:
        assert of_losses[1] <= 1.1 * of_losses[0] and of_losses[1] < 1e-6


def test_other_chunks_are_left_to_torch(interpreted):
    for dtype, form in ((torch.float32, FORMS[0]), (torch.bfloat16, LogitForm(cap=5.0))):
        calls = interpreted(kernel_calls, form, dtype)
        assert calls == 0


def kernel_calls(form: LogitForm, dtype: torch.dtype) -> int:
    head = whole_head(torch.randn(9, 4).to(dtype), form=form)
    with using_ways(Ways(loss=TRITON)), counted_calls() as calls:
        CrossEntropy().of_chunk(torch.randn(3, 4).to(dtype), torch.arange(3), head, 1.0)
    return len(calls)
