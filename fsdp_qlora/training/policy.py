"""The objective of answers that the policy has sampled: a loss of each token, as a row of OBJECTIVES has it."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from fsdp_qlora.config.objectives import TokenInputs
from fsdp_qlora.data.batches.micro_batch import IGNORE_INDEX, MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.training.forward import ForwardPass
from fsdp_qlora.training.objective import StepObjective, Totals


class PolicyObjective(StepObjective):
    """A row of OBJECTIVES with a loss of tokens, and its options. Rows without advantages, as of probes, count 0."""

    def _metric_names(self) -> Iterator[str]:
        yield from ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        yield from ["kl"] * (self.settings.beta > 0)
        yield from ["sampling/importance_sampling_ratio/mean"] * self.settings.correct_mismatch

    def totals(self, table: TokenizedRows, rows: np.ndarray) -> Totals:
        """The numbers of the whole step, so that its loss does not depend on how it is split."""
        num_targets, longest = int(table.num_targets[rows].sum()), self.settings.max_completion_length
        divisors = {"dapo": num_targets, "grpo": len(rows), "dr_grpo": len(rows) * longest}
        return Totals(divisors[self.settings.loss_type], num_targets=num_targets)

    def measure(self, losses: torch.Tensor, batch: MicroBatch, totals: Totals) -> torch.Tensor:
        """As of other objectives, of this rank's tokens."""
        negative, entropy, *reference = losses
        logps, answers, settings = -negative, batch.answers, self.settings
        inputs = TokenInputs(
            logps,
            old_logps=answers.get("old_logps", logps.detach()),
            reference=-reference[0].detach() if reference else None,
            sampled_logps=answers.get("sampled_logps", logps.detach()) if settings.correct_mismatch else None,
            advantages=answers.get("advantages", torch.zeros_like(entropy)),
        )
        assert self.row.token_loss is not None
        loss, metrics = self.row.token_loss(inputs, settings)
        if settings.loss_type == "grpo":  # each answer's mean
            loss = loss * answers.get("shares", torch.zeros_like(entropy))
        is_target, metrics["entropy"] = batch.targets != IGNORE_INDEX, entropy
        return torch.stack([loss, *(metrics[name].detach() for name in self.metric_names)]).mul(is_target).sum(dim=1)

    def means(self, sums: Sequence[float], totals: Totals) -> dict[str, float]:
        """The metrics, each a mean over tokens."""
        return {name: total / totals.num_targets for name, total in zip(self.metric_names, sums[1:], strict=True)}


@torch.no_grad()
def token_logprobs(forward: ForwardPass, table: TokenizedRows) -> np.ndarray:
    """Log-probability of each learned token under the current weights, float32 [tokens], 0 of others.

    Called on every rank, with the same rows.
    """
    found = torch.zeros(len(table.input_ids), device=forward.ranks.device)
    table = dataclasses.replace(table, advantages=np.zeros(len(table), np.float32))
    forward.model.eval()
    with forward.attending():
        for rows in forward.eval_rounds(np.arange(len(table)), table):
            forward.heartbeat.beat(forward.heartbeat.step, "compute")
            losses, batch = forward.token_losses(forward.micro_batch(rows, table), reduction="none", alone=True)
            found[batch.answers["table_indices"]] = -losses[0]  # padding has index 0 and loss 0
    reshard_all(forward.model)
    dist.all_reduce(found)  # a token is a target on one rank
    return found.cpu().numpy()
