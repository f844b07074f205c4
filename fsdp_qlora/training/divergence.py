"""The divergence of a student from its teacher in a chunk of logits, and the likeliest tokens of a
teacher.

Shapes: C tokens of a chunk, of which each rank that shares the head has all, with its own part of
the vocabulary V; k likeliest tokens of the teacher. Probabilities are those of logits divided by
the temperature.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_qlora.model.adapters.token_rows import TokenRows
from fsdp_qlora.sharding.vocabulary import SharedHead

LEAST = 1e-30  # the least probability of an outcome, whose logarithm is taken
LEAST_LOGP = math.log(LEAST)


class WholeVocabulary:
    """Stands in for `SharedHead` where a rank has the whole head: there is nothing to exchange."""

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
    """The teacher of N tokens.

    beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between them the generalized
    Jensen-Shannon divergence. with_nll: the losses of the targets, at temperature 1, are wanted
    too. ids: the likeliest tokens, int64 [N, k], the first the likeliest; logps: their
    log-probabilities and, behind them, that of all others, [N, k + 1]. hidden: instead of these the
    teacher's hidden states, [N, H], for the same head.
    """

    beta: float = 0.0
    with_nll: bool = False
    ids: Tensor | None = None
    logps: Tensor | None = None
    hidden: Tensor | None = None

    def part(self, part: slice, vocabulary: Vocabulary) -> "Teacher":
        """The teacher of some tokens, and of those of all ranks that share the vocabulary."""
        ids, logps, hidden = (
            None if t is None else vocabulary.all_gather(t[part]) for t in self[2:]
        )
        return self._replace(ids=ids, logps=logps, hidden=hidden)


class Likeliest(NamedTuple):
    """The k likeliest tokens of the first `vocabulary` are wanted: a teacher may know more than its
    student.
    """

    k: int
    vocabulary: int


def divergence_terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of each outcome, and its derivative by the student's log-probability.

    Agarwal et al. 2024, eq. 1, with the weights of TRL, whose beta 0 and 1 are the limits of the
    sum by their names: beta * KL(teacher || mixture) + (1 - beta) * KL(student || mixture) of (1 -
    beta) * student + beta * teacher.

    Args:
        student, teacher: log-probabilities.
    """
    if beta == 0:
        probabilities = teacher.exp()
        return probabilities * (teacher - student), probabilities.neg_()
    if beta == 1:
        slope = student.exp() * (student - teacher)
        return slope, slope
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    slope = (1 - beta) * student.exp() * (student - mixture)
    return beta * teacher.exp() * (teacher - mixture) + slope, slope


def from_distribution(
    student: Tensor, teacher: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence from a whole distribution.

    Args:
        student, teacher: logits of this rank's part of the vocabulary, float32 [C, V]; both are
        overwritten.
    Returns:
        Divergences, [C]; agreements, 1 where the likeliest token is the same, [C]; and the gradient
        of the divergences' sum by the student's logits.
    """
    for logits in (student, teacher):
        logits.sub_(vocabulary.largest(logits.amax(dim=1, keepdim=True)))
    agree = ((student == 0) & (teacher == 0)).any(dim=1).float()
    totals = vocabulary.summed(
        torch.stack([student.exp().sum(dim=1), teacher.exp().sum(dim=1), agree])
    )
    own, other = totals[:2, :, None].log()
    value, slope = divergence_terms(student.sub_(own), teacher.sub_(other), beta)
    divergence, slopes = vocabulary.summed(torch.stack([value.sum(dim=1), slope.sum(dim=1)]))
    # The logits move all log-probabilities by the mean of their change.
    gradient = slope.addcmul_(student.exp_(), slopes[:, None], value=-1)
    return divergence, totals[2].clamp_(max=1), gradient


def from_likeliest(
    logits: Tensor, ids: Tensor, logps: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence over k + 1 outcomes: the teacher's likeliest tokens, and any other token.

    Args:
        logits: the student's, float32 [C, V], overwritten. ids, logps: as of `Teacher`; they are
        normalized.
    Returns:
        As `from_distribution`.
    """
    others = logits.sub_(vocabulary.largest(logits.amax(dim=1, keepdim=True))).exp_()
    outcomes, places, is_here = _outcomes(others, ids, vocabulary)
    total = outcomes.sum(dim=1, keepdim=True)
    student = (outcomes / total).clamp_min_(LEAST).log_()
    values, slopes = divergence_terms(student, logps.float().log_softmax(dim=1), beta)
    gradients = slopes - student.exp() * slopes.sum(dim=1, keepdim=True)
    others.mul_(gradients[:, -1:] / outcomes[:, -1:].clamp_min(LEAST))
    gradient = others.scatter_add_(1, places, gradients[:, :-1] * is_here)
    return values.sum(dim=1), (outcomes[:, 0] == 1).float(), gradient


def _outcomes(
    exponentials: Tensor, ids: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the exponentials of some tokens out, and leave 0 there.

    Returns:
        Those of the tokens and, last, the sum of all others, [C, k + 1]; the tokens' places in this
        rank's part of the vocabulary, [C, k], and whether they are there.
    """
    places = ids - vocabulary.first
    is_here = (places >= 0) & (places < exponentials.shape[1])
    places = places.clamp(0, exponentials.shape[1] - 1)
    chosen = exponentials.gather(1, places) * is_here
    # A difference of sums would lose a small rest. Adding is exact: x - x is 0, and tokens of other
    # ranks add 0.
    exponentials.scatter_add_(1, places, -chosen)
    return (
        vocabulary.summed(torch.cat([chosen, exponentials.sum(dim=1, keepdim=True)], dim=1)),
        places,
        is_here,
    )


def likeliest(logits: Tensor, wanted: Likeliest, vocabulary: Vocabulary) -> Tensor:
    """The k likeliest tokens of each, as of `Teacher`, float32 [C, 2 * k + 1]: ids,
    log-probabilities, the others'.

    Args:
        logits: float32 [C, V], overwritten.
    """
    k = wanted.k
    logits[:, max(0, wanted.vocabulary - vocabulary.first) :] = -torch.inf
    values, places = logits.topk(min(k, logits.shape[1]), dim=1)
    found = torch.stack([values, (places + vocabulary.first).float()])  # exact up to 2^24
    padded = torch.nn.functional.pad(found, (0, k - found.shape[2]), value=-torch.inf)
    by_rank = vocabulary.all_gather(padded.transpose(0, 1)).view(-1, len(logits), 2, k)
    values, ids = by_rank.permute(2, 1, 0, 3).flatten(2)
    values, best = values.topk(k, dim=1)
    ids = ids.gather(1, best)
    outcomes, *_ = _outcomes(logits.sub_(values[:, :1]).exp_(), ids.long(), vocabulary)
    logps = (outcomes / outcomes.sum(dim=1, keepdim=True)).clamp_min_(LEAST).log_()
    return torch.cat([ids, logps], dim=1)
