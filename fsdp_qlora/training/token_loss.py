"""The interface between a model's head and the losses of its tokens.

training/head_loss.py computes any `TokenLoss` over chunks of tokens, and knows none by name:
cross_entropy.py, divergence.py and top_tokens.py have them.

Suffixes of tensors, one letter for each dim:

    N  tokens with a target on this rank
    C  tokens of a chunk; where ranks share a head, the chunks of all of them, one after another
    H  hidden size
    V  vocabulary; where ranks share a head, the rows of it that this rank has
    R  values of a token, such as a loss and an entropy

targets_N is int64. Where ranks share a head, N is the same on all of them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.model.adapters.token_rows import TokenRows
from fsdp_qlora.sharding.vocabulary import SharedHead


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

    def reduce_scatter_grad(self, grad: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(grad, weight, out=out)


Vocabulary = SharedHead | WholeVocabulary


class LogitForm(NamedTuple):
    """The way from a head's outputs to a model's logits.

    scale * output, and with a cap, cap * tanh(scale * output / cap); then divided by the
    temperature. The scale is granite's and cohere's, the cap gemma2's.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def logits(self, outputs: Tensor) -> Tensor:
        """Float32; may be `outputs` itself, changed."""
        # float() copies 16-bit outputs. The other operations are in place, since a copy would be as
        # large as the chunk.
        logits = outputs.float()
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of logits by outputs."""
        scale = self.scale / self.temperature
        if self.cap is None:
            return scale
        # tanh' = 1 - tanh^2, and the logits are cap * tanh: the outputs are not needed again.
        cap = self.cap / self.temperature
        return torch.square(logits / cap).neg_().add_(1.0).mul_(scale)


class Head(NamedTuple):
    """A model's head."""

    weight_VH: Tensor
    bias_V: Tensor | None
    form: LogitForm
    vocabulary: Vocabulary

    def outputs(self, hidden_CH: Tensor) -> Tensor:
        """The outputs for hidden states of the weight's dtype, [C, V], of which `form` makes
        logits.
        """
        return F.linear(hidden_CH, self.weight_VH, self.bias_V)

    def to(self, dtype: torch.dtype) -> "Head":
        """The head with its weights in `dtype`."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return self._replace(weight_VH=self.weight_VH.to(dtype), bias_V=bias_V)


def whole_head(
    weight_VH: Tensor,
    bias_V: Tensor | None = None,
    form: LogitForm | None = None,
    new_rows: TokenRows | None = None,
) -> Head:
    """A head that this rank has whole.

    new_rows: trained rows of new tokens, which the weight has already.
    """
    vocabulary = WholeVocabulary(len(weight_VH), new_rows)
    return Head(weight_VH, bias_V, form or LogitForm(), vocabulary)


class TokenLoss(Protocol):
    """A loss of tokens with a target, or other values of them, by the head's outputs."""

    @property
    def is_summed(self) -> bool:
        """Whether the sum over the tokens is wanted, and not the values of each."""

    @property
    def num_values(self) -> int:
        """Values of each token, without a reference's."""

    @property
    def needs_chunks(self) -> bool:
        """Whether it cannot be computed of whole logits, which would be too large for it."""

    @property
    def num_logits(self) -> int:
        """Memory that a token of a chunk takes, in logits of the vocabulary."""

    def with_values(self, values: Mapping[str, Tensor]) -> "TokenLoss":
        """The loss with what it reads of a micro-batch's `target_values`, [N, ..] each."""

    def passes(self, states: Sequence[Tensor], head: Head) -> Sequence["HeadPass"]:
        """The hidden states that go through the head, each with its loss.

        Args:
            states: the policy's [N, H], and behind them a reference's or a teacher's.
        """

    def of_part(self, part: slice, vocabulary: Vocabulary) -> "TokenLoss":
        """The loss of some of the N tokens, with those of all ranks that share the vocabulary."""

    def of_chunk(
        self, hidden_CH: Tensor, targets_C: Tensor, head: Head, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the values of a chunk's tokens.

        Tensors of [C, V] are changed in place, and none of them outlives the call but the gradient.

        Args:
            scale: multiplies the gradient; None if no gradient is wanted.
        Returns:
            The values of this rank's tokens, float32 [R, ..], the first 0 without a target; and
            the gradient of the first one's sum by the head's outputs, [C, V], in their dtype.
        """

    def of_whole_logits(self, logits: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        """Compute the same of a model's own logits, with torch's autograd.

        Args:
            logits: the policy's and behind them a reference's, [copies * N, V].
        Raises:
            NotImplementedError: it `needs_chunks`.
        """


class HeadPass(NamedTuple):
    """Hidden states [N, H] on their way through the head to a loss."""

    hidden_NH: Tensor
    head: Head
    loss: TokenLoss
