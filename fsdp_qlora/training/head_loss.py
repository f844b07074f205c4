"""Head and loss in one function over chunks of tokens.

So neither logits nor their gradient ever exist whole: for 8,192 tokens and a vocabulary of 150,000
the logits alone would take 4.6 GiB in float32. For models that this does not fit,
training/whole_logits.py takes the loss of the model's own logits.

Suffixes of tensors, one letter for each dim:

    N  tokens with a target on this rank
    C  tokens of a chunk; where ranks share a head, the chunks of all of them, one after another
    H  hidden size
    V  vocabulary; where ranks share a head, the rows of it that this rank has
    E  new tokens whose rows of the head are trained

targets_N is int64. Where ranks share a head, N is the same on all of them.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.training import divergence
from fsdp_qlora.training.divergence import Likeliest, Teacher, Vocabulary, WholeVocabulary

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

# The entropy of a chunk's tokens takes this part of its logits' memory once more.
_ENTROPY_PARTS = 16

# Weights of the tokens, float32 [N], give the sum by these.
Reduction = Literal["sum", "none", "entropy"] | Tensor | Teacher | Likeliest


class LogitForm(NamedTuple):
    """The way from a head's outputs to a model's logits.

    scale * output, and with a cap, cap * tanh(scale * output / cap); then divided by the
    temperature. The scale is granite's and cohere's, the cap gemma2's.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32; may be `outputs` itself, changed."""
        # float() copies 16-bit outputs. The other operations are in place, since a copy would be as
        # large as the chunk.
        logits = outputs.float()
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of logits by outputs."""
        scale = self.scale / self.temperature
        if self.cap is None:
            return scale
        # tanh' = 1 - tanh^2, and the logits are cap * tanh: the outputs are not needed again.
        cap = self.cap / self.temperature
        return torch.square(logits / cap).neg_().add_(1.0).mul_(scale)


def tokens_at_a_time(vocabulary: int, dtype: torch.dtype) -> int:
    """The number of tokens whose logits are there at once: a chunk."""
    tokens = max(1, MAX_CHUNK_BYTES // (vocabulary * _bytes_per_logit(dtype)))
    return tokens - tokens % _WHOLE_TILE if tokens > _WHOLE_TILE else tokens


def logits_bytes(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """The most bytes that logits take at a time, computed in `dtype` for `num_tokens` tokens."""
    tokens = min(num_tokens, tokens_at_a_time(vocabulary, dtype))
    return tokens * vocabulary * _bytes_per_logit(dtype)


def _bytes_per_logit(dtype: torch.dtype) -> int:
    # 16-bit outputs stay beside their float32 copy, and take the gradient.
    return 4 if dtype == torch.float32 else 4 + dtype.itemsize


def chunked_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    form: LogitForm,
    shared: Vocabulary | None = None,
    *,
    reduction: Reduction = "sum",
) -> Tensor:
    """Sum over the tokens of -log p(target), in nats, float32; a target of -100 counts nothing.

    Differentiable once, in hidden, weight and bias. A trained 16-bit weight's gradient is rounded
    to 16 bits after each chunk, as where micro-batches add up.

    Args:
        shared: the head is frozen, and `weight_VH` the rank's rows of it. Every rank calls this for
            its own tokens. Its rows of new tokens, which the weight has too, get gradients.
        reduction: "none" gives each token's, [N], instead of the sum. "entropy" gives those and,
            without gradient, the entropies of the whole distributions, [2, N]; a teacher the
            divergence from it and, without gradient, the agreement with it, [2, N]. A head that
            trains has the gradient of the sum alone.
    """
    vocabulary = shared or WholeVocabulary(len(weight_VH))
    teacher = reduction if isinstance(reduction, Teacher) else None
    weights = reduction if isinstance(reduction, Tensor) else None
    measured = None if weights is not None or reduction in ("sum", "none") else list[Tensor]()
    request = _Request(form, vocabulary, measured, teacher, weights)
    kind = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VH.dtype
    new_rows = vocabulary.new_rows.trainable_tokens_delta if vocabulary.new_rows else None
    with torch.autocast(kind, enabled=False):
        hidden_NH = hidden_NH.to(dtype)
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad
            for tensor in (hidden_NH, weight_VH, bias_V, new_rows)
        ):
            losses_N: Tensor = _ChunkedLoss.apply(
                hidden_NH, weight_VH, bias_V, new_rows, (targets_N, request)
            )
        else:
            losses_N = _losses_of_chunks(
                hidden_NH, weight_VH, bias_V, targets_N, request, _Gradients()
            )
    if weights is None and reduction != "sum":
        assert reduction != "entropy" or not weight_VH.requires_grad, (
            "a head that trains has the gradient of the sum"
        )
        if request.measured is None:
            return losses_N
        return torch.stack([losses_N, torch.cat(request.measured)])
    chunks = losses_N.split(tokens_at_a_time(vocabulary.vocabulary, dtype))
    return torch.stack([chunk.sum() for chunk in chunks]).sum()


class _Request(NamedTuple):
    """The losses that are to be computed.

    weights: of the tokens. measured: if a list, it gets the entropies of chunks' tokens, or
    agreements with a teacher.
    """

    form: LogitForm
    vocabulary: Vocabulary
    measured: list[Tensor] | None
    teacher: Teacher | None
    weights: Tensor | None = None

    def tokens_at_a_time(self, dtype: torch.dtype) -> int:
        """The number of tokens of a chunk, with the memory that a teacher needs."""
        vocabulary = self.vocabulary.vocabulary
        if self.teacher is not None and self.teacher.hidden is not None:
            # A teacher's hidden states become logits too, and twice as many numbers compare both.
            vocabulary *= 4
        return tokens_at_a_time(vocabulary, dtype)


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

    def add(
        self,
        part: slice,
        grad_CV: Tensor,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        vocabulary: Vocabulary,
    ) -> None:
        """Add what follows from the gradient of a chunk's outputs.

        part: the chunk's tokens among N.
        """
        if self.hidden_NH is not None:
            vocabulary.reduce_scatter_grad(grad_CV, weight_VH, self.hidden_NH[part])
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
    """The loss of each token. A head that trains has the gradient of their sum.

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
        targets_and_request: tuple[Tensor, _Request],
    ) -> Tensor:
        of_hidden, of_weight, of_bias, of_rows = ctx.needs_input_grad[:4]
        ctx.gradients = _Gradients(
            torch.empty_like(hidden_NH) if of_hidden else None,
            torch.zeros_like(weight_VH) if of_weight else None,
            torch.zeros_like(bias_V) if of_bias and bias_V is not None else None,
            torch.zeros_like(rows_EH) if of_rows and rows_EH is not None else None,
            _FP16_SCALE if hidden_NH.dtype == torch.float16 else 1.0,
        )
        return _losses_of_chunks(hidden_NH, weight_VH, bias_V, *targets_and_request, ctx.gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        # The loss may outlive this pass and keep `ctx`, and with it the gradients, in memory. They
        # are changed in place and returned below, so nothing here needs them again.
        ctx.gradients = None
        grads_N = grads[0] / gradients.scale
        # Each token's gradient by its hidden state has a row of its own. Those by weight, bias and
        # new rows are summed over the tokens already, so they can only take one factor for all.
        factors = (grads_N[:, None], *[grads_N[0]] * 3)
        results: list[Tensor | None] = []
        for gradient, factor in zip(gradients[:4], factors, strict=True):
            results.append(None if gradient is None else gradient.mul_(factor))
        return *results, None


def _losses_of_chunks(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    request: _Request,
    gradients: _Gradients,
) -> Tensor:
    """The losses of the tokens, [N]; fills in the gradients of their sum."""
    vocabulary = request.vocabulary
    dtype = hidden_NH.dtype
    weight_VH = weight_VH.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    losses = []
    step = request.tokens_at_a_time(dtype)
    scale = gradients.scale if gradients.are_wanted else None
    # Each chunk has collectives, so ranks that share a head must have equally many of them:
    # `MicroBatch.beside` adds targets that count nothing.
    for start in range(0, len(hidden_NH), step):
        part = slice(start, start + step)
        hidden_CH = vocabulary.all_gather(hidden_NH[part])
        outputs_CV = F.linear(hidden_CH, weight_VH, bias_V)
        targets_C = vocabulary.all_gather(targets_N[part])
        if request.teacher is None:
            weights = request.weights
            weights_C = None if weights is None else vocabulary.all_gather(weights[part])
            loss, grad_CV = _loss_of_chunk(
                outputs_CV, targets_C, scale, request._replace(weights=weights_C)
            )
        else:
            teacher = request.teacher.part(part, vocabulary)
            teacher_CV = None
            if teacher.hidden is not None:
                teacher_CV = F.linear(teacher.hidden.to(dtype), weight_VH, bias_V)
            loss, grad_CV = _divergence_of_chunk(
                outputs_CV, teacher_CV, targets_C, scale, request._replace(teacher=teacher)
            )
            del teacher_CV
        losses.append(loss)
        if grad_CV is not None:
            gradients.add(part, grad_CV, hidden_CH, weight_VH, vocabulary)
        # Names would keep this chunk's memory while the next chunk's is allocated.
        del hidden_CH, outputs_CV, grad_CV
    return torch.cat(losses)


def _loss_of_chunk(
    outputs_CV: Tensor, targets_C: Tensor, scale: float | None, request: _Request
) -> tuple[Tensor, Tensor | None]:
    """The tokens' losses and, with a scale, the gradient of their sum times it.

    Everything is in place: softmax in torch would need two more tensors of this size. The gradient
    has the outputs' dtype and memory. With a shared head, the outputs cover this rank's part of the
    vocabulary for all ranks' tokens; the losses are for this rank's tokens.
    """
    form, vocabulary, entropies, _, weights_C = request
    is_learned = targets_C != -100
    rows = torch.arange(len(targets_C), device=targets_C.device)
    # A target's logit is on the rank that has its row: others read any column, and do not use it.
    columns = targets_C - vocabulary.first
    is_here = is_learned & (columns >= 0) & (columns < outputs_CV.shape[1])
    columns = columns.clamp(0, outputs_CV.shape[1] - 1)
    logits_CV = form.logits(outputs_CV)
    slope = form.slope(logits_CV) if scale is not None else 1.0
    slope_of_target = slope[rows, columns] if isinstance(slope, Tensor) else slope
    # exp(logit - top) cannot overflow. All ranks take the same top, so that their sums can be added
    # up.
    top = vocabulary.largest(logits_CV.amax(dim=1, keepdim=True))
    # Taken before exp_, which overwrites the logits.
    of_target = torch.where(is_here, logits_CV[rows, columns] - top[:, 0], 0.0)
    exponentials_CV = logits_CV.sub_(top).exp_()
    sums = [exponentials_CV.sum(dim=1), of_target]
    if entropies is not None:
        # The entropy of e / Z is log Z - sum(e log e) / Z, without log-probabilities, which are as
        # large as the logits.
        parts = exponentials_CV.split(-(-len(exponentials_CV) // _ENTROPY_PARTS))
        weighted_parts = [torch.special.xlogy(part, part).sum(dim=1) for part in parts]
        sums.append(torch.cat(weighted_parts))
    # One all-reduce for all sums: some KiB, of which the latency is the cost.
    total, of_target, *weighted = vocabulary.summed(torch.stack(sums))
    if entropies is not None:
        entropies.append(vocabulary.local_chunk(total.log() - weighted[0] / total))
    share = is_learned if weights_C is None else is_learned * weights_C
    loss = vocabulary.local_chunk(torch.where(is_learned, total.log() - of_target, 0.0) * share)
    if scale is None:
        return loss, None
    factor = share * scale
    # The gradient is softmax, and softmax - 1 at the target: in 16 bits that would be 0 where
    # softmax is almost 1.
    grad_of_target = (of_target.exp() / total - 1.0) * factor * slope_of_target
    if isinstance(slope, Tensor):
        exponentials_CV = exponentials_CV.mul_(slope)
        slope = 1.0
    # Rounded to the outputs' dtype as it is written. In float32 both are the same memory, which an
    # elementwise product allows.
    grad_CV = torch.mul(exponentials_CV, (factor * slope / total)[:, None], out=outputs_CV)
    grad_CV[rows, columns] = torch.where(
        is_here, grad_of_target.to(grad_CV.dtype), grad_CV[rows, columns]
    )
    return loss, grad_CV


def _divergence_of_chunk(
    outputs_CV: Tensor,
    teacher_CV: Tensor | None,
    targets_C: Tensor,
    scale: float | None,
    request: _Request,
) -> tuple[Tensor, Tensor | None]:
    """The tokens' divergences from the teacher, with what `_loss_of_chunk` returns.

    teacher_CV: the head's outputs for the teacher's hidden states, if it has these.
    """
    form, vocabulary, measured, teacher, _ = request
    assert teacher is not None and measured is not None
    is_learned = targets_C != -100
    logits_CV = form.logits(outputs_CV)
    # Taken first: the divergence overwrites the logits.
    slope = form.slope(logits_CV) if scale is not None else 1.0
    if teacher_CV is not None:
        losses_C, agreement_C, grad_CV = divergence.from_distribution(
            logits_CV, form.logits(teacher_CV), teacher.beta, vocabulary
        )
    else:
        assert teacher.ids is not None and teacher.logps is not None
        # A token without a target has no teacher: any ids will do, each once.
        any_ids = torch.arange(teacher.ids.shape[1], device=outputs_CV.device)
        ids = torch.where(is_learned[:, None], teacher.ids, any_ids)
        losses_C, agreement_C, grad_CV = divergence.from_likeliest(
            logits_CV, ids, teacher.logps, teacher.beta, vocabulary
        )
    measured.append(vocabulary.local_chunk(agreement_C * is_learned))
    loss = vocabulary.local_chunk(torch.where(is_learned, losses_C, 0.0))
    if scale is None:
        return loss, None
    factor_C1 = (is_learned * scale)[:, None]
    return loss, torch.mul(grad_CV.mul_(slope), factor_C1, out=outputs_CV)


@torch.no_grad()
def likeliest_tokens(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    form: LogitForm,
    request: Likeliest,
    vocabulary: Vocabulary,
) -> Tensor:
    """The likeliest tokens of each of N, float32 [2 * k + 1, N], as `divergence.likeliest`."""
    dtype = weight_VH.dtype
    parts = []
    for chunk in hidden_NH.to(dtype).split(tokens_at_a_time(vocabulary.vocabulary, dtype)):
        # The logits have no name, which would keep them while the next chunk's are made.
        likeliest = divergence.likeliest(
            form.logits(F.linear(vocabulary.all_gather(chunk), weight_VH, bias_V)),
            request,
            vocabulary,
        )
        parts.append(vocabulary.local_chunk(likeliest))
    return torch.cat(parts).T
