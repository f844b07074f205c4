"""The objective of a run at its steps: from the tokens' losses to the sum to minimize, and its
metrics.

`make_objective` chooses a class by the kind of rows. Shapes: N tokens with a target in D documents
of a micro-batch; in pairs the chosen and the rejected answer take turns.
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
from fsdp_qlora.training.divergence import Teacher
from fsdp_qlora.training.forward import ForwardPass, document_logprobs, sum_documents
from fsdp_qlora.training.head_loss import Reduction

SIDES = ("chosen", "rejected")


class Totals(NamedTuple):
    """Global counts of a step's or an evaluation's rows, which normalize the loss and the metrics.

    divisor: the sum of all micro-batches' losses is divided by it. num_of_sides: rows with a chosen
    answer, and with a rejected one. rows_per_token: rows per target token of the chosen answers.
    divergence: mean log-ratio of policy and reference for other rows' answers. num_targets: target
    tokens of completions.
    """

    divisor: float
    num_of_sides: tuple[int, int] = (0, 0)
    rows_per_token: float = 0.0
    divergence: float = 0.0
    num_targets: int = 0


class TokenMean:
    """The mean loss over target tokens, by their weights, and what every objective can do.

    context: the ranks that share each micro-batch.
    """

    reduction: Reduction = "sum"

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
        weights = batches.table.learned
        ends = batches.table.offsets
        if weights.dtype.kind != "f":
            return Totals(batches.num_targets)
        return Totals(
            float(
                sum(weights[ends[row] + 1 : ends[row + 1]].sum(dtype=float) for row in batches.rows)
            )
        )

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """A micro-batch's loss, followed by its sum of each metric without gradient, float32 [1 +
        metrics].

        Ranks that share a micro-batch have a part of these each.

        Args:
            losses: of the tokens, by `reduction`. batch: on the device.
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
        # exp(709) is the largest that a float holds.
        return (
            {"perplexity": math.exp(loss) if loss < 709 else math.inf}
            if self.reduction == "sum"
            else {}
        )


class Pairs(TokenMean):
    """A loss of each row, from the log-probabilities of its chosen and its rejected answer."""

    reduction = "none"

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
        if not batch.num_targets:  # a rank without rows in this round has tokens without a target
            return F.pad(losses.sum()[None], (0, len(self.metric_names)))
        documents = sum_documents(losses, batch, self.context)
        sides = self.row.row_kind.num_learned
        chosen, rejected = (
            LogProbs(*(values.view(-1, sides)[:, i] for values in documents)) for i in (0, -1)
        )
        inputs = LossInputs(
            losses, batch.num_targets, chosen, rejected, batch.desired, totals.divergence
        )
        assert self.row.loss is not None
        loss = self.row.loss(inputs, self.settings)
        metrics = self._metrics(inputs, totals)
        if self.sft_weight:  # a mean over tokens beside a mean over rows
            loss = loss + self.sft_weight * metrics["nll_loss"]
        sums = torch.stack(
            [loss.sum(), *(metrics[name].detach().sum() for name in self.metric_names)]
        )
        # they are of whole documents, and every rank that shares these has them
        return sums / self.context.size

    def _metrics(self, inputs: LossInputs, totals: Totals) -> dict[str, torch.Tensor]:
        """Each row's metrics, [R]."""
        metrics = {}
        for side, answers in zip(SIDES, (inputs.chosen, inputs.rejected), strict=True):
            logps = (
                answers.policy / answers.tokens
                if self.row.score is LogProbs.mean_ratio
                else answers.policy
            )
            metrics[f"rewards/{side}"] = self.settings.beta * self.row.score(answers)
            metrics[f"logps/{side}"] = logps
        metrics["rewards/accuracies"] = (
            metrics["rewards/chosen"] > metrics["rewards/rejected"]
        ).float()
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
    """The same for answers with a label: both sides are the one answer, which counts for the side
    of its label.
    """

    def _metric_names(self) -> Iterator[str]:
        yield from (name for name in super()._metric_names() if name != "rewards/accuracies")

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        num_rows = len(batches.rows)
        num_desired = int(batches.table.desired[batches.rows].sum())
        totals = Totals(num_rows, (num_desired, num_rows - num_desired))
        if forward is None:
            return totals
        # Each row's second document.
        others = [[2 * rows + 1 for rows in rows_of_ranks] for rows_of_ranks in batches.rounds]
        apart = dataclasses.replace(batches, rounds=others, table=batches.table.as_documents)
        ratios = [answers.ratio().sum().double() for answers in document_logprobs(forward, apart)]
        total = (
            gather_numbers([torch.stack(ratios).sum()], forward.ranks.device).sum().item()
            / self.context.size
        )
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

    reduction = "entropy"

    def _metric_names(self) -> Iterator[str]:
        yield from (
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/region_mean",
        )
        yield from (
            "sampling/importance_sampling_ratio/mean",
            "sampling/sampling_logp_difference/mean",
        )
        yield from ["kl"] * (self.settings.beta > 0)

    def totals(self, batches: Batches, forward: ForwardPass | None = None) -> Totals:
        num_targets = batches.num_targets
        num_rows = len(batches.rows)
        longest = self.settings.max_completion_length
        divisors = {"dapo": num_targets, "grpo": num_rows, "dr_grpo": num_rows * longest}
        return Totals(divisors[self.settings.loss_type], num_targets=num_targets)

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        negative, entropy, *reference = losses
        logps = -negative
        target_values = batch.target_values
        settings = self.settings
        old_logps = target_values.get("old_logps", logps.detach())
        inputs = TokenInputs(
            logps,
            old_logps,
            reference=-reference[0].detach() if reference else None,
            # a generation of an older version lacks them
            sampled_logps=target_values.get("sampled_logps", old_logps),
            advantages=target_values.get("advantages", torch.zeros_like(entropy)),
        )
        assert self.row.token_loss is not None
        loss, metrics = self.row.token_loss(inputs, settings)
        if settings.loss_type == "grpo":  # each answer's mean
            loss = loss * target_values.get("shares", torch.zeros_like(entropy))
        is_target = batch.targets != IGNORE_INDEX
        metrics["entropy"] = entropy
        return (
            torch.stack([loss, *(metrics[name].detach() for name in self.metric_names)])
            .mul(is_target)
            .sum(dim=1)
        )


class Distillation(TokenMean):
    """The mean over target tokens of the divergence from a teacher, and of `sft_weight` times their
    own loss.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reduction = Teacher(self.settings.beta, bool(self.settings.sft_weight))

    def _metric_names(self) -> Iterator[str]:
        yield from ("divergence", "agreement", *(["nll_loss"] if self.settings.sft_weight else []))

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        sums = losses.sum(dim=1)
        loss = sums[0] + (self.settings.sft_weight or 0.0) * sums[2:].sum()
        return torch.stack([loss, *sums.detach()])


# By the name of the kind of rows, see config/objectives.py.
KINDS: dict[str, type[TokenMean]] = {
    "texts": TokenMean,
    "pairs": Pairs,
    "labels": Labels,
    "prompts": Policy,
    "taught": Distillation,
    "asked": Distillation,
}


def make_objective(
    name: str = "sft", settings: LossSettings | None = None, context: ContextGroup | None = None
) -> TokenMean:
    """The objective of this name in OBJECTIVES, with its options."""
    row = OBJECTIVES[name]
    return KINDS[row.row_kind.name](row, settings or LossSettings(), context or ContextGroup())
