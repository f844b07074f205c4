"""The objective of a run at its steps: from the tokens' losses to the sum to minimize.

Also computes the objective's metrics. `make_objective` chooses a class by the kind of rows. Shapes:
N tokens with a target in D documents of R rows of a micro-batch; in pairs the chosen and the
rejected answer take turns.

A loss and each metric is a sum over a micro-batch, with a divisor that counts the rows or tokens of
all ranks. So sums can be added up over micro-batches and ranks in any way, and the result does not
depend on how the rows are split.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.config.objectives import (
    OBJECTIVES,
    LogProbs,
    LossInputs,
    LossSettings,
    Objective,
    TokenInputs,
)
from fsdp_qlora.data.batches.collator import Batches
from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.divergence import Divergence
from fsdp_qlora.training.forward import (
    ForwardPass,
    document_logprobs,
    spread_sums,
    sum_documents,
)
from fsdp_qlora.training.token_loss import TokenLoss

SIDES = ("chosen", "rejected")


class Totals(NamedTuple):
    """Counts of a step's or an evaluation's rows on all ranks, which divide losses and metrics."""

    divisor: float
    """The sum of all micro-batches' losses is divided by it."""
    num_of_sides: tuple[int, int] = (0, 0)
    """Rows with a chosen answer, and with a rejected one."""
    rows_per_token: float = 0.0
    """Rows per target token of the chosen answers."""
    divergence: float = 0.0
    """Mean log-ratio of policy and reference for other rows' answers."""
    num_targets: int = 0
    """Target tokens of completions."""


class TokenMean:
    """The mean loss over target tokens, by their weights, and what every objective can do.

    context: the ranks that share each micro-batch.
    """

    loss: TokenLoss = CrossEntropy()
    """The values that each token gets."""
    learned_loss: TokenLoss | None = None
    """The values in training, if evaluations measure others."""
    per_document = False
    """Whether `measure` reads what a micro-batch has of documents."""

    def __init__(self, row: Objective, settings: LossSettings, context: ContextGroup) -> None:
        self.row = row
        self.settings = settings
        self.context = context
        self.metric_names = tuple(self._metric_names())

    def _metric_names(self) -> Iterator[str]:
        yield from ()

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        """Count the rows of all ranks, so that the loss does not depend on how they are split.

        Args:
            forward: computes what takes a pass of its own, then on every rank; None leaves that
                out.
        """
        # Every rank has the whole table, so no collective is needed.
        weights = batches.table.learned
        if weights.dtype.kind != "f":
            return Totals(batches.num_targets)
        ends = batches.table.offsets
        total = 0.0
        for row in batches.rows:
            # No token of a row predicts its first one.
            total += weights[ends[row] + 1 : ends[row + 1]].sum(dtype=float)
        return Totals(float(total))

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """A micro-batch's loss, followed by its sum of each metric without gradient.

        Ranks that share a micro-batch have a part of these each.

        Args:
            losses: of the tokens, as `ForwardPass.token_losses` gives them for `loss`.
            batch: on the device.
        Returns:
            float32 [1 + metrics].
        """
        return losses[None]

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        """The metrics, from the sums over all micro-batches of what `measure` gives."""
        count = totals.num_targets or totals.divisor
        return {
            name: total / count for name, total in zip(self.metric_names, sums[1:], strict=True)
        }

    def describe_loss(self, loss: float) -> dict[str, float]:
        """The perplexity, if the loss of an evaluation is a mean over tokens."""
        if not self.loss.is_summed:
            return {}
        # exp(709) is the largest that a float holds.
        return {"perplexity": math.exp(loss) if loss < 709 else math.inf}


class Texts(TokenMean):
    """The mean over target tokens; dft weighs each by its probability (Wu et al. 2025).

    The divisor is the number of tokens either way, as in TRL. Evaluations measure the plain mean.
    """

    def __init__(self, row: Objective, settings: LossSettings, context: ContextGroup) -> None:
        super().__init__(row, settings, context)
        if settings.loss_type == "dft":
            self.learned_loss = CrossEntropy(by_probability=True)


