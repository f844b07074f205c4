"""The losses of the service's training requests: sums over tokens, never means.

Each gets p, the log-probabilities of the targets [T], and the request's tensors, such as
`logprobs`, the same of the policy that drew the tokens, and `advantages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fsdp_qlora.config.objectives import clipped_loss, weighted_loss

Documents = Callable[[Tensor], Tensor]
"""Values of tokens [T] -> at each token the sum over its document's tokens, [T]."""
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss. sum: gives a value for each token, [T].

    tensors: that a request must have. optional: tensors, 1 where they are missing.

    config: numbers with their defaults.
    """

    sum: Callable[[Tensor, Values, Mapping[str, float], Documents], Tensor]
    tensors: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)


def _cross_entropy(
    p: Tensor, given: Values, config: Mapping[str, float], documents: Documents
) -> Tensor:
    return -p * given["weights"]


def _importance_sampling(
    p: Tensor, given: Values, config: Mapping[str, float], documents: Documents
) -> Tensor:
    return -(p - given["logprobs"]).exp() * given["advantages"]


def _clipped(ratio: Tensor, given: Values, config: Mapping[str, float]) -> Tensor:
    low = config["clip_low_threshold"]
    high = config["clip_high_threshold"]
    return clipped_loss(ratio, given["advantages"], low, high)


def _ppo(p: Tensor, given: Values, config: Mapping[str, float], documents: Documents) -> Tensor:
    """Schulman et al. 2017."""
    return _clipped((p - given["logprobs"]).exp(), given, config)


def _gspo(p: Tensor, given: Values, config: Mapping[str, float], documents: Documents) -> Tensor:
    """Zheng et al. 2025, in its form for tokens (GSPO-token).

    A document's ratio is the geometric mean of its tokens' ratios.
    """
    mask = given["sequence_ratio_mask"]
    total = documents((p.detach() - given["logprobs"]) * mask)
    count = documents(mask)
    # p - p.detach() is 0: the value is the document's ratio, the gradient that of the token's p.
    return _clipped((total / count.clamp(min=1) + p - p.detach()).exp(), given, config)


def _cispo(p: Tensor, given: Values, config: Mapping[str, float], documents: Documents) -> Tensor:
    """MiniMax 2025."""
    ratio = (p - given["logprobs"]).exp()
    low = config["clip_low_threshold"]
    high = config["clip_high_threshold"]
    return weighted_loss(p, ratio, given["advantages"], low, high)


def _dro(p: Tensor, given: Values, config: Mapping[str, float], documents: Documents) -> Tensor:
    """Richemond et al. 2024."""
    return 0.5 * config["beta"] * (p - given["logprobs"]).square() - p * given["advantages"]


# Thresholds of the ratio itself, not of its distance from 1.
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(_cross_entropy, (), ("weights",)),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, config=_CLIP),
    "cispo": Loss(_cispo, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, config={"beta": 0.05}),
    "gspo": Loss(_gspo, optional=("sequence_ratio_mask",), config=_CLIP),
}
