"""The objective of a run at its steps: from the tokens' losses to the sum to minimize, and its metrics.

Shapes: N tokens with a target in D documents of a micro-batch; of pairs the chosen and the rejected answer take turns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from fsdp_qlora.config.objectives import LABELS, OBJECTIVES, LogProbs, LossInputs, LossSettings
from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Round
from fsdp_qlora.distributed.process_group import gather_numbers
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.training.forward import ForwardPass
from fsdp_qlora.training.head_loss import Reduction

SIDES = ("chosen", "rejected")


class Totals(NamedTuple):
    """Global counts of a step's or an evaluation's rows, which normalize the loss and the metrics.

    divisor: of the sum of all micro-batches' losses. num_of_sides: rows with a chosen answer, and with a rejected one.
    rows_per_token: rows per target token of the chosen answers. divergence: mean log-ratio of policy and reference for
    other rows' answers. num_targets: of sampled answers.
    """

    divisor: int
    num_of_sides: tuple[int, int] = (0, 0)
    rows_per_token: float = 0.0
    divergence: float = 0.0
    num_targets: int = 0


class StepObjective:
    """A row of OBJECTIVES with its options."""

    def __init__(self, name: str = "sft", settings: LossSettings | None = None) -> None:
        self.name, self.settings, self.row = name, settings or LossSettings(), OBJECTIVES[name]
        self.is_mean_over_tokens = self.row.loss is None and self.row.token_loss is None
        self.has_labels = self.row.row_kind == LABELS
        self.reduction: Reduction = "sum" if self.is_mean_over_tokens else "none" if self.row.loss else "entropy"
        self.sft_weight = self.row.sft_weight if self.settings.sft_weight is None else self.settings.sft_weight
        self.metric_names = () if self.is_mean_over_tokens else tuple(self._metric_names())

    def _metric_names(self) -> Iterator[str]:
        for side in SIDES:
            yield from (f"rewards/{side}", f"logps/{side}")
        if not self.has_labels:
            yield "rewards/accuracies"
        if self.sft_weight:
            yield "nll_loss"

    def totals(self, table: TokenizedRows, rows: np.ndarray) -> Totals:
        """Count the rows, all but the divergence."""
        if self.is_mean_over_tokens:
            return Totals(int(table.num_targets[rows].sum()))
        if self.has_labels:
            num_desired = int(table.desired[rows].sum())
            return Totals(len(rows), (num_desired, len(rows) - num_desired))
        num_chosen = int(table.document_targets[table.documents(rows)[::2]].sum())
        return Totals(len(rows), (len(rows), len(rows)), len(rows) / max(1, num_chosen))

    def with_divergence(
        self, totals: Totals, forward: ForwardPass, rounds: Iterable[Round], table: TokenizedRows
    ) -> Totals:
        """The totals with what takes a pass of its own, where rows have labels. Called on every rank."""
        if not self.has_labels:
            return totals
        others = [[2 * rows + 1 for rows in each] for each in rounds]  # each row's second document
        ratios = [found.ratio().sum().double() for found in document_logprobs(forward, others, table.as_documents)]
        total = gather_numbers([torch.stack(ratios).sum()], forward.ranks.device).sum().item() / forward.context.size
        return totals._replace(divergence=max(0.0, total / totals.divisor))

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """A micro-batch's loss, followed by its sum of each metric without gradient, float32 [1 + metrics].

        Of documents that several ranks share, each has its share of these.

        Args:
            losses: of the tokens, by `reduction`. batch: on the device.
        """
        if self.is_mean_over_tokens:
            return losses[None]
        if not batch.num_targets:  # a rank without rows in this round has tokens without a target
            return F.pad(losses.sum()[None], (0, len(self.metric_names)))
        found = self._loss_inputs(losses, batch, totals)
        assert self.row.loss is not None
        loss, metrics = self.row.loss(found, self.settings), self._metrics(found, totals)
        if self.sft_weight:  # a mean over tokens beside a mean over rows
            loss = loss + self.sft_weight * metrics["nll_loss"]
        sums = torch.stack([loss.sum(), *(metrics[name].detach().sum() for name in self.metric_names)])
        return sums / batch.context.size

    def _loss_inputs(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> LossInputs:
        documents, sides = sum_documents(losses, batch), self.row.row_kind.num_learned
        chosen, rejected = (LogProbs(*(values.view(-1, sides)[:, i] for values in documents)) for i in (0, -1))
        return LossInputs(losses, batch.num_targets, chosen, rejected, batch.desired, totals.divergence)

    def _metrics(self, found: LossInputs, totals: Totals) -> dict[str, torch.Tensor]:
        """Each row's metrics; of a row with a label both answers are the same, and one counts."""
        metrics = {}
        for side, answers in zip(SIDES, (found.chosen, found.rejected), strict=True):
            share = (found.desired if side == "chosen" else 1 - found.desired) if self.has_labels else 1.0
            logps = answers.policy / answers.tokens if self.row.score is LogProbs.mean_ratio else answers.policy
            metrics[f"rewards/{side}"] = self.settings.beta * self.row.score(answers) * share
            metrics[f"logps/{side}"] = logps * share
        if not self.has_labels:
            metrics["rewards/accuracies"] = (metrics["rewards/chosen"] > metrics["rewards/rejected"]).float()
        if self.sft_weight:
            metrics["nll_loss"] = -found.chosen.policy * totals.rows_per_token
        return metrics

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        """The metrics of rows, from the sums over all of them of what `measure` gives."""
        if self.is_mean_over_tokens:
            return {}
        counts, found = dict(zip(SIDES, totals.num_of_sides, strict=True)), {}
        for name, total in zip(self.metric_names, sums[1:], strict=True):
            count = counts.get(name.rpartition("/")[2], totals.divisor)
            found[name] = total / count if count else math.nan
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | ({"kl": totals.divergence} if self.has_labels else {})

    def describe_loss(self, loss: float) -> dict[str, float]:
        """The perplexity, if the loss of an evaluation is a mean over tokens."""
        # exp(709) is the largest that a float holds.
        return {"perplexity": math.exp(loss) if loss < 709 else math.inf} if self.is_mean_over_tokens else {}


