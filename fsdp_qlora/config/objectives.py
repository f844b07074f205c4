"""The objectives of `--objective`: their rows, and losses of log-probabilities of answers.

The functions use methods of tensors alone, so that the options can name the table without importing
torch. Names and defaults are TRL's, where it has them. R is the number of rows (pairs) of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fsdp_qlora.config.train_types import TrainType

if TYPE_CHECKING:
    import torch


_FULL_LR = 1e-5  # the default of lr where all weights train
# The default of epsilon, and where the loss type has another: the range of the paper (Zheng et al.
# 2025, 5.1), and the largest ratio that ScaleRL found (Khatri et al. 2025), as TRL recommends.
_EPSILON = (0.2,)
_EPSILONS = {"gspo": (3e-4, 4e-4), "cispo": (5.0,)}


class RowKind(NamedTuple):
    """A kind of rows that objectives learn from.

    num_documents: texts of a row. num_learned: those of them that are learned from. described: in
    messages. objective: one that learns from such rows. is_sampled: they are completions that the
    model gives during training. has_teacher: the second document is the same answer to the
    teacher's prompt. shares_prompts: documents that are learned from may have a prompt in common.
    """

    name: str
    num_documents: int
    num_learned: int
    described: str
    objective: str
    is_sampled: bool = False
    has_teacher: bool = False
    shares_prompts: bool = False


TEXTS = RowKind("texts", 1, 1, "texts", "sft")
PAIRS = RowKind("pairs", 2, 2, "preferences (chosen and rejected)", "dpo", shares_prompts=True)
# The second document is another row's answer to the same prompt.
LABELS = RowKind("labels", 2, 1, "answers with a label", "kto")
PROMPTS = RowKind("prompts", 1, 1, "prompts", "grpo", is_sampled=True, shares_prompts=True)
_PROMPT = "a teacher_prompt or a teacher_system"
TEACHER_ROWS = RowKind("teacher_rows", 2, 1, f"texts with {_PROMPT}", "distill", has_teacher=True)
TEACHER_PROMPTS = RowKind(
    "teacher_prompts",
    2,
    1,
    f"prompts with {_PROMPT}",
    "distill_on_policy",
    is_sampled=True,
    has_teacher=True,
)


@dataclass(frozen=True)
class LossSettings:
    """The options of the objectives; the help of each says what it means."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float | None = None
    simpo_gamma: float = 0.5
    kto_weights: Sequence[float] = (1.0, 1.0)
    epsilon: Sequence[float] = (0.2,)
    max_completion_length: int = 512
    rollout_url: str | None = None


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    # -log(1 + exp(-x)); logaddexp does not overflow where exp(-x) would
    return -(-x).logaddexp(x.new_zeros(()))


# --- losses of a margin, by --loss_type ---


def sigmoid(margin: torch.Tensor, s: LossSettings) -> torch.Tensor:
    """DPO (Rafailov et al. 2023, eq. 7); with label smoothing conservative DPO (Mitchell 2023)."""
    x = s.beta * margin
    flipped = s.label_smoothing
    return -(1 - flipped) * log_sigmoid(x) - flipped * log_sigmoid(-x)


def hinge(margin: torch.Tensor, s: LossSettings) -> torch.Tensor:
    """SLiC (Zhao et al. 2023), of normalized likelihoods as in RSO (Liu et al. 2023)."""
    return (1 - s.beta * margin).relu()


def robust(margin: torch.Tensor, s: LossSettings) -> torch.Tensor:
    """Robust DPO (Chowdhury et al. 2024).

    It is unbiased if the share `label_smoothing` of the pairs is the wrong way round.
    """
    x = s.beta * margin
    flipped = s.label_smoothing
    # Its expectation over flips is the loss of the true pairs. At 0.5 the labels say nothing, which
    # is why label_smoothing stays below.
    return (flipped * log_sigmoid(-x) - (1 - flipped) * log_sigmoid(x)) / (1 - 2 * flipped)


LOSS_TYPES = {"sigmoid": sigmoid, "hinge": hinge, "robust": robust, "sigmoid_norm": sigmoid}


