"""Head and loss in one function over chunks of tokens, so that neither logits nor their gradient
ever exist whole.

For models that it does not fit, `loss_of_logits` takes the loss of the model's own logits.

Shapes: N tokens with a target, hidden size H, vocabulary V: hidden [N, H], weight [V, H], bias [V],
targets int64 [N]. Where ranks share a head, each has some rows of the weight, and N is the same on
all of them.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fsdp_qlora.sharding.vocabulary import shared_head_of
from fsdp_qlora.training import divergence
from fsdp_qlora.training.divergence import Likeliest, Teacher, Vocabulary, WholeVocabulary
from fsdp_qlora.utils.errors import UserError

# For a chunk's logits in the compute dtype and in float32: 384 tokens of a vocabulary of 150,000 in
# 16 bits, enough for matrix products at full speed.
MAX_CHUNK_BYTES = 384 * 2**20
# Logits are upcast to float32 and turned into probabilities in pieces of this many elements (256
# MiB).
MAX_LOGITS = 2**26
_WHOLE_TILE = 128  # rows of a tile of GPU matrix products
# A probability of fp16's smallest number, 6e-8, would be lost in a vocabulary of 150,000. The
# gradient of the head's outputs is scaled by this while it is in fp16; gradients of up to 64 times
# the head's largest weight fit then.
_FP16_SCALE = 2.0**10

# The entropy of a chunk's tokens takes this part of its logits' memory once more.
_ENTROPY_PARTS = 16

# ({argument of the base model: value}, rows [N], targets [N]) -> loss. Rows count through all
# tokens of the batch. With reduction="none" the loss of each token instead of the sum: [1, N], or
# [2, N] with the reference's (sharding/recompute.py); "entropy" puts another row behind the first,
# the entropy of the policy, without gradient. With a Teacher, whose hidden states may follow the
# student's, the rows are the divergence from it, the agreement with it, without gradient, and the
# loss if that is wanted. With Likeliest it gives these tokens, [2 * k + 1, N].
HeadLoss = Callable[..., Tensor]
# Weights of the tokens, float32 [N], give the sum by these.
Reduction = Literal["sum", "none", "entropy"] | Tensor | Teacher | Likeliest


class LogitForm(NamedTuple):
    """How a model makes logits of its head's outputs: scale * output, and with a cap, cap *
    tanh(scale * output / cap).

    The scale is granite's and cohere's, the cap gemma2's. They are divided by the temperature.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32; may be `outputs` itself, changed."""
        logits = outputs.float()
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        logits = logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of logits by outputs."""
        scale = self.scale / self.temperature
        cap = None if self.cap is None else self.cap / self.temperature
        return scale if cap is None else torch.square(logits / cap).neg_().add_(1.0).mul_(scale)


def tokens_at_a_time(vocabulary: int, dtype: torch.dtype) -> int:
    """How many tokens' logits there are at once."""
    tokens = max(1, MAX_CHUNK_BYTES // (vocabulary * _bytes_per_logit(dtype)))
    return tokens - tokens % _WHOLE_TILE if tokens > _WHOLE_TILE else tokens


def logits_bytes(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Bytes of the logits that are there at a time for so many tokens, computed in `dtype`."""
    return (
        min(num_tokens, tokens_at_a_time(vocabulary, dtype)) * vocabulary * _bytes_per_logit(dtype)
    )


def _bytes_per_logit(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.float32 else 4 + dtype.itemsize


def attach_head_loss(model: PreTrainedModel, form: LogitForm) -> HeadLoss:
    """Let a sharded model's base and head compute a loss together, as `probe_head_loss` has tried.

    FSDP2 gathers weights around `forward`, and around methods that are registered with it.
    """
    head = model.get_output_embeddings()
    shared = shared_head_of(model)

    def loss_of_hidden(
        self: nn.Module, hidden: Tensor, targets: Tensor, *, reduction: Reduction = "sum"
    ) -> Tensor:
        weight: Any = shared.rows() if shared else self.weight
        bias: Any = self.bias
        whole = WholeVocabulary(len(weight), getattr(self, "new_rows", None))
        if whole.new_rows and not shared:
            whole.new_rows.write_into(weight)
        if isinstance(reduction, Tensor) or reduction == "sum":
            return chunked_loss(
                hidden, weight, bias, targets, form, shared or whole, reduction=reduction
            )
        if isinstance(reduction, Likeliest):
            return likeliest_tokens(hidden, weight, bias, form, reduction, shared or whole)
        policy, *reference = hidden.split(len(targets))
        if isinstance(reduction, Teacher) and reference:
            reduction = reduction._replace(hidden=reference.pop().detach())
        losses = [chunked_loss(policy, weight, bias, targets, form, shared, reduction=reduction)]
        losses += [
            chunked_loss(x.detach(), weight, bias, targets, form, shared, reduction="none")
            for x in reference
        ]
        if isinstance(reduction, Teacher) and reduction.with_nll:
            plain = form._replace(temperature=1.0)
            losses.append(
                chunked_loss(policy, weight, bias, targets, plain, shared, reduction="none")
            )
        return torch.cat([part.view(-1, len(targets)) for part in losses])

    def loss_of_tokens(
        self: PreTrainedModel,
        inputs: Mapping[str, Any],
        rows: Tensor,
        targets: Tensor,
        *,
        reduction: Reduction = "sum",
    ) -> Tensor:
        hidden = self.base_model(**inputs, use_cache=False)[0]
        rows = _rows_of(rows, inputs, copies=len(hidden) // len(inputs["input_ids"]))
        loss: Tensor = head.loss_of_hidden(
            hidden.flatten(0, 1).index_select(0, rows), targets, reduction=reduction
        )
        return loss

    for module, method in ((head, loss_of_hidden), (model, loss_of_tokens)):
        setattr(module, method.__name__, MethodType(method, module))
        register_fsdp_forward_method(module, method.__name__)
    result: HeadLoss = model.loss_of_tokens
    return result


def free_head_before_backward(model: PreTrainedModel) -> None:
    """Free the gathered head once the loss is there: its gradients are computed by then."""
    head = model.get_output_embeddings()
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_unshard_in_backward(False)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: LogitForm,
    shared: Vocabulary | None = None,
    *,
    reduction: Reduction = "sum",
) -> Tensor:
    """Sum over the tokens of -log p(target), in nats, float32; a target of -100 counts nothing.

    Differentiable once, in hidden, weight and bias. A trained 16-bit weight's gradient is rounded
    to 16 bits after each chunk, as where micro-batches add up.

    Args:
        shared: the head is frozen, and `weight` the rank's rows of it. Every rank calls this for
            its own tokens. Its rows of new tokens, which `weight` has too, get gradients.
        reduction: "none" gives each token's, [N], instead of the sum. "entropy" gives those and,
            without gradient, the entropies of the whole distributions, [2, N]; a teacher the
            divergence from it and, without gradient, the agreement with it, [2, N]. A head that
            trains has the gradient of the sum alone.
    """
    vocabulary = shared or WholeVocabulary(len(weight))
    teacher = reduction if isinstance(reduction, Teacher) else None
    weights = reduction if isinstance(reduction, Tensor) else None
    measured = None if weights is not None or reduction in ("sum", "none") else list[Tensor]()
    request = _Request(form, vocabulary, measured, teacher, weights)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    rows = vocabulary.new_rows.trainable_tokens_delta if vocabulary.new_rows else None
    with torch.autocast(kind, enabled=False):
        hidden = hidden.to(dtype)
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (hidden, weight, bias, rows)
        ):
            losses: Tensor = _ChunkedLoss.apply(hidden, weight, bias, rows, (targets, request))
        else:
            losses = _losses_of_chunks(hidden, weight, bias, targets, request, _Gradients())
    if weights is None and reduction != "sum":
        assert reduction != "entropy" or not weight.requires_grad, (
            "a head that trains has the gradient of the sum"
        )
        return (
            losses
            if request.measured is None
            else torch.stack([losses, torch.cat(request.measured)])
        )
    chunks = losses.split(tokens_at_a_time(vocabulary.vocabulary, dtype))
    return torch.stack([chunk.sum() for chunk in chunks]).sum()


class _Request(NamedTuple):
    """How the losses of tokens are computed.

    weights: of the tokens. measured: if a list, it gets the entropies of chunks' tokens, or
    agreements with a teacher.
    """

    form: LogitForm
    vocabulary: Vocabulary
    measured: list[Tensor] | None
    teacher: Teacher | None
    weights: Tensor | None = None

    def tokens_at_a_time(self, dtype: torch.dtype) -> int:
        """As the function; a teacher's hidden states become logits too, and twice as many numbers
        compare both.
        """
        beside = self.teacher is not None and self.teacher.hidden is not None
        return tokens_at_a_time((1 + 3 * beside) * self.vocabulary.vocabulary, dtype)


class _Gradients(NamedTuple):
    """Gradients of the loss times `scale`, to be filled; None where none is wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    rows: Tensor | None = None
    scale: float = 1.0

    def add(
        self, part: slice, grad: Tensor, hidden: Tensor, weight: Tensor, vocabulary: Vocabulary
    ) -> None:
        """Add what follows from the gradient of a chunk's outputs, [rows, V]."""
        if self.hidden is not None:
            vocabulary.reduce_scatter_grad(grad, weight, self.hidden[part])
        if self.weight is not None:
            if self.weight.dtype == grad.dtype:
                self.weight.addmm_(grad.T, hidden)
            else:
                self.weight.add_(grad.T @ hidden)
        if self.rows is not None and vocabulary.new_rows:
            own = vocabulary.new_rows.among(vocabulary.first, grad.shape[1])
            outputs = grad[:, vocabulary.new_rows.indices[own] - vocabulary.first]
            self.rows[own].add_(outputs.T @ hidden)
        if self.bias is not None:
            self.bias.add_(grad.sum(dim=0, dtype=torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    """The loss of each token. A head that trains has the gradient of their sum.

    The gradients are computed with the loss: chunks of logits would have to be computed again in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        of: tuple[Tensor, _Request],
    ) -> Tensor:
        of_hidden, of_weight, of_bias, of_rows = ctx.needs_input_grad[:4]
        ctx.gradients = _Gradients(
            torch.empty_like(hidden) if of_hidden else None,
            torch.zeros_like(weight) if of_weight else None,
            torch.zeros_like(bias) if of_bias and bias is not None else None,
            torch.zeros_like(rows) if of_rows and rows is not None else None,
            _FP16_SCALE if hidden.dtype == torch.float16 else 1.0,
        )
        return _losses_of_chunks(hidden, weight, bias, *of, ctx.gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        of_tokens = grads[0] / gradients.scale
        factors = (of_tokens[:, None], *[of_tokens[0]] * 3)
        pairs = zip(gradients[:4], factors, strict=True)
        return *(
            None if gradient is None else gradient.mul_(factor) for gradient, factor in pairs
        ), None


def _losses_of_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    request: _Request,
    gradients: _Gradients,
) -> Tensor:
    """The losses of the tokens, [N]; fills in the gradients of their sum."""
    vocabulary = request.vocabulary
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    losses = []
    step = request.tokens_at_a_time(hidden.dtype)
    scale = gradients.scale if any(gradient is not None for gradient in gradients[:4]) else None
    # Each chunk has collectives, so ranks that share a head must have equally many of them:
    # `MicroBatch.beside` adds targets that count nothing.
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        inputs = vocabulary.all_gather(hidden[part])
        outputs = F.linear(inputs, weight, bias)
        of_ranks = vocabulary.all_gather(targets[part])
        if request.teacher is None:
            weights = (
                None if request.weights is None else vocabulary.all_gather(request.weights[part])
            )
            loss, grad = _loss_of_chunk(outputs, of_ranks, scale, request._replace(weights=weights))
        else:
            teacher = request.teacher.part(part, vocabulary)
            others = (
                None
                if teacher.hidden is None
                else F.linear(teacher.hidden.to(hidden.dtype), weight, bias)
            )
            loss, grad = _divergence_of_chunk(
                outputs, others, of_ranks, scale, request._replace(teacher=teacher)
            )
            del others
        losses.append(loss)
        if grad is not None:
            gradients.add(part, grad, inputs, weight, vocabulary)
        del inputs, outputs, grad  # before the next chunk's are made
    return torch.cat(losses)


def _loss_of_chunk(
    outputs: Tensor, targets: Tensor, scale: float | None, request: _Request
) -> tuple[Tensor, Tensor | None]:
    """The tokens' losses, and the gradient of their sum times `scale` in the outputs' dtype and
    memory, if given.

    Everything is in place: softmax in torch would need two more tensors of this size. Of a shared
    head `outputs` are those of this rank's rows for all ranks' tokens, and the losses are those of
    its own tokens.
    """
    form, vocabulary, entropies, _, weights = request
    is_learned = targets != -100
    rows = torch.arange(len(targets), device=targets.device)
    targets = targets - vocabulary.first
    is_here = is_learned & (targets >= 0) & (targets < outputs.shape[1])
    targets = targets.clamp(0, outputs.shape[1] - 1)
    logits = form.logits(outputs)
    slope = form.slope(logits) if scale is not None else 1.0
    slope_of_target = slope[rows, targets] if isinstance(slope, Tensor) else slope
    # exp(logit - top) cannot overflow. The top is that of all ranks' rows, so that their sums can
    # be added up.
    top = vocabulary.largest(logits.amax(dim=1, keepdim=True))
    of_target = torch.where(is_here, logits[rows, targets] - top[:, 0], 0.0)
    exponentials = logits.sub_(top).exp_()
    sums = [exponentials.sum(dim=1), of_target]
    if entropies is not None:
        # The entropy of e / Z is log Z - sum(e log e) / Z, without log-probabilities, which are as
        # large as the logits.
        parts = exponentials.split(-(-len(exponentials) // _ENTROPY_PARTS))
        sums.append(torch.cat([torch.special.xlogy(part, part).sum(dim=1) for part in parts]))
    # One all-reduce for all sums: some KiB, of which the latency is the cost.
    total, of_target, *weighted = vocabulary.summed(torch.stack(sums))
    if entropies is not None:
        entropies.append(vocabulary.local_chunk(total.log() - weighted[0] / total))
    share = is_learned if weights is None else is_learned * weights
    loss = vocabulary.local_chunk(torch.where(is_learned, total.log() - of_target, 0.0) * share)
    if scale is None:
        return loss, None
    factor = share * scale
    # The gradient is softmax, and softmax - 1 at the target: in 16 bits that would be 0 where
    # softmax is almost 1.
    grad_of_target = (of_target.exp() / total - 1.0) * factor * slope_of_target
    if isinstance(slope, Tensor):
        exponentials = exponentials.mul_(slope)
        slope = 1.0
    grad = torch.mul(exponentials, (factor * slope / total)[:, None], out=outputs)
    grad[rows, targets] = torch.where(is_here, grad_of_target.to(grad.dtype), grad[rows, targets])
    return loss, grad


def _divergence_of_chunk(
    outputs: Tensor, others: Tensor | None, targets: Tensor, scale: float | None, request: _Request
) -> tuple[Tensor, Tensor | None]:
    """As `_loss_of_chunk`, of the divergence from the teacher. others: the head's outputs for it,
    if it has these.
    """
    form, vocabulary, measured, teacher, _ = request
    assert teacher is not None and measured is not None
    is_learned = targets != -100
    logits = form.logits(outputs)
    slope = form.slope(logits) if scale is not None else 1.0
    if others is not None:
        found = divergence.from_distribution(logits, form.logits(others), teacher.beta, vocabulary)
    else:
        assert teacher.ids is not None and teacher.logps is not None
        # A token without a target has no teacher: any ids will do, each once.
        ids = torch.where(
            is_learned[:, None],
            teacher.ids,
            torch.arange(teacher.ids.shape[1], device=outputs.device),
        )
        found = divergence.from_likeliest(logits, ids, teacher.logps, teacher.beta, vocabulary)
    losses, agreement, gradient = found
    measured.append(vocabulary.local_chunk(agreement * is_learned))
    loss = vocabulary.local_chunk(torch.where(is_learned, losses, 0.0))
    if scale is None:
        return loss, None
    return loss, torch.mul(gradient.mul_(slope), (is_learned * scale)[:, None], out=outputs)


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: LogitForm,
    wanted: Likeliest,
    vocabulary: Vocabulary,
) -> Tensor:
    """The likeliest tokens of each of N, float32 [2 * k + 1, N], as `divergence.likeliest`."""
    dtype = weight.dtype
    parts = []
    for chunk in hidden.to(dtype).split(tokens_at_a_time(vocabulary.vocabulary, dtype)):
        # Without a name, which would keep the logits while the next chunk's are made.
        found = divergence.likeliest(
            form.logits(F.linear(vocabulary.all_gather(chunk), weight, bias)), wanted, vocabulary
        )
        parts.append(vocabulary.local_chunk(found))
    return torch.cat(parts).T


# --- of whole logits ---


def loss_of_logits(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    rows: Tensor,
    targets: Tensor,
    *,
    reduction: Reduction = "sum",
    temperature: float = 1.0,
) -> Tensor:
    """Loss from the model's own logits, computed for these rows alone where the model can (in one
    row).
    """
    if isinstance(reduction, Tensor):
        return (
            loss_of_logits(model, inputs, rows, targets, temperature=temperature, reduction="none")[
                0
            ]
            @ reduction
        )
    if isinstance(reduction, Teacher | Likeliest):
        raise UserError(
            "--objective distill needs the loss in chunks, which this model does not allow."
        )
    takes_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    skips = len(inputs["input_ids"]) == 1 and takes_rows
    logits = model(**inputs, use_cache=False, **({"logits_to_keep": rows} if skips else {})).logits
    copies = len(logits) // len(inputs["input_ids"])
    logits = (
        logits.flatten(0, 1)
        if skips
        else logits.flatten(0, 1).index_select(0, _rows_of(rows, inputs, copies))
    )
    targets = targets.repeat(copies)
    # Recomputed piece by piece in the backward pass, so there is never a whole float32 copy of the
    # logits.
    size = max(1, MAX_LOGITS // logits.shape[-1])
    pieces = zip(logits.split(size), targets.split(size), strict=True)
    losses = [
        checkpoint(_cross_entropy, *piece, reduction, temperature, use_reentrant=False)
        for piece in pieces
    ]
    if reduction == "sum":
        return torch.stack(losses).sum()
    by_copy = torch.cat(losses, dim=1).view(len(losses[0]), copies, -1)
    return torch.cat([by_copy[:, 0], by_copy[0, 1:]])


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str, temperature: float) -> Tensor:
    """Their sum, or those of the tokens, [1, N], with their entropies, [2, N]."""
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    losses = F.cross_entropy(
        logits, targets, ignore_index=-100, reduction="sum" if reduction == "sum" else "none"
    )
    if reduction == "entropy":
        logps = logits.detach().log_softmax(dim=-1)
        return torch.stack([losses, -(logps.exp() * logps).sum(dim=-1)])
    return losses if reduction == "sum" else losses[None]


def _rows_of(rows: Tensor, inputs: Mapping[str, Any], copies: int) -> Tensor:
    """The rows of the policy and of the reference, whose tokens follow the policy's."""
    return (
        torch.cat([rows + copy * inputs["input_ids"].numel() for copy in range(copies)])
        if copies > 1
        else rows
    )
