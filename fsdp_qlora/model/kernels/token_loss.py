"""Cross entropy of tokens and its gradient by the logits, in two readings and one writing of them.

The sum over the vocabulary has another order than torch's, so that losses and gradients may differ
from those of torch's operators in their last bit. Both are as near to float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON, ways_in_use
from fsdp_qlora.model.kernels.rounding import jit, rounded_to, runs_by_triton, tl

_NO_TARGET = -100


class LogitScale(NamedTuple):
    """Logits are scale * output / temperature."""

    scale: float = 1.0
    temperature: float = 1.0


def has_kernel(outputs: torch.Tensor) -> bool:
    """Whether this run computes `losses_and_gradient_` of such outputs without a float32 copy.

    Only 16-bit outputs have one. In float32 the gradient would be less exact than torch's.
    """
    is_short = outputs.element_size() == 2
    return is_short and ways_in_use().loss != PLAIN and runs_by_triton(outputs)


def losses_and_gradient_(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    logit_scale: LogitScale,
) -> torch.Tensor:
    """The losses of tokens, float32 [C], and their gradient in the memory of outputs [C, V].

    Args:
        outputs: of the head, contiguous.
        targets: int64 [C]; -100 for a token without a target, whose loss and gradient are 0.
        factors: float32 [C], which multiply the gradients; without them outputs stay as they are.
    """
    way = ways_in_use().loss if has_kernel(outputs) else PLAIN
    return WAYS[way](outputs, targets, factors, logit_scale)


# --- by torch ---


def _by_torch(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    logit_scale: LogitScale,
) -> torch.Tensor:
    logits = outputs.float() * logit_scale.scale / logit_scale.temperature
    is_learned = targets != _NO_TARGET
    columns = torch.where(is_learned, targets, 0)[:, None]
    logps = logits.log_softmax(dim=1)
    losses = torch.where(is_learned, -logps.gather(1, columns)[:, 0], 0.0)
    if factors is not None:
        softmax = logps.exp_()
        softmax.scatter_add_(1, columns, -torch.ones_like(columns, dtype=torch.float32))
        slopes = factors * is_learned * (logit_scale.scale / logit_scale.temperature)
        outputs.copy_(softmax.mul_(slopes[:, None]))
    return losses


# --- by Triton ---

# Columns that a program reads at a time. A thread has 16 of them, which are two accesses of 128
# bits in 16 bits.
BLOCK = 4096
OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": True}


def _by_triton(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    factors: torch.Tensor | None,
    logit_scale: LogitScale,
) -> torch.Tensor:
    num_tokens, vocabulary = outputs.shape
    losses = torch.empty(num_tokens, dtype=torch.float32, device=outputs.device)
    if num_tokens:
        loss_kernel[(num_tokens,)](
            outputs,
            targets,
            losses,
            factors,
            vocabulary,
            *logit_scale,
            GRADIENT=factors is not None,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return losses


@jit
def loss_kernel(
    outputs,
    targets,
    losses,
    factors,
    vocabulary,
    scale,
    temperature,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token: first the largest logit and the sum of exponentials, then the gradient."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    row = outputs + token * vocabulary
    dtype: tl.constexpr = outputs.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    # Finite, so that columns of -inf alone are not subtracted from -inf.
    top = -3.0e38
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        x = tl.load(row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        x = x * scale / temperature
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    is_learned = target != -100
    of_target = tl.load(row + tl.where(is_learned, target, 0)).to(tl.float32)
    of_target = of_target * scale / temperature - top
    tl.store(losses + token, tl.where(is_learned, tl.log(total) - of_target, 0.0))
    if GRADIENT:
        factor = tl.load(factors + token) * (scale / temperature)
        factor = tl.where(is_learned, factor, 0.0)
        # Not softmax - 1 of rounded numbers, which would be 0 where softmax is almost 1.
        grad_of_target = (tl.exp(of_target) / total - 1.0) * factor
        share = factor / total
        # The target's logit has been read by all threads before one overwrites it.
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            x = tl.load(row + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            grad = tl.exp(x * scale / temperature - top) * share
            grad = tl.where(start + columns == target, grad_of_target, grad)
            tl.store(row + start + columns, rounded_to(grad, dtype), mask=inside)


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, LogitScale], torch.Tensor]
WAYS: dict[str, Way] = {PLAIN: _by_torch, TRITON: _by_triton}
