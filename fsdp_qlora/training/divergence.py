"""The divergence of a student from its teacher in a chunk of logits.

Probabilities are those of logits divided by the temperature. Suffixes of tensors besides
training/token_loss.py's, one letter for each dim:

    K  top tokens of the teacher; L = K + 1 with one outcome for all other tokens
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.token_loss import Head, HeadPass, Vocabulary

# The least probability of an outcome, whose logarithm is taken: far below any that matters, and a
# normal number in float32.
LEAST = 1e-30
LEAST_LOGP = math.log(LEAST)


@dataclass(frozen=True)
class Divergence:
    """The divergence from a teacher, and the agreement with it, without gradient; a `TokenLoss`.

    The teacher has its top tokens, or hidden states for the student's head.
    """

    beta: float = 0.0
    """0 for KL(teacher || student), 1 for KL(student || teacher), between them the generalized
    Jensen-Shannon divergence.
    """
    with_nll: bool = False
    """Add a third value, the loss of the target at temperature 1."""
    ids: Tensor | None = None
    """The top tokens, int64 [N, K], in descending order."""
    logps: Tensor | None = None
    """Their log-probabilities [N, L]; the last column is for all other tokens together."""
    hidden: Tensor | None = None
    """The teacher's hidden states, [N, H], instead of ids and logps."""

    is_summed = False
    needs_chunks = True

    @property
    def num_values(self) -> int:
        return 2 + self.with_nll

    @property
    def num_logits(self) -> int:
        # A teacher's hidden states become logits too, and twice as many numbers compare both.
        return 1 if self.hidden is None else 4

    def with_values(self, values: Mapping[str, Tensor]) -> "Divergence":
        return replace(self, ids=values.get("teacher_ids"), logps=values.get("teacher_logps"))

    def passes(self, states: Sequence[Tensor], head: Head) -> list[HeadPass]:
        student, *teachers = states
        hidden = teachers[0].detach() if teachers else self.hidden
        passes = [HeadPass(student, head, replace(self, hidden=hidden))]
        if self.with_nll:
            # The usual loss beside the divergence uses the model's own probabilities, unscaled.
            plain = head._replace(form=head.form._replace(temperature=1.0))
            passes.append(HeadPass(student, plain, CrossEntropy(by_token=True)))
        return passes

    def of_part(self, part: slice, vocabulary: Vocabulary) -> "Divergence":
        # All ranks have the same fields, so they gather in the same order.
        chunks: list[Tensor | None] = []
        for values in (self.ids, self.logps, self.hidden):
            chunks.append(None if values is None else vocabulary.all_gather(values[part]))
        ids, logps, hidden = chunks
        return replace(self, ids=ids, logps=logps, hidden=hidden)

    def of_chunk(
        self, hidden_CH: Tensor, targets_C: Tensor, head: Head, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        form = head.form
        vocabulary = head.vocabulary
        outputs_CV = head.outputs(hidden_CH)
        teacher_CV = None
        if self.hidden is not None:
            teacher_CV = head.outputs(self.hidden.to(hidden_CH.dtype))
        is_learned = targets_C != -100
        logits_CV = form.logits(outputs_CV)
        # Taken first: the divergence overwrites the logits.
        slope = form.slope(logits_CV) if scale is not None else 1.0
        if teacher_CV is not None:
            losses_C, agreement_C, grad_CV = from_distribution(
                logits_CV, form.logits(teacher_CV), self.beta, vocabulary
            )
        else:
            assert self.ids is not None and self.logps is not None
            # A token without a target has no teacher: any ids will do, each once.
            any_ids = torch.arange(self.ids.shape[1], device=outputs_CV.device)
            ids = torch.where(is_learned[:, None], self.ids, any_ids)
            losses_C, agreement_C, grad_CV = from_top_tokens(
                logits_CV, ids, self.logps, self.beta, vocabulary
            )
        values = (torch.where(is_learned, losses_C, 0.0), agreement_C * is_learned)
        values_RC = torch.stack([vocabulary.local_chunk(each) for each in values])
        if scale is None:
            return values_RC, None
        factor_C1 = (is_learned * scale)[:, None]
        return values_RC, torch.mul(grad_CV.mul_(slope), factor_C1, out=outputs_CV)

    def of_whole_logits(self, logits: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        raise NotImplementedError


def divergence_terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of each outcome, and its derivative by the student's log-probability.

    The generalized Jensen-Shannon divergence of Agarwal et al. 2024, eq. 1, is beta * KL(teacher ||
    mixture) + (1 - beta) * KL(student || mixture), with the mixture (1 - beta) * student + beta *
    teacher. The weights of the mixture are TRL's. Divided by beta or by 1 - beta, the sum has the
    Kullback-Leibler divergences as its limits, and beta 0 and 1 are these.

    Args:
        student, teacher: log-probabilities.
    """
    if beta == 0:
        probabilities = teacher.exp()
        # neg_ overwrites the probabilities after their only other use.
        return probabilities * (teacher - student), probabilities.neg_()
    if beta == 1:
        # The derivative has the student's probability besides, which the callers' step from
        # log-probabilities to logits would take out again.
        slope = student.exp() * (student - teacher)
        return slope, slope
    # In logarithms, where no small probability becomes 0.
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    # The mixture M moves with the student S, too, but these parts of the derivative add up to 0:
    # (1 - beta) * S * (1 - ((1 - beta) * S + beta * T) / M).
    slope = (1 - beta) * student.exp() * (student - mixture)
    return beta * teacher.exp() * (teacher - mixture) + slope, slope


def from_distribution(
    student_CV: Tensor, teacher_CV: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence from a whole distribution.

    Args:
        student_CV, teacher_CV: logits of this rank's part of the vocabulary, float32; both are
            overwritten.
    Returns:
        Divergences, [C]; agreements, 1 where the top token is the same, [C]; and the gradient
        of the divergences' sum by the student's logits, [C, V].
    """
    # exp cannot overflow behind the largest logit of all ranks' parts, and the top token is
    # where the difference is 0.
    for logits_CV in (student_CV, teacher_CV):
        logits_CV.sub_(vocabulary.largest(logits_CV.amax(dim=1, keepdim=True)))
    agree_C = ((student_CV == 0) & (teacher_CV == 0)).any(dim=1).float()
    # exp() makes a copy as large as the chunk, which is freed before the next one is made.
    student_C = student_CV.exp().sum(dim=1)
    teacher_C = teacher_CV.exp().sum(dim=1)
    totals = vocabulary.summed(torch.stack([student_C, teacher_C, agree_C]))
    log_totals = totals[:2, :, None].log()
    student_CV.sub_(log_totals[0])
    teacher_CV.sub_(log_totals[1])
    values_CV, slopes_CV = divergence_terms(student_CV, teacher_CV, beta)
    divergence_C, slopes_C = vocabulary.summed(
        torch.stack([values_CV.sum(dim=1), slopes_CV.sum(dim=1)])
    )
    # A log-probability is its logit minus log-sum-exp of all, so each logit also moves all others,
    # by its own probability.
    gradient_CV = slopes_CV.addcmul_(student_CV.exp_(), slopes_C[:, None], value=-1)
    # With equal largest logits on two ranks, both count an agreement.
    return divergence_C, totals[2].clamp_(max=1), gradient_CV


def from_top_tokens(
    logits_CV: Tensor, ids_CK: Tensor, logps_CL: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence over k + 1 outcomes: the teacher's top tokens, and any other token.

    Args:
        logits_CV: the student's, float32, overwritten.
        ids_CK, logps_CL: as of `Divergence`; the log-probabilities are normalized.
    Returns:
        As `from_distribution`.
    """
    top = vocabulary.largest(logits_CV.amax(dim=1, keepdim=True))
    others_CV = logits_CV.sub_(top).exp_()
    outcomes_CL, places_CK, is_here_CK = take_outcomes(others_CV, ids_CK, vocabulary)
    total = outcomes_CL.sum(dim=1, keepdim=True)
    student_CL = (outcomes_CL / total).clamp_min_(LEAST).log_()
    # A file or a server's answer has rounded the teacher's probabilities: they add up to 1 again.
    teacher_CL = logps_CL.float().log_softmax(dim=1)
    values_CL, slopes_CL = divergence_terms(student_CL, teacher_CL, beta)
    gradients_CL = slopes_CL - student_CL.exp() * slopes_CL.sum(dim=1, keepdim=True)
    # The gradient of the last outcome is shared out among its tokens by their probabilities. The
    # named tokens have 0 there, so adding their own gradients sets them.
    others_CV.mul_(gradients_CL[:, -1:] / outcomes_CL[:, -1:].clamp_min(LEAST))
    gradient_CV = others_CV.scatter_add_(1, places_CK, gradients_CL[:, :-1] * is_here_CK)
    # exp(logit - top) is 1 where the teacher's top token is the student's.
    return values_CL.sum(dim=1), (outcomes_CL[:, 0] == 1).float(), gradient_CV


def take_outcomes(
    exponentials_CV: Tensor, ids_CK: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the exponentials of some tokens out, and leave 0 there.

    Returns:
        The exponentials of the tokens and, last, the sum of all others, [C, L]; the tokens' places
        in this rank's part of the vocabulary, [C, K], and whether they are there, [C, K].
    """
    places_CK = ids_CK - vocabulary.first
    is_here_CK = (places_CK >= 0) & (places_CK < exponentials_CV.shape[1])
    places_CK = places_CK.clamp(0, exponentials_CV.shape[1] - 1)
    chosen_CK = exponentials_CV.gather(1, places_CK) * is_here_CK
    # A difference of sums would lose a small rest. Adding is exact: x - x is 0, and tokens of other
    # ranks add 0.
    exponentials_CV.scatter_add_(1, places_CK, -chosen_CK)
    rest_C1 = exponentials_CV.sum(dim=1, keepdim=True)
    outcomes_CL = vocabulary.summed(torch.cat([chosen_CK, rest_C1], dim=1))
    return outcomes_CL, places_CK, is_here_CK
