"""Head and loss in one function over chunks of tokens.

So neither logits nor their gradient ever exist whole: for 8,192 tokens and a vocabulary of 150,000
the logits alone would take 4.6 GiB in float32. For models that this does not fit,
training/whole_logits.py takes the loss of the model's own logits.

Suffixes of tensors: training/token_loss.py and, besides them, one letter for each dim:

    E  new tokens whose rows of the head are trained
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_qlora.training.token_loss import Head, TokenLoss

# For a chunk's logits in the compute dtype and in float32: 384 tokens of a vocabulary of 150,000 in
# 16 bits, enough for matrix products at full speed.
MAX_CHUNK_BYTES = 384 * 2**20
# Rows of a tile of GPU matrix products: a chunk of 129 tokens would cost nearly as much as one of
# 256.
_WHOLE_TILE = 128
# A probability of fp16's smallest number, 6e-8, would be lost in a vocabulary of 150,000. The
# gradient of the head's outputs is scaled by this while it is in fp16; gradients of up to 64 times
# the head's largest weight fit then.
_FP16_SCALE = 2.0**10


def tokens_at_a_time(
    vocabulary: int, dtype: torch.dtype, chunk_bytes: int = MAX_CHUNK_BYTES
) -> int:
    """The number of tokens whose logits are there at once: a chunk."""
    tokens = max(1, chunk_bytes // (vocabulary * _bytes_per_logit(dtype)))
    return tokens - tokens % _WHOLE_TILE if tokens > _WHOLE_TILE else tokens


def logits_bytes(
    num_tokens: int, vocabulary: int, dtype: torch.dtype, chunk_bytes: int = MAX_CHUNK_BYTES
) -> int:
    """The maximum bytes that logits take at a time, computed in `dtype` for `num_tokens` tokens."""
    tokens = min(num_tokens, tokens_at_a_time(vocabulary, dtype, chunk_bytes))
    return tokens * vocabulary * _bytes_per_logit(dtype)


def _bytes_per_logit(dtype: torch.dtype) -> int:
    # 16-bit outputs stay beside their float32 copy, and take the gradient.
    return 4 if dtype == torch.float32 else 4 + dtype.itemsize


def chunked_loss(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    loss: TokenLoss,
    chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Tensor:
    """The values of the tokens, float32 [R, N], or the sum of the only one, [].

    chunk_bytes: for the logits of a chunk.

    Differentiable once, in hidden, weight and bias, by the first value. A trained 16-bit weight's
    gradient is rounded to 16 bits after each chunk, as where micro-batches add up. It is the
    gradient of the sum over the tokens: weight and new rows take one factor for all tokens.

    Where ranks share the head, which is frozen then, every rank calls this for its own tokens. Its
    rows of new tokens, which the weight has too, get gradients.
    """
    kind = hidden_NH.device.type
    weight_VH = head.weight_VH
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VH.dtype
    rows = head.vocabulary.new_rows
    rows_EH = rows.trainable_tokens_delta if rows else None
    # The number of tokens of a chunk, whose logits may be of several heads.
    step = tokens_at_a_time(loss.num_logits * head.vocabulary.vocabulary, dtype, chunk_bytes)
    with torch.autocast(kind, enabled=False):
        hidden_NH = hidden_NH.to(dtype)
        trained = (hidden_NH, weight_VH, head.bias_V, rows_EH)
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in trained
        ):
            values_RN: Tensor = _ChunkedLoss.apply(*trained, (head, targets_N, loss, step))
        else:
            values_RN = _values_of_chunks(hidden_NH, head, targets_N, loss, step, _Gradients())
    if not loss.is_summed:
        return values_RN
    chunks = values_RN[0].split(step)
    return torch.stack([chunk.sum() for chunk in chunks]).sum()


class _Gradients(NamedTuple):
    """Gradients of the loss times `scale`, to be filled; None where none is wanted."""

    hidden_NH: Tensor | None = None
    weight_VH: Tensor | None = None
    bias_V: Tensor | None = None
    rows_EH: Tensor | None = None
    scale: float = 1.0

    @property
    def are_wanted(self) -> bool:
        return any(gradient is not None for gradient in self[:4])

    def add(self, part: slice, grad_CV: Tensor, hidden_CH: Tensor, head: Head) -> None:
        """Add what follows from the gradient of a chunk's outputs.

        part: the chunk's tokens among N.
        """
        vocabulary = head.vocabulary
        if self.hidden_NH is not None:
            vocabulary.reduce_scatter_grad(grad_CV, head.weight_VH, self.hidden_NH[part])
        if self.weight_VH is not None:
            if self.weight_VH.dtype == grad_CV.dtype:
                # In place: the product alone would be as large as the head.
                self.weight_VH.addmm_(grad_CV.T, hidden_CH)
            else:
                self.weight_VH.add_(grad_CV.T @ hidden_CH)
        if self.rows_EH is not None and vocabulary.new_rows:
            # The new tokens whose rows are on this rank, and their columns of its part of V.
            own = vocabulary.new_rows.among(vocabulary.first, grad_CV.shape[1])
            columns = vocabulary.new_rows.indices[own] - vocabulary.first
            self.rows_EH[own].add_(grad_CV[:, columns].T @ hidden_CH)
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(dim=0, dtype=torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    """The values of each token. A head that trains has the gradient of the first one's sum.

    The gradients are computed with the loss: chunks of logits would have to be computed again in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        rows_EH: Tensor | None,
        head_and_loss: tuple[Head, Tensor, TokenLoss, int],
    ) -> Tensor:
        of_hidden, of_weight, of_bias, of_rows = ctx.needs_input_grad[:4]
        ctx.gradients = _Gradients(
            torch.empty_like(hidden_NH) if of_hidden else None,
            torch.zeros_like(weight_VH) if of_weight else None,
            torch.zeros_like(bias_V) if of_bias and bias_V is not None else None,
            torch.zeros_like(rows_EH) if of_rows and rows_EH is not None else None,
            _FP16_SCALE if hidden_NH.dtype == torch.float16 else 1.0,
        )
        return _values_of_chunks(hidden_NH, *head_and_loss, ctx.gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        # The loss may outlive this pass and keep `ctx`, and with it the gradients, in memory. They
        # are changed in place and returned below, so nothing here needs them again.
        ctx.gradients = None
        # Of all values the first one alone has a gradient.
        grads_N = grads[0][0] / gradients.scale
        # Each token's gradient by its hidden state has a row of its own. Those by weight, bias and
        # new rows are summed over the tokens already, so they can only take one factor for all.
        factors = (grads_N[:, None], *[grads_N[0]] * 3)
        results: list[Tensor | None] = []
        for gradient, factor in zip(gradients[:4], factors, strict=True):
            results.append(None if gradient is None else gradient.mul_(factor))
        return *results, None


def _values_of_chunks(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    loss: TokenLoss,
    step: int,
    gradients: _Gradients,
) -> Tensor:
    """The values of the tokens, [R, N]; fills in the gradients of the first one's sum.

    step: the number of tokens of a chunk.
    """
    head = head.to(hidden_NH.dtype)
    vocabulary = head.vocabulary
    scale = gradients.scale if gradients.are_wanted else None
    values = []
    # Each chunk has collectives, so ranks that share a head must have equally many of them:
    # `MicroBatch.beside` adds targets that count nothing.
    for start in range(0, len(hidden_NH), step):
        part = slice(start, start + step)
        hidden_CH = vocabulary.all_gather(hidden_NH[part])
        targets_C = vocabulary.all_gather(targets_N[part])
        loss_of_part = loss.of_part(part, vocabulary)
        values_RC, grad_CV = loss_of_part.of_chunk(hidden_CH, targets_C, head, scale)
        values.append(values_RC)
        if grad_CV is not None:
            gradients.add(part, grad_CV, hidden_CH, head)
        # Names would keep this chunk's memory while the next chunk's is allocated.
        del hidden_CH, loss_of_part, grad_CV
    return torch.cat(values, dim=1)