def sum_documents(losses: torch.Tensor, batch: MicroBatch) -> LogProbs:
    """The documents of a micro-batch on the device, from the losses of its tokens, [1, N] or [2, N]."""
    documents = losses.split([*batch.num_targets, losses.shape[1] - sum(batch.num_targets)], dim=1)[:-1]
    sums = [-part.sum(dim=1) for part in documents]
    policy, *beside = batch.context.summed(torch.stack(sums, dim=1)) if sums else losses[:, :0]
    known = batch.reference if len(batch.reference) else torch.zeros_like(policy)
    return LogProbs(policy, beside[0].detach() if beside else known, batch.target_counts)


@torch.no_grad()
def document_logprobs(forward: ForwardPass, rounds: Iterable[Round], table: TokenizedRows) -> Iterator[LogProbs]:
    """The documents of this rank's micro-batches, round by round. Called on every rank."""
    forward.model.eval()
    with forward.attending():
        for rows in rounds:
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            yield sum_documents(*forward.token_losses(forward.micro_batch(rows, table), reduction="none"))


def log_probabilities(forward: ForwardPass, table: TokenizedRows) -> np.ndarray:
    """Log-probability of each document under the current weights, float32 [documents]. Called on every rank."""
    found = torch.zeros(len(table.document_targets), device=forward.ranks.device)
    rows_of = table.as_documents if len(table.desired) else table  # both documents of a row with a label
    rounds = forward.eval_rounds(np.arange(len(rows_of)), rows_of)
    shown = tqdm(rounds, "Reference", unit=" micro-batches", disable=not forward.ranks.is_rank_0)
    for rows, answers in zip(rounds, document_logprobs(forward, shown, rows_of), strict=True):
        found[torch.from_numpy(rows_of.documents(rows[forward.data_rank])).to(found.device)] = answers.policy
    reshard_all(forward.model)
    dist.all_reduce(found)  # a document has its value on the ranks that share it, and is 0 on the others
    return (found / forward.context.size).cpu().numpy()