class LogProbs(NamedTuple):
    """Log-probabilities of R answers, each tensor float32 [R].

    policy, reference: the sum over the answer's tokens; 0 where there is no reference. tokens:
    their number.
    """

    policy: torch.Tensor
    reference: torch.Tensor
    tokens: torch.Tensor

    def ratio(self) -> torch.Tensor:
        return self.policy - self.reference

    def mean_ratio(self) -> torch.Tensor:
        return self.ratio() / self.tokens


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss: the R rows of a micro-batch.

    token_losses: -log p of each target on this rank, float32 [1, N], or [2, N] with the
    reference's. num_targets: of each document, on this rank. chosen, rejected: the answers of
    pairs; with labels both are the one answer. desired: the labels, 1 or 0, [R].
    divergence: mean log-ratio of other rows' answers, at least 0, where rows have labels.
    """

    token_losses: torch.Tensor
    num_targets: Sequence[int]
    chosen: LogProbs
    rejected: LogProbs
    desired: torch.Tensor
    divergence: float = 0.0


class TokenInputs(NamedTuple):
    """The learned tokens of sampled answers, each tensor float32 [N].

    logps: log-probabilities under the policy. old_logps: when the answers were sampled. reference:
    under the reference; None without one. sampled_logps: the engine's own. advantages: of the
    answers. answer_mean: gives at each token the mean of values [N] over its answer's tokens.
    """

    logps: torch.Tensor
    old_logps: torch.Tensor
    reference: torch.Tensor | None
    sampled_logps: torch.Tensor
    advantages: torch.Tensor
    answer_mean: Callable[[torch.Tensor], torch.Tensor]


class Reference(Enum):
    """The model that the policy is compared with."""

    NONE = "none"
    BASE = "base"
    """The policy without its adapter."""
    START = "start"
    """The policy with the adapter that training starts from, which is kept once more."""


class ObjectiveOptions(Protocol):
    """The options that decide, with the objective, what a run needs; `TrainConfig` has them."""

    @property
    def kind(self) -> TrainType: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def init_lora_weights(self) -> str: ...
    @property
    def teacher(self) -> str | None: ...
    @property
    def precompute_reference(self) -> bool: ...
    @property
    def num_generations(self) -> int: ...
    @property
    def beta(self) -> float | None: ...
    @property
    def loss_type(self) -> str: ...
    @property
    def epsilon(self) -> tuple[float, ...]: ...
    @property
    def lr(self) -> float | None: ...


class DecidedOptions(NamedTuple):
    """Options whose default the objective decides, as they are used."""

    lr: float
    beta: float
    loss_type: str
    epsilon: tuple[float, ...]


@dataclass(frozen=True)
class Objective:
    """One row of the table. What a run needs for its objective, it asks of this row."""

    row_kind: RowKind
    """A row, unless another model teaches: see `kind_of_rows`."""
    loss: Callable[[LossInputs, LossSettings], torch.Tensor] | None = None
    """The loss of each row, [R]; None for the mean over target tokens."""
    has_reference: bool = False
    """Whether it compares with the model that training starts from, unless beta is 0."""
    score: Callable[[LogProbs], torch.Tensor] = LogProbs.ratio
    """The score of an answer, whose product with beta is its reward in the metrics."""
    options: tuple[str, ...] = ()
    """The options that it reads."""
    sft_weight: float = 0.0
    """The default of `sft_weight`."""
    beta: float = 0.1
    """The default of `beta`."""
    loss_types: tuple[str, ...] = tuple(LOSS_TYPES)
    """The values of `loss_type`, the default first."""
    adapter_lr: float = 1e-5
    """The default of `lr` where an adapter or new blocks train. Preferences and rewards need
    smaller steps than texts.
    """
    token_loss: (
        Callable[[TokenInputs, LossSettings], tuple[torch.Tensor, dict[str, torch.Tensor]]] | None
    ) = None
    """Instead of a loss of rows, one of each token, [N], and its metrics."""

    @property
    def distills(self) -> bool:
        """Whether it learns from a teacher."""
        return "teacher" in self.options

    def kind_of_rows(self, options: ObjectiveOptions) -> RowKind:
        """The kind of rows that it learns from."""
        if not options.teacher:
            return self.row_kind
        # Another model as the teacher reads the student's prompt: rows have no second document.
        return PROMPTS if self.row_kind.is_sampled else TEXTS

    def answers_per_prompt(self, options: ObjectiveOptions) -> int:
        """Completions of a prompt in a step."""
        return 1 if self.distills else options.num_generations

    def decided(self, options: ObjectiveOptions) -> DecidedOptions:
        """The options whose default it decides."""
        lr = options.lr
        if lr is None:
            lr = _FULL_LR if options.kind.trains == "all" else self.adapter_lr
        beta = self.beta if options.beta is None else options.beta
        loss_type = self.loss_types[0] if options.loss_type == "auto" else options.loss_type
        epsilon = options.epsilon or _EPSILONS.get(loss_type, _EPSILON)
        return DecidedOptions(lr, beta, loss_type, epsilon)

    def reference(self, options: ObjectiveOptions) -> Reference:
        """The model to compare with, or the base that teaches itself."""
        if not self.has_reference or options.teacher:
            return Reference.NONE
        if not self.distills and not self.decided(options).beta > 0:
            return Reference.NONE
        # An adapter with B = 0 adds nothing, so that the base is the start.
        starts_from_base = options.adapter is None and options.init_lora_weights == "true"
        return Reference.BASE if starts_from_base else Reference.START

    def reference_beside(self, options: ObjectiveOptions) -> Reference:
        """The reference that passes through the model beside the policy."""
        return Reference.NONE if options.precompute_reference else self.reference(options)


# --- losses of pairs, by --objective ---


def margin_loss(x: LossInputs, s: LossSettings) -> torch.Tensor:
    """The loss of the difference between chosen and rejected log-ratios.

    sigmoid_norm takes their means over tokens.
    """
    score = LogProbs.mean_ratio if s.loss_type == "sigmoid_norm" else LogProbs.ratio
    return LOSS_TYPES[s.loss_type](score(x.chosen) - score(x.rejected), s)


def ipo(x: LossInputs, s: LossSettings) -> torch.Tensor:
    """Azar et al. 2023, eq. 17, of means over tokens."""
    return (x.chosen.mean_ratio() - x.rejected.mean_ratio() - 1 / (2 * s.beta)).square()


def simpo(x: LossInputs, s: LossSettings) -> torch.Tensor:
    """Meng et al. 2024, eq. 6."""
    return sigmoid(x.chosen.mean_ratio() - x.rejected.mean_ratio() - s.simpo_gamma / s.beta, s)


def orpo(x: LossInputs, s: LossSettings) -> torch.Tensor:
    """Hong et al. 2024, eq. 7: the ratio of the odds p / (1 - p) of both answers.

    p is the geometric mean of an answer's probabilities.
    """
    # Without a reference mean_ratio is log p. expm1, as 1 - exp would round to 0 for p near 1.
    log_odds = [
        answer.mean_ratio() - answer.mean_ratio().expm1().neg().log()
        for answer in (x.chosen, x.rejected)
    ]
    return -s.beta * log_sigmoid(log_odds[0] - log_odds[1])


def kto(x: LossInputs, s: LossSettings) -> torch.Tensor:
    """Ethayarajh et al. 2024, eq. 8.

    The loss grows with the distance of an answer's log-ratio from the divergence on the wrong side.
    """
    # 2 * desired - 1 is +1 for a desired answer and -1 for another
    distance = (2 * x.desired - 1) * s.beta * (x.chosen.ratio() - x.divergence)
    weight = x.desired * s.kto_weights[0] + (1 - x.desired) * s.kto_weights[-1]
    return weight * (1 - distance.sigmoid())


# --- of tokens ---

MOST_CORRECTED = 3.0  # ratio of the policy's probability to the engine's; TRL's default


def clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, lowest: float, highest: float
) -> torch.Tensor:
    """Schulman et al. 2017, eq. 7, of each token. ratio: of the policy's probability to the old."""
    return -(ratio * advantages).minimum(ratio.clamp(lowest, highest) * advantages)


