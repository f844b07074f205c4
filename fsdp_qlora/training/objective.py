"""The objective of a run at its steps: from the tokens' losses to the sum to minimize, and its metrics.

Shapes: N tokens with a target in D documents of a micro-batch; of pairs the chosen and the rejected answer take turns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fsdp_qlora.config.objectives import LABELS, OBJECTIVES, PAIRS, TEXTS, Answers, LossSettings
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.sharding.reference import ReferencePass

SIDES = ("chosen", "rejected")


class Totals(NamedTuple):
    """Of a step's or an evaluation's rows, on all ranks. divisor: of the sum of all micro-batches' losses.

    num_of_sides: rows with a chosen answer, and with a rejected one. rows_per_token: rows per target token of the
    chosen answers. divergence: mean log-ratio of policy and reference for other rows' answers.
    """

    divisor: int
    num_of_sides: tuple[int, int] = (0, 0)
    rows_per_token: float = 0.0
    divergence: float = 0.0


class StepObjective:
    """A row of OBJECTIVES with its options.

    reference: what the policy is compared with, if it is. of_each: if it needs each token's loss, and not their sum
    alone.
    """

    def __init__(
        self, name: str = "sft", settings: LossSettings | None = None, reference: ReferencePass | None = None
    ) -> None:
        self.name, self.settings, self.reference = name, settings or LossSettings(), reference
        self.row = OBJECTIVES[name]
        self.of_each = self.row.needs != TEXTS
        self.sft_weight = self.row.sft_weight if self.settings.sft_weight is None else self.settings.sft_weight
        nobody = Answers(*torch.zeros(3, 0))
        self.metric_names = tuple(self._measure(nobody, nobody, nobody.policy, Totals(1))[1]) if self.of_each else ()

    def totals(self, data: TokenizedRows, rows: np.ndarray, sum_of_ratios: Callable[[], float] = float) -> Totals:
        """What all micro-batches of these rows must know of each other.

        Args:
            sum_of_ratios: computes the sum of the log-ratios of the rows' second documents, where they are needed.
        """
        if not self.of_each:
            return Totals(int(data.num_targets[rows].sum()))
        if self.row.side is None:
            num_chosen = int(data.document_targets[data.documents(rows, 0)].sum())
            return Totals(len(rows), (len(rows), len(rows)), len(rows) / max(1, num_chosen))
        num_desired = int(data.desired[rows].sum())
        divergence = max(0.0, sum_of_ratios() / len(rows))
        return Totals(len(rows), (num_desired, len(rows) - num_desired), divergence=divergence)

    def measure(
        self, losses: torch.Tensor, micro_batch: Mapping[str, Any], totals: Totals, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Of a micro-batch the loss and then, without gradient, each metric's sum over its rows, float32.

        Args:
            losses: of the tokens, [1, N], or [2, N] with the reference's; only their sum unless `of_each`.
            inputs: `of_rows` of this micro-batch, on the device; none unless `of_each`.
        """
        if not inputs:
            return losses[None]
        if not micro_batch["num_targets"]:  # a rank without rows in this turn has tokens without a target
            return F.pad(losses.sum()[None], (0, len(self.metric_names)))
        answers, sides = self.answers(losses, micro_batch, inputs), 2 if self.row.side is None else 1
        first, last = (Answers(*(values.view(-1, sides)[:, i] for values in answers)) for i in (0, -1))
        loss, metrics = self._measure(first, last, inputs["desired"], totals)
        return torch.stack([loss.sum(), *(metrics[name].detach().sum() for name in self.metric_names)])

    def answers(
        self, losses: torch.Tensor, micro_batch: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
    ) -> Answers:
        """Each document of a micro-batch; the arguments are those of `measure`."""
        num_targets, known = micro_batch["num_targets"], inputs["reference"]
        documents = losses.split([*num_targets, losses.shape[1] - sum(num_targets)], dim=1)[:-1]
        sums = [-part.sum(dim=1) for part in documents]
        policy, *beside = torch.stack(sums, dim=1) if sums else losses[:, :0]
        reference = beside[0].detach() if beside else known if len(known) else torch.zeros_like(policy)
        return Answers(policy, reference, inputs["num_targets"])

    def _measure(
        self, first: Answers, last: Answers, desired: torch.Tensor, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each row, and its metrics; of a row with a label both answers are the same, and one counts."""
        assert self.row.loss is not None
        shares: tuple[Any, Any] = (1.0, 1.0)
        if self.row.needs == LABELS:
            loss, shares = self.row.loss(first, desired, totals.divergence, self.settings), (desired, 1 - desired)
        else:
            loss = self.row.loss(first, last, self.settings)
        metrics: dict[str, torch.Tensor] = {}
        for side, answers, share in zip(SIDES, (first, last), shares, strict=True):
            logps = answers.policy / answers.tokens if self.row.score is Answers.mean_ratio else answers.policy
            metrics[f"rewards/{side}"] = self.settings.beta * self.row.score(answers) * share
            metrics[f"logps/{side}"] = logps * share
        if self.row.needs == PAIRS:
            metrics["rewards/accuracies"] = (metrics["rewards/chosen"] > metrics["rewards/rejected"]).float()
        if self.sft_weight:  # a mean over tokens beside a mean over rows
            metrics["nll_loss"] = -first.policy * totals.rows_per_token
            loss = loss + self.sft_weight * metrics["nll_loss"]
        return loss, metrics

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        """The metrics of rows, from the sums over all of them of what `measure` gives."""
        if not self.of_each:
            return {}
        counts, found = dict(zip(SIDES, totals.num_of_sides, strict=True)), {}
        for name, total in zip(self.metric_names, sums[1:], strict=True):
            count = counts.get(name.rpartition("/")[2], totals.divisor)
            found[name] = total / count if count else math.nan
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | ({"kl": totals.divergence} if self.row.needs == LABELS else {})

    def describe_loss(self, loss: float) -> dict[str, float]:
        """What else an evaluation's loss says: the perplexity, if it is a mean over tokens."""
        # exp(709) is the largest that a float holds.
        return {} if self.of_each else {"perplexity": math.exp(loss) if loss < 709 else math.inf}
