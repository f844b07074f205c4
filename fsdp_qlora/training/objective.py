"""The objective of a run at its steps: from the tokens' losses to the sum to minimize, and its metrics.

Shapes: N tokens with a target in D documents of a micro-batch; of pairs the chosen and the rejected answer take turns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fsdp_qlora.config.objectives import LABELS, OBJECTIVES, TEXTS, Answers, LossSettings, label_metrics, pair_metrics
from fsdp_qlora.data.rows import TokenizedRows
from fsdp_qlora.sharding.reference import ReferencePass


class Totals(NamedTuple):
    """Of a step's or an evaluation's rows, on all ranks. divisor: of the sum of all micro-batches' losses.

    rows_per_token: rows per target token of the chosen answers. divergence: mean log-ratio of policy and reference for
    other rows' answers. num_desired: rows with that label.
    """

    divisor: int
    rows_per_token: float = 0.0
    divergence: float = 0.0
    num_desired: int = 0


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
        self.side = 0 if self.row.needs == LABELS else None  # the documents to learn from: one of each row, or all
        nobody = Answers(*torch.zeros(3, 0))
        self.metric_names = tuple(self._measure(nobody, nobody, nobody.policy, Totals(1))[1]) if self.of_each else ()

    def totals(self, data: TokenizedRows, rows: np.ndarray, sum_of_ratios: Callable[[], float] = float) -> Totals:
        """What all micro-batches of these rows must know of each other.

        Args:
            sum_of_ratios: computes the sum of the log-ratios of the rows' second documents, where they are needed.
        """
        if not self.of_each:
            return Totals(int(data.num_targets[rows].sum()))
        if self.side is None:
            num_chosen = int(data.document_targets[data.documents(rows, 0)].sum())
            return Totals(len(rows), len(rows) / max(1, num_chosen))
        divergence = max(0.0, sum_of_ratios() / len(rows))
        return Totals(len(rows), divergence=divergence, num_desired=int(data.desired[rows].sum()))

    def inputs(self, micro_batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What `measure` needs on the device."""
        names = ("num_targets", "desired", "reference") if self.of_each else ()
        return {f"{name}_of_rows": torch.tensor(micro_batch[name], dtype=torch.float32) for name in names}

    def measure(
        self, losses: torch.Tensor, micro_batch: Mapping[str, Any], totals: Totals, inputs: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Of a micro-batch the loss and then, without gradient, each metric's sum over its rows, float32.

        Args:
            losses: of the tokens, [1, N], or [2, N] with the reference's; only their sum unless `of_each`.
            inputs: of this micro-batch, on the device.
        """
        if not inputs:
            return losses[None]
        if not micro_batch["num_targets"]:  # a rank without rows in this turn has tokens without a target
            return F.pad(losses.sum()[None], (0, len(self.metric_names)))
        answers, sides = self.answers(losses, micro_batch, inputs), 2 if self.side is None else 1
        first, last = (Answers(*(values.view(-1, sides)[:, i] for values in answers)) for i in (0, -1))
        loss, metrics = self._measure(first, last, inputs["desired_of_rows"], totals)
        return torch.stack([loss.sum(), *(metrics[name].detach().sum() for name in self.metric_names)])

    def answers(
        self, losses: torch.Tensor, micro_batch: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
    ) -> Answers:
        """Each document of a micro-batch; the arguments are those of `measure`."""
        num_targets, known = micro_batch["num_targets"], inputs["reference_of_rows"]
        documents = losses.split([*num_targets, losses.shape[1] - sum(num_targets)], dim=1)[:-1]
        sums = [-part.sum(dim=1) for part in documents]
        policy, *beside = torch.stack(sums, dim=1) if sums else losses[:, :0]
        reference = beside[0].detach() if beside else known if len(known) else torch.zeros_like(policy)
        return Answers(policy, reference, inputs["num_targets_of_rows"])

    def _measure(
        self, first: Answers, last: Answers, desired: torch.Tensor, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each row, and its metrics; of a row with a label both answers are the same."""
        assert self.row.loss is not None
        if self.row.needs == LABELS:
            loss = self.row.loss(first, desired, totals.divergence, self.settings)
            about = (totals.divisor, totals.divergence)
            return loss, label_metrics(first, desired, totals.num_desired, about, self.settings)
        loss = self.row.loss(first, last, self.settings)
        metrics = pair_metrics(self.row, first, last, self.settings)
        if self.sft_weight:  # a mean over tokens beside a mean over rows
            metrics["nll_loss"] = -first.policy * totals.rows_per_token
            loss = loss + self.sft_weight * metrics["nll_loss"]
        return loss, metrics

    def means(self, sums: Sequence[float], num_rows: int) -> dict[str, float]:
        """The metrics of rows, from the sums over all of them of what `measure` gives."""
        return {name: total / num_rows for name, total in zip(self.metric_names, sums[1:], strict=True)}

    def describe_loss(self, loss: float) -> dict[str, float]:
        """What else an evaluation's loss says: the perplexity, if it is a mean over tokens."""
        # exp(709) is the largest that a float holds.
        return {} if self.of_each else {"perplexity": math.exp(loss) if loss < 709 else math.inf}