def weighted_loss(
    logps: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    lowest: float,
    highest: float,
) -> torch.Tensor:
    """CISPO (MiniMax 2025, eq. 4), of each token. ratio: of the policy's probability to the old.

    The clipped ratio is a weight without a gradient, so that clipped tokens learn, too.
    """
    return -ratio.detach().clamp(lowest, highest) * logps * advantages


def policy_loss(x: TokenInputs, s: LossSettings) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each token by `loss_type`, with TRL's names of its metrics.

    What a server samples with other probabilities than the policy's is weighed by truncated
    importance sampling (Yao et al. 2025). So is what older weights have sampled, apart from the
    ratio that is clipped (Hilton et al. 2022, Fu et al. 2025). The rounding of the run's own model
    is only measured, as by TRL: where the old log-probabilities are the step's, weights would add
    the noise of its dropout.
    """
    log_ratio = x.logps - x.old_logps
    if s.loss_type == "gspo":
        # Of the whole answer, by its length (Zheng et al. 2025, eq. 7); all its tokens have it.
        log_ratio = x.answer_mean(log_ratio)
    ratio = log_ratio.exp()
    loss, metrics = _clipped(ratio, x, s)
    mismatch = x.old_logps - x.sampled_logps
    weight = mismatch.exp().clamp(max=MOST_CORRECTED)
    metrics["sampling/importance_sampling_ratio/mean"] = weight
    metrics["sampling/sampling_logp_difference/mean"] = mismatch.abs()
    if s.rollout_url:
        loss = loss * weight
    if x.reference is not None:
        difference = x.reference - x.logps
        # Schulman 2020, k3; times the ratio it has the gradient of the divergence itself
        # (DeepSeek-AI 2025, V3.2).
        metrics["kl"] = ratio * (difference.exp() - difference - 1)
        loss = loss + s.beta * metrics["kl"]
    return loss, metrics


def _clipped(
    ratio: torch.Tensor, x: TokenInputs, s: LossSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of each token, and whether it is clipped.

    Shao et al. 2024, eq. 3, whose upper clip may be a higher one (Yu et al. 2025); or CISPO.
    """
    # one number is for both sides
    low = s.epsilon[0]
    high = s.epsilon[-1]
    if s.loss_type == "cispo":
        is_clipped = (ratio > high) & (x.advantages > 0)
        loss = weighted_loss(x.logps, ratio, x.advantages, 0.0, high)
        return loss, {"cispo_clip_ratio": is_clipped.float()}
    # A clipped token has no gradient: the minimum takes the constant where the ratio has already
    # moved in the advantage's direction.
    is_low = (ratio < 1 - low) & (x.advantages < 0)
    is_high = (ratio > 1 + high) & (x.advantages > 0)
    metrics = {
        "clip_ratio/low_mean": is_low.float(),
        "clip_ratio/high_mean": is_high.float(),
        "clip_ratio/region_mean": (is_low | is_high).float(),
    }
    return clipped_loss(ratio, x.advantages, 1 - low, 1 + high), metrics


