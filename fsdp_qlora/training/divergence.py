"""The divergence of a student from its teacher in a chunk of logits.

Also finds the likeliest tokens of a teacher. Probabilities are those of logits divided by the
temperature. Suffixes of tensors, one letter for each dim:

    N  tokens with a target on this rank
    C  tokens of a chunk, of which each rank that shares the head has all
    V  vocabulary, or this rank's part of it where ranks share the head
    K  likeliest tokens of the teacher; L = K + 1 with one outcome for all other tokens
    R  ranks that share the head
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_qlora.model.adapters.token_rows import TokenRows
from fsdp_qlora.sharding.vocabulary import SharedHead

# The least probability of an outcome, whose logarithm is taken: far below any that matters, and a
# normal number in float32.
LEAST = 1e-30
LEAST_LOGP = math.log(LEAST)


class WholeVocabulary:
    """Stands in for `SharedHead` where a rank has the whole head: there is nothing to exchange."""

    # The first token of the vocabulary whose row is on this rank.
    first = 0

    def __init__(self, vocabulary: int, new_rows: TokenRows | None = None) -> None:
        self.vocabulary = vocabulary
        self.new_rows = new_rows

    def all_gather(self, values: Tensor) -> Tensor:
        return values

    local_chunk = largest = summed = all_gather

    def reduce_scatter_grad(self, grad: Tensor, weight: Tensor, own: Tensor) -> None:
        torch.mm(grad, weight, out=own)


Vocabulary = SharedHead | WholeVocabulary


class Teacher(NamedTuple):
    """The teacher of N tokens: its likeliest tokens, or its hidden states for the same head."""

    beta: float = 0.0
    """0 for KL(teacher || student), 1 for KL(student || teacher), between them the generalized
    Jensen-Shannon divergence.
    """
    with_nll: bool = False
    """Compute the losses of the targets at temperature 1, too."""
    ids: Tensor | None = None
    """The likeliest tokens, int64 [N, K], the first the likeliest."""
    logps: Tensor | None = None
    """Their log-probabilities and, behind them, that of all other tokens, [N, L]."""
    hidden: Tensor | None = None
    """The teacher's hidden states, [N, H], instead of ids and logps."""

    def part(self, part: slice, vocabulary: Vocabulary) -> "Teacher":
        """The teacher of a chunk: of these tokens on every rank that shares the vocabulary."""
        # All ranks have the same fields, so they gather in the same order.
        chunks: list[Tensor | None] = []
        for values in (self.ids, self.logps, self.hidden):
            chunks.append(None if values is None else vocabulary.all_gather(values[part]))
        ids, logps, hidden = chunks
        return self._replace(ids=ids, logps=logps, hidden=hidden)


class Likeliest(NamedTuple):
    """Asks for the k likeliest tokens among the first `vocabulary` ones.

    A teacher may know more tokens than its student.
    """

    k: int
    vocabulary: int


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
        Divergences, [C]; agreements, 1 where the likeliest token is the same, [C]; and the gradient
        of the divergences' sum by the student's logits, [C, V].
    """
    # exp cannot overflow behind the largest logit of all ranks' parts, and the likeliest token is
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


def from_likeliest(
    logits_CV: Tensor, ids_CK: Tensor, logps_CL: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence over k + 1 outcomes: the teacher's likeliest tokens, and any other token.

    Args:
        logits_CV: the student's, float32, overwritten.
        ids_CK, logps_CL: as of `Teacher`; the log-probabilities are normalized.
    Returns:
        As `from_distribution`.
    """
    top = vocabulary.largest(logits_CV.amax(dim=1, keepdim=True))
    others_CV = logits_CV.sub_(top).exp_()
    outcomes_CL, places_CK, is_here_CK = _outcomes(others_CV, ids_CK, vocabulary)
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
    # exp(logit - top) is 1 where the teacher's likeliest token is the student's.
    return values_CL.sum(dim=1), (outcomes_CL[:, 0] == 1).float(), gradient_CV


def _outcomes(
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


def likeliest(logits_CV: Tensor, request: Likeliest, vocabulary: Vocabulary) -> Tensor:
    """Find the k likeliest tokens of each token of a chunk.

    Args:
        logits_CV: float32, overwritten.
    Returns:
        float32 [C, 2 * k + 1]: ids, log-probabilities, and that of all other tokens, as `Teacher`
        has them.
    """
    k = request.k
    logits_CV[:, max(0, request.vocabulary - vocabulary.first) :] = -torch.inf
    # The likeliest of all are among the likeliest of each rank's part, which may have fewer than k.
    values, places = logits_CV.topk(min(k, logits_CV.shape[1]), dim=1)
    # One all-gather for both. Ids are exact in float32 up to 2^24.
    pairs_2CK = torch.stack([values, (places + vocabulary.first).float()])
    missing = k - pairs_2CK.shape[2]
    pairs_2CK = torch.nn.functional.pad(pairs_2CK, (0, missing), value=-torch.inf)
    # Tokens come first, since all_gather concatenates along the first dim.
    gathered = vocabulary.all_gather(pairs_2CK.transpose(0, 1))
    pairs_RC2K = gathered.view(-1, len(logits_CV), 2, k)
    values, ids = pairs_RC2K.permute(2, 1, 0, 3).flatten(2)
    values_CK, best_CK = values.topk(k, dim=1)
    ids_CK = ids.gather(1, best_CK)
    exponentials_CV = logits_CV.sub_(values_CK[:, :1]).exp_()
    outcomes_CL, *_ = _outcomes(exponentials_CV, ids_CK.long(), vocabulary)
    logps_CL = (outcomes_CL / outcomes_CL.sum(dim=1, keepdim=True)).clamp_min_(LEAST).log_()
    return torch.cat([ids_CK, logps_CL], dim=1)