class Pairs(TokenMean):
    """A loss of each row, from the log-probabilities of its chosen and its rejected answer."""

    loss = CrossEntropy(by_token=True)
    per_document = True

    @property
    def sft_weight(self) -> float:
        return self.row.sft_weight if self.settings.sft_weight is None else self.settings.sft_weight

    def _metric_names(self) -> Iterator[str]:
        for side in SIDES:
            yield from (f"rewards/{side}", f"logps/{side}")
        yield "rewards/accuracies"
        if self.sft_weight:
            yield "nll_loss"

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        table = batches.table
        num_rows = len(batches.rows)
        num_chosen = int(table.document_targets[table.documents(batches.rows)[::2]].sum())
        return Totals(num_rows, (num_rows, num_rows), num_rows / max(1, num_chosen))

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        # A rank without rows in this round has tokens without a target, whose losses are 0. Their
        # sum still has a gradient function: the backward pass runs, with its collectives.
        if not batch.num_targets:
            return F.pad(losses.sum()[None], (0, len(self.metric_names)))
        documents = sum_documents(losses, batch, self.context)
        # [R, sides]. With one learned document the first and the last are the same answer.
        sides = self.row.row_kind.num_learned
        chosen = LogProbs(*(values.view(-1, sides)[:, 0] for values in documents))
        rejected = LogProbs(*(values.view(-1, sides)[:, -1] for values in documents))
        inputs = LossInputs(
            losses, batch.num_targets, chosen, rejected, batch.desired, totals.divergence
        )
        assert self.row.loss is not None
        loss = self.row.loss(inputs, self.settings)
        metrics = self._metrics(inputs, totals)
        if self.sft_weight:
            # A mean over tokens beside a mean over rows: `rows_per_token` is in the metric.
            loss = loss + self.sft_weight * metrics["nll_loss"]
        # The metrics share tensors with the loss, whose gradient they must not change.
        metric_sums = [metrics[name].detach().sum() for name in self.metric_names]
        sums = [loss.sum(), *metric_sums]
        # The sums are of whole documents, and every rank that shares these has them.
        return torch.stack(sums) / self.context.size

    def _metrics(self, inputs: LossInputs, totals: Totals) -> dict[str, torch.Tensor]:
        """Each row's metrics, [R]."""
        metrics = {}
        # Where the score is a mean over tokens, so are the log-probabilities that are shown.
        is_mean = self.row.score is LogProbs.mean_ratio
        for side, answers in zip(SIDES, (inputs.chosen, inputs.rejected), strict=True):
            logps = answers.policy / answers.tokens if is_mean else answers.policy
            metrics[f"rewards/{side}"] = self.settings.beta * self.row.score(answers)
            metrics[f"logps/{side}"] = logps
        is_right = metrics["rewards/chosen"] > metrics["rewards/rejected"]
        metrics["rewards/accuracies"] = is_right.float()
        # Divided by the number of rows later, it is the sum over tokens divided by their number.
        metrics["nll_loss"] = -inputs.chosen.policy * totals.rows_per_token
        return metrics

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        counts = dict(zip(SIDES, totals.num_of_sides, strict=True))
        means = {}
        for name, total in zip(self.metric_names, sums[1:], strict=True):
            count = counts.get(name.rpartition("/")[2], totals.divisor)
            means[name] = total / count if count else math.nan
        return means | {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


class Labels(Pairs):
    """The same for answers with a label, as KTO's (Ethayarajh et al. 2024).

    Both sides are the one answer, which counts for the side of its label.
    """

    def _metric_names(self) -> Iterator[str]:
        # An answer with a label has no other one to be compared with.
        yield from (name for name in super()._metric_names() if name != "rewards/accuracies")

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        num_rows = len(batches.rows)
        num_desired = int(batches.table.columns["desired"].values[batches.rows].sum())
        totals = Totals(num_rows, (num_desired, num_rows - num_desired))
        if forward is None:
            return totals
        # KTO's estimate of the divergence from the reference, of this policy and without gradient:
        # the mean log-ratio of answers to other prompts, which are each row's second document.
        others = [[2 * rows + 1 for rows in rows_of_ranks] for rows_of_ranks in batches.rounds]
        apart = dataclasses.replace(batches, rounds=others, table=batches.table.as_documents)
        ratios = [answers.ratio().sum().double() for answers in document_logprobs(forward, apart)]
        sums = gather_numbers([torch.stack(ratios).sum()], forward.ranks.device)
        # Ranks that share a micro-batch have the same sum.
        total = sums.sum().item() / self.context.size
        # A divergence is never below 0; its estimate may be.
        return totals._replace(divergence=max(0.0, total / num_rows))

    def _metrics(self, inputs: LossInputs, totals: Totals) -> dict[str, torch.Tensor]:
        shares = {"chosen": inputs.desired, "rejected": 1 - inputs.desired}
        metrics = super()._metrics(inputs, totals)
        return {
            name: values * shares.get(name.rpartition("/")[2], 1.0)
            for name, values in metrics.items()
        }

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        return super().means(sums, totals) | {"kl": totals.divergence}


class Policy(TokenMean):
    """A loss of each token of completions that the policy has sampled.

    Rows without advantages, such as a probe's, count 0.
    """

    loss = CrossEntropy(with_entropy=True)

    def _metric_names(self) -> Iterator[str]:
        yield "entropy"
        if self.settings.loss_type == "cispo":
            yield "cispo_clip_ratio"
        else:
            yield "clip_ratio/low_mean"
            yield "clip_ratio/high_mean"
            yield "clip_ratio/region_mean"
        yield "sampling/importance_sampling_ratio/mean"
        yield "sampling/sampling_logp_difference/mean"
        if self.settings.beta > 0:
            yield "kl"

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        num_targets = batches.num_targets
        num_rows = len(batches.rows)
        longest = self.settings.max_completion_length
        divisors = {
            # A mean over all tokens (Yu et al. 2025).
            "dapo": num_targets,
            "cispo": num_targets,
            # A mean over answers of each answer's mean (Shao et al. 2024).
            "grpo": num_rows,
            "gspo": num_rows,
            # A constant, so that long wrong answers are not favored (Liu et al. 2025).
            "dr_grpo": num_rows * longest,
        }
        return Totals(divisors[self.settings.loss_type], num_targets=num_targets)

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        negative, entropy, *reference = losses
        logps = -negative
        target_values = batch.target_values
        settings = self.settings
        # One over the tokens of the answer: each answer's sum becomes a mean.
        shares = target_values.get("shares", torch.zeros_like(entropy))
        # At the first step of a generation the weights are those that answered: the ratio is 1, and
        # has the gradient alone.
        old_logps = target_values.get("old_logps", logps.detach())
        inputs = TokenInputs(
            logps,
            old_logps,
            reference=-reference[0].detach() if reference else None,
            # A generation of an older version lacks them.
            sampled_logps=target_values.get("sampled_logps", old_logps),
            advantages=target_values.get("advantages", torch.zeros_like(entropy)),
            answer_mean=lambda values: spread_sums(values * shares, batch, self.context),
        )
        assert self.row.token_loss is not None
        loss, metrics = self.row.token_loss(inputs, settings)
        if settings.loss_type in ("grpo", "gspo"):
            loss = loss * shares
        if settings.loss_type == "gspo":
            # An answer is clipped as a whole: a mean over answers, not over tokens.
            per_answer = shares * (totals.num_targets / totals.divisor)
            for name in metrics:
                if name.startswith("clip_ratio/"):
                    metrics[name] = metrics[name] * per_answer
        metrics["entropy"] = entropy
        # [1 + metrics, N]
        metric_values = [metrics[name].detach() for name in self.metric_names]
        values = torch.stack([loss, *metric_values])
        is_target = batch.targets != IGNORE_INDEX
        return values.mul(is_target).sum(dim=1)


class Distillation(TokenMean):
    """The mean over target tokens of the divergence from a teacher.

    `sft_weight` times the tokens' usual loss is added to it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loss = Divergence(self.settings.beta, bool(self.settings.sft_weight))

    def _metric_names(self) -> Iterator[str]:
        yield "divergence"
        yield "agreement"
        if self.settings.sft_weight:
            yield "nll_loss"

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        # Rows: divergences, agreements and, where they are wanted, the usual losses.
        sums = losses.sum(dim=1)
        loss = sums[0] + (self.settings.sft_weight or 0.0) * sums[2:].sum()
        return torch.stack([loss, *sums.detach()])


# By the name of the kind of rows, see config/objectives.py.
KINDS: dict[str, type[TokenMean]] = {
    "texts": Texts,
    "pairs": Pairs,
    "labels": Labels,
    "prompts": Policy,
    "teacher_rows": Distillation,
    "teacher_prompts": Distillation,
}


def make_objective(
    name: str = "sft", settings: LossSettings | None = None, context: ContextGroup | None = None
) -> TokenMean:
    """The objective of this name in OBJECTIVES, with its options."""
    row = OBJECTIVES[name]
    return KINDS[row.row_kind.name](row, settings or LossSettings(), context or ContextGroup())