_OF_GRPO = (
    "rewards",
    "environment",
    "max_turns",
    "tool_seconds",
    "episode_seconds",
    "num_generations",
    "max_completion_length",
    "temperature",
    "scale_rewards",
    "epsilon",
    "num_iterations",
    "rollout_url",
    "rollout_ahead",
    "on_reward_error",
    "beta",
    "loss_type",
)
_OF_MARGIN = ("beta", "loss_type", "label_smoothing", "sft_weight")
_OF_TEACHER = ("beta", "temperature", "sft_weight", "teacher", "teacher_adapter", "top_k")
_OF_ONLINE_TEACHER = (
    "beta",
    "temperature",
    "teacher",
    "teacher_url",
    "top_k",
    "max_completion_length",
    "rollout_url",
)

OBJECTIVES: dict[str, Objective] = {
    "sft": Objective(
        TEXTS,
        options=("neftune_alpha", "loss_type"),
        # The plain mean over tokens: the name is in the records of runs, so it stays.
        loss_types=("sigmoid", "dft"),
        adapter_lr=2e-4,
    ),
    "dpo": Objective(PAIRS, margin_loss, has_reference=True, options=_OF_MARGIN),
    "ipo": Objective(PAIRS, ipo, has_reference=True, options=("beta", "sft_weight")),
    "kto": Objective(LABELS, kto, has_reference=True, options=("beta", "kto_weights")),
    "cpo": Objective(PAIRS, margin_loss, options=_OF_MARGIN, sft_weight=1.0),
    "simpo": Objective(
        PAIRS,
        simpo,
        score=LogProbs.mean_ratio,
        options=("beta", "simpo_gamma", "label_smoothing", "sft_weight"),
    ),
    "orpo": Objective(
        PAIRS, orpo, score=LogProbs.mean_ratio, options=("beta", "sft_weight"), sft_weight=1.0
    ),
    "grpo": Objective(
        PROMPTS,
        None,
        has_reference=True,
        options=_OF_GRPO,
        beta=0.0,
        loss_types=("dapo", "grpo", "dr_grpo", "gspo", "cispo"),
        token_loss=policy_loss,
    ),
    "distill": Objective(
        TEACHER_ROWS, has_reference=True, options=_OF_TEACHER, beta=0.0, adapter_lr=2e-4
    ),
    "distill_on_policy": Objective(
        TEACHER_PROMPTS, has_reference=True, options=_OF_ONLINE_TEACHER, beta=0.0, adapter_lr=2e-4
    ),
}
