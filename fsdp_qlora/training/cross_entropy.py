"""Cross entropy of tokens: its sum, or each token's, with the entropy of its distribution.

Suffixes of tensors: training/token_loss.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.kernels import token_loss
from fsdp_qlora.training.token_loss import Head, HeadPass, Vocabulary, WholeVocabulary

# The entropy of a chunk's tokens takes this part of its logits' memory once more.
_ENTROPY_PARTS = 16

# Whole logits are upcast to float32 and turned into probabilities in pieces of this many elements,
# which take 256 MiB.
MAX_LOGITS = 2**26


@dataclass(frozen=True)
class CrossEntropy:
    """-log p(target) of tokens, in nats; a `TokenLoss`. A target of -100 counts nothing."""

    weights: Tensor | None = None
    """Factors of the tokens in the sum, float32 [N]."""
    by_token: bool = False
    """Give each token's, [1, N], and not the sum."""
    by_probability: bool = False
    """Multiply what a token adds to the sum, and its gradient, by p(target) (Wu et al. 2025)."""
    with_entropy: bool = False
    """Give each token's and, without gradient, the entropy of the whole distribution, [2, N]."""

    num_logits = 1
    needs_chunks = False

    @property
    def is_summed(self) -> bool:
        return not (self.by_token or self.with_entropy)

    @property
    def num_values(self) -> int:
        return 1 + self.with_entropy

    def with_values(self, values: Mapping[str, Tensor]) -> "CrossEntropy":
        return replace(self, weights=values.get("weights")) if self.is_summed else self

    def passes(self, states: Sequence[Tensor], head: Head) -> list[HeadPass]:
        # A trained head's gradient is summed over the tokens with one factor for all. Objectives
        # that read entropies have one for each.
        assert not (self.with_entropy and head.weight_VH.requires_grad), (
            "a head that trains has the gradient of the sum"
        )
        policy, *references = states
        passes = [HeadPass(policy, head, self)]
        for reference in references:
            passes.append(HeadPass(reference.detach(), head, CrossEntropy(by_token=True)))
        return passes

    def of_part(self, part: slice, vocabulary: Vocabulary) -> "CrossEntropy":
        if self.weights is None:
            return self
        return replace(self, weights=vocabulary.all_gather(self.weights[part]))

    def of_chunk(
        self, hidden_CH: Tensor, targets_C: Tensor, head: Head, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the losses and gradients in place.

        softmax in torch needs two more tensors of this size. The gradient takes the outputs'
        memory.
        """
        form = head.form
        vocabulary = head.vocabulary
        outputs_CV = head.outputs(hidden_CH)
        if self._has_kernel(outputs_CV, head):
            return self._by_kernel(outputs_CV, targets_C, head, scale)
        is_learned = targets_C != -100
        rows = torch.arange(len(targets_C), device=targets_C.device)
        # A target's logit is on the rank that has its row: others read any column, and do not use
        # it.
        columns = targets_C - vocabulary.first
        is_here = is_learned & (columns >= 0) & (columns < outputs_CV.shape[1])
        columns = columns.clamp(0, outputs_CV.shape[1] - 1)
        logits_CV = form.logits(outputs_CV)
        slope = form.slope(logits_CV) if scale is not None else 1.0
        slope_of_target = slope[rows, columns] if isinstance(slope, Tensor) else slope
        # exp(logit - top) cannot overflow. All ranks take the same top, so that their sums can be
        # added up.
        top = vocabulary.largest(logits_CV.amax(dim=1, keepdim=True))
        # Taken before exp_, which overwrites the logits.
        of_target = torch.where(is_here, logits_CV[rows, columns] - top[:, 0], 0.0)
        exponentials_CV = logits_CV.sub_(top).exp_()
        sums = [exponentials_CV.sum(dim=1), of_target]
        if self.with_entropy:
            sums.append(_sum_of_e_log_e(exponentials_CV))
        # One all-reduce for all sums: some KiB, of which the latency is the cost.
        total, of_target, *weighted = vocabulary.summed(torch.stack(sums))
        share = is_learned if self.weights is None else is_learned * self.weights
        if self.by_probability:
            # A factor like a weight: it has no gradient of its own.
            share = share * (of_target.exp() / total)
        values = [torch.where(is_learned, total.log() - of_target, 0.0) * share]
        # The entropy of e / Z is log Z - sum(e log e) / Z, without log-probabilities, which are as
        # large as the logits.
        values += [total.log() - each / total for each in weighted]
        values_RC = torch.stack([vocabulary.local_chunk(each) for each in values])
        if scale is None:
            return values_RC, None
        factor = share * scale
        # The gradient is softmax, and softmax - 1 at the target: in 16 bits that would be 0 where
        # softmax is almost 1.
        grad_of_target = (of_target.exp() / total - 1.0) * factor * slope_of_target
        if isinstance(slope, Tensor):
            exponentials_CV = exponentials_CV.mul_(slope)
            slope = 1.0
        # Rounded to the outputs' dtype as it is written. In float32 both are the same memory, which
        # an elementwise product allows.
        grad_CV = torch.mul(exponentials_CV, (factor * slope / total)[:, None], out=outputs_CV)
        grad_CV[rows, columns] = torch.where(
            is_here, grad_of_target.to(grad_CV.dtype), grad_CV[rows, columns]
        )
        return values_RC, grad_CV

    def _has_kernel(self, outputs_CV: Tensor, head: Head) -> bool:
        is_whole = isinstance(head.vocabulary, WholeVocabulary)
        has_form = head.form.cap is None and not self.with_entropy
        return is_whole and has_form and token_loss.has_kernel(outputs_CV)

    def _by_kernel(
        self, outputs_CV: Tensor, targets_C: Tensor, head: Head, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the same for a head that this rank has whole."""
        share = self.weights
        if share is None:
            share = torch.ones(len(targets_C), device=targets_C.device)
        form = token_loss.LogitScale(head.form.scale, head.form.temperature)
        losses_C: Tensor | None = None
        if self.by_probability:
            # A reading of the outputs more, since the gradient's factors follow from the losses.
            losses_C = token_loss.losses_and_gradient_(outputs_CV, targets_C, None, form)
            share = share * losses_C.neg().exp()
        if scale is not None or losses_C is None:
            factors = None if scale is None else share * scale
            losses_C = token_loss.losses_and_gradient_(outputs_CV, targets_C, factors, form)
        return (losses_C * share)[None], None if scale is None else outputs_CV

    def of_whole_logits(self, logits: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        copies = len(logits) // len(targets_N)
        targets = targets_N.repeat(copies)
        # Recomputed piece by piece in the backward pass, so there is never a whole float32 copy of
        # the logits.
        size = max(1, MAX_LOGITS // logits.shape[-1])
        pieces = zip(logits.split(size), targets.split(size), strict=True)
        losses = [
            checkpoint(self._of_piece, *piece, temperature, use_reentrant=False) for piece in pieces
        ]
        if self.is_summed and self.weights is None:
            return torch.stack(losses).sum()
        by_copy = torch.cat(losses, dim=1).view(len(losses[0]), copies, -1)
        # The policy's losses and entropies, then the losses alone of each further copy.
        values_RN = torch.cat([by_copy[:, 0], by_copy[0, 1:]])
        return values_RN if self.weights is None else values_RN[0] @ self.weights

    def _of_piece(self, logits_NV: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        """The losses' sum, or the losses, [1, N], or these with the entropies, [2, N]."""
        # In bf16, log-probabilities would have two or three decimal digits.
        logits_NV = logits_NV.float()
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        if self.is_summed and self.weights is None and not self.by_probability:
            return F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
        losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="none")
        if self.by_probability:
            losses_N = losses_N * losses_N.detach().neg().exp()
        if self.with_entropy:
            logps_NV = logits_NV.detach().log_softmax(dim=-1)
            return torch.stack([losses_N, -(logps_NV.exp() * logps_NV).sum(dim=-1)])
        return losses_N[None]


def _sum_of_e_log_e(exponentials_CV: Tensor) -> Tensor:
    """The sum over V of e * log(e) for each token, in parts of the tokens."""
    parts = exponentials_CV.split(-(-len(exponentials_CV) // _ENTROPY_PARTS))
    return torch.cat([torch.special.xlogy(part, part).sum(dim=1) for part in parts])
