"""The top tokens of a model in the place of each target, such as a teacher's for its student.

Suffixes of tensors: training/token_loss.py and, besides them, one letter for each dim:

    K  top tokens of each token
    G  ranks that share the head
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.training.divergence import LEAST, take_outcomes
from fsdp_qlora.training.token_loss import Head, HeadPass, Vocabulary


@dataclass(frozen=True)
class TopTokens:
    """The k top tokens among the first `vocabulary` ones, without gradient; a `TokenLoss`.

    Values of a token: k ids, their log-probabilities, and the log-probability of all other tokens,
    in the order of `Divergence`.
    """

    k: int
    vocabulary: int
    """A teacher may know more tokens than its student."""

    is_summed = False
    needs_chunks = True
    num_logits = 1

    @property
    def num_values(self) -> int:
        return 2 * self.k + 1

    def with_values(self, values: Mapping[str, Tensor]) -> "TopTokens":
        return self

    def passes(self, states: Sequence[Tensor], head: Head) -> list[HeadPass]:
        return [HeadPass(states[0], head, self)]

    def of_part(self, part: slice, vocabulary: Vocabulary) -> "TopTokens":
        return self

    def of_chunk(
        self, hidden_CH: Tensor, targets_C: Tensor, head: Head, scale: float | None
    ) -> tuple[Tensor, None]:
        assert scale is None, "top tokens have no gradient"
        # The outputs have no name, which would keep them beside their float32 copy.
        found_CR = self._of_logits(head.form.logits(head.outputs(hidden_CH)), head.vocabulary)
        return head.vocabulary.local_chunk(found_CR).T, None

    def _of_logits(self, logits_CV: Tensor, vocabulary: Vocabulary) -> Tensor:
        """The values, float32 [C, 2 * k + 1]. logits_CV: float32, overwritten."""
        k = self.k
        logits_CV[:, max(0, self.vocabulary - vocabulary.first) :] = -torch.inf
        # The top tokens of all are among those of each rank's part, which may have fewer than k.
        values, places = logits_CV.topk(min(k, logits_CV.shape[1]), dim=1)
        # One all-gather for both. Ids are exact in float32 up to 2^24.
        pairs_2CK = torch.stack([values, (places + vocabulary.first).float()])
        missing = k - pairs_2CK.shape[2]
        pairs_2CK = F.pad(pairs_2CK, (0, missing), value=-torch.inf)
        # Tokens come first, since all_gather concatenates along the first dim.
        gathered = vocabulary.all_gather(pairs_2CK.transpose(0, 1))
        pairs_GC2K = gathered.view(-1, len(logits_CV), 2, k)
        values, ids = pairs_GC2K.permute(2, 1, 0, 3).flatten(2)
        values_CK, best_CK = values.topk(k, dim=1)
        ids_CK = ids.gather(1, best_CK)
        exponentials_CV = logits_CV.sub_(values_CK[:, :1]).exp_()
        outcomes_CL, *_ = take_outcomes(exponentials_CV, ids_CK.long(), vocabulary)
        logps_CL = (outcomes_CL / outcomes_CL.sum(dim=1, keepdim=True)).clamp_min_(LEAST).log_()
        return torch.cat([ids_CK, logps_CL], dim=1)

    def of_whole_logits(self, logits: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        raise NotImplementedError
