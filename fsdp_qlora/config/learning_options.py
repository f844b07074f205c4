"""Options of learning: training, adapter, preferences, distillation and rewards."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fsdp_qlora.config.marks import (
    AT_MOST_TWO,
    FINITE,
    MAY_DIFFER,
    NOT_NEGATIVE,
    OF_ADAPTER,
    ONE_OR_TWO,
    PER_NODE,
    POSITIVE,
    SHARE_BELOW_1,
    SHARE_OR_STEPS,
    Limit,
    all_or_at_least_1,
    at_least,
    between,
    one_of_names,
)
from fsdp_qlora.config.objectives import OBJECTIVES

_LOSS_TYPES = dict.fromkeys(
    ["auto", *(name for row in OBJECTIVES.values() for name in row.loss_types)]
)


@dataclass(frozen=True)
class LearningOptions:
    """How the model learns from the rows."""

    # == training ==
    objective: Annotated[str, one_of_names(OBJECTIVES)] = "sft"
    """Training objective, named as in TRL: sft trains on texts; dpo, ipo, cpo, simpo and orpo on
    pairs of a chosen and a rejected answer; kto on answers with a label; grpo on the model's own
    completions of prompts, by their rewards; distill on the probabilities of a teacher, another
    model or the frozen base with a prompt of its own, and distill_on_policy on these for the
    model's own completions. cpo, simpo and orpo need no reference model; the reference of dpo, ipo
    and kto, and distill's base, run in the same forward pass.
    """
    lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate; by default 2e-4 for adapters and new blocks, and 1e-5 for full and for
    preferences.
    """
    batch_size: Annotated[int, at_least(1), MAY_DIFFER] = 1
    """Rows per process in one forward pass; raise it until memory is full."""
    gradient_accumulation_steps: Annotated[int, at_least(1), MAY_DIFFER] = 1
    """Forward and backward passes per optimizer step; raise it for a larger batch in the same
    memory.
    """
    num_epochs: Annotated[int, at_least(1)] = 1
    """Passes over the dataset."""
    max_steps: Annotated[int, all_or_at_least_1("(all epochs) or a number of optimizer steps")] = -1
    """Number of optimizer steps after which the run ends, earlier starts included; -1 runs all
    epochs. Of a dataset that has many more rows than the steps take, a part is read.
    """
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or decreasing to 0 after the last step."""
    warmup: Annotated[int | float, SHARE_OR_STEPS] = 0.03
    """Optimizer steps over which the learning rate rises from 0: a share of all, such as 0.03, or a
    number.
    """
    optimizer: Literal[
        "adamw",
        "adam",
        "sgd",
        "adadelta",
        "fused_adamw",
        "fused_adam",
        "adamw_8bit",
        "paged_adamw_8bit",
        "lion",
        "lion_8bit",
    ] = "adamw"
    """Optimizer; the 8-bit ones need less memory, and the paged one moves state that does not fit
    to the host. On a GPU adamw and adam are fused; fused_adamw and fused_adam are fused for weights
    on a CPU too.
    """
    wd: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay; 0.01 to 0.1 is usual when all weights train."""
    grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. Lower it when the loss
    jumps; 0 turns clipping off.
    """
    neftune_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Noise on the embeddings in training (NEFTune): even, up to neftune_alpha / sqrt(tokens of the
    row * hidden size); 5 is usual for short instructions, 0 is none.
    """
    batching: Annotated[Literal["padding_free", "packed", "padded"], MAY_DIFFER] = "padding_free"
    """Layout of a micro-batch. padding_free concatenates its rows without padding, keeps attention
    within each row and gives all ranks about equally many tokens. packed also takes as many rows as
    fit batch_size x context_length tokens, which saves time with gradient_accumulation_steps above
    1. padded pads to the longest row, as some models need.
    """
    early_stopping: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Number of evaluations in a row without a lower loss (or a higher score: see best_by) after
    which training ends (best/ has the best adapter); 0 is never.
    """
    best_by: str | None = None
    """Measure of the held-out rows that chooses best/ and counts for early_stopping: loss (the
    lowest), or with eval_rewards a score (the highest): reward for the sum of all functions, or the
    name of one. By default the loss, and reward where a run has no held-out loss.
    """
    seed: Annotated[int, between(0, 2**32 - 1)] = 42
    """Seed of the adapter's initial values, the dropout, the order of the rows and the choice of
    held-out rows.
    """
    deterministic: bool = False
    """Use only kernels that give the same bits every time, so that a run on a GPU can be repeated
    and resumed to the last bit; slower, and an operation without such a kernel raises an error.
    Runs on a CPU are always deterministic.
    """

    # == adapter ==
    adapter: Annotated[str | None, OF_ADAPTER, MAY_DIFFER, PER_NODE] = None
    """Folder of a PEFT adapter to train further, or its name on the hub. Its rank, scale and layers
    are kept; optimizer and rows start anew. To resume an interrupted run, leave this option as it
    is: see resume.
    """
    lora_rank: Annotated[int, at_least(1), OF_ADAPTER] = 16
    """Rank of the adapter; raise it when the training loss stays high, at the cost of memory."""
    lora_alpha: Annotated[float, POSITIVE, OF_ADAPTER] = 32
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, SHARE_BELOW_1, OF_ADAPTER] = 0.0
    """Dropout on the adapter's input; try 0.05 to 0.1 when the model overfits a small dataset."""
    lora_target_modules: Annotated[tuple[str, ...], OF_ADAPTER] = ("all",)
    """Linear layers that get an adapter: all (or all-linear), default (PEFT's choice for the
    model), layer names such as q_proj,v_proj, or one regular expression for whole paths such as
    .*layers.1\\d.*_proj (without commas). These are of the decoder; vision and projector, beside
    them or alone, add the layers that compute images. With none, experts alone have an adapter.
    """
    lora_target_parameters: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Expert weights of a mixture-of-experts model that get an adapter too, named as in PEFT, such
    as mlp.experts.gate_up_proj,mlp.experts.down_proj; by default none.
    """
    modules_to_save: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Embeddings and head to train in full with the adapter and to save in its file, such as
    embed_tokens,lm_head; for new tokens or another language. Each takes 16 bytes per weight,
    divided among the ranks.
    """
    add_tokens: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """New tokens, such as <think>,</think>, or a .txt file of one in each line; only their rows of
    embeddings and head train (PEFT's trainable_token_indices). A row starts from the mean of all
    rows or, as in "<think>: begin to reason", of a description's rows; a token that the model has
    keeps its row.
    """
    use_rslora: Annotated[bool, OF_ADAPTER] = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank), which keeps high ranks learning
    (rsLoRA).
    """
    init_lora_weights: Annotated[Literal["true", "loftq"], OF_ADAPTER] = "true"
    """Initial values of the adapter: true (A random, B zero), or loftq (from the quantization
    error).
    """
    merge_aware: Annotated[bool, OF_ADAPTER] = False
    """Train the adapter as it will be merged: each weight with its update is rounded to the format
    of the base's files before it is multiplied, so that merge writes the very weights that were
    evaluated. For a base in MXFP4, NVFP4, FP8 or bitsandbytes' 4 bits; the adapter alone is of no
    use.
    """
    rank_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Ranks that differ for some layers, such as down_proj=32,layers.0.self_attn.q_proj=4; a name
    is a regular expression for the end of a path, as in PEFT, and the first match wins.
    """
    alpha_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Values of lora_alpha that differ for some layers, written like rank_pattern."""
    loraplus_lr_ratio: Annotated[float, POSITIVE, OF_ADAPTER] = 1.0
    """Ratio of the learning rates of the adapter's B and A (LoRA+); 16 with a lower lr often learns
    faster.
    """

    # == preferences ==
    beta: Annotated[float | None, NOT_NEGATIVE] = None
    """Strength of a preference objective: higher values keep the model closer to the base (dpo,
    ipo, kto, cpo) or weigh the odds ratio (orpo); for simpo 2 to 2.5 is usual. For grpo, the KL
    weight: 0, the default, disables the reference. For distill, the divergence: 0, the default, is
    KL(teacher || student), 1 is KL(student || teacher), and what is between is the generalized
    Jensen-Shannon divergence.
    """
    loss_type: Annotated[str, one_of_names(_LOSS_TYPES)] = "auto"
    """Loss of dpo and cpo: sigmoid, hinge, robust (unbiased if the share label_smoothing of the
    pairs is swapped), sigmoid_norm (sigmoid of means over tokens). For grpo, the divisor of the sum
    over tokens: dapo (the tokens of a step), grpo (each answer's tokens, then the answers), dr_grpo
    (the answers times max_completion_length); gspo clips the ratio of a whole answer, divided as by
    grpo, and cispo keeps the gradient of clipped tokens, divided as by dapo. For sft, dft
    multiplies the loss of each token by its probability, which has no gradient. auto is the plain
    loss for sft, dapo for grpo, and else sigmoid.
    """
    label_smoothing: Annotated[
        float, Limit(lambda value: 0 <= value < 0.5, "0 or more and below 0.5")
    ] = 0.0
    """Share of the pairs whose answers may be swapped: conservative with loss_type sigmoid,
    unbiased with robust.
    """
    sft_weight: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of the usual loss on the chosen answers (with distill, on all answers), added to the
    objective's loss; by default 1 for orpo and cpo, else 0.
    """
    simpo_gamma: Annotated[float, NOT_NEGATIVE] = 0.5
    """Margin by which the chosen answer's reward should be larger in simpo."""
    kto_weights: Annotated[tuple[float, ...], ONE_OR_TWO] = (1.0, 1.0)
    """Weights of kto's desired and undesired answers (TRL's desirable_weight, undesirable_weight);
    raise the weight of the rarer kind, such as 3,1, so that both count about equally.
    """
    rating_threshold: Annotated[float | None, FINITE] = None
    """Rating from which an answer is good, for rows with ratings. kto labels answers by it; the
    other objectives pair a row's best and worst answer if it lies between their ratings.
    """
    precompute_reference: Annotated[bool, MAY_DIFFER] = False
    """Compute the reference's log-probabilities for dpo, ipo and kto once before training, and
    cache them with the tokenized rows; saves time from the second epoch or run on, and the copy of
    the starting adapter.
    """

    # == distillation ==
    teacher: str | None = None
    """Model that distill learns from, a name or folder, or a folder that `teach` wrote. It is
    quantized as train_type says, sharded by the same plan, and computes its probabilities before
    training; distill_on_policy needs it on a server, teacher_url. By default the frozen base, with
    the prompts of the columns teacher_prompt and teacher_system.
    """
    teacher_adapter: str | None = None
    """Folder of a PEFT adapter of the teacher."""
    teacher_url: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Server that has the teacher of distill_on_policy, such as http://host:8000: vLLM, or another
    whose completions API gives prompt_logprobs.
    """
    top_k: Annotated[int, at_least(1)] = 64
    """Number of the teacher's top tokens to keep for each learned token; all others count as one.
    Each takes 6 bytes.
    """

    # == rewards ==
    rewards: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Functions that score the completions in grpo; their rewards are added. Each is
    FILE.py:function or the name of a built-in one, with =WEIGHT if that is not 1, such as
    exact_match,style.py:is_short=0.5.
    """
    environment: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Environment of grpo whose tools the model calls, in several turns: FILE.py:Class (TRL's form
    of environments), or verifiers:NAME. Several have names that the rows' column environment gives,
    such as game=play.py:Game,code=run.py:Code.
    """
    max_turns: Annotated[int, at_least(1), MAY_DIFFER] = 10
    """Maximum turns of the model in an episode with an environment."""
    tool_seconds: Annotated[float, POSITIVE, MAY_DIFFER] = 60.0
    """Seconds that a call of an environment may take; a longer one ends its episode."""
    episode_seconds: Annotated[float, POSITIVE, MAY_DIFFER] = 600.0
    """Seconds that all calls of an environment in an episode may take together."""
    num_generations: Annotated[int, at_least(2)] = 8
    """Completions per prompt, which are compared with each other."""
    max_completion_length: Annotated[int, at_least(1)] = 512
    """Maximum tokens per completion in grpo and distill_on_policy, and of an answer that
    eval_rewards scores; longer completions are truncated.
    """
    temperature: Annotated[float, POSITIVE] = 1.0
    """Sampling temperature. The loss uses the same temperature; with distill it applies to student
    and teacher.
    """
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which advantages are divided: over the completions of a prompt (group),
    over all completions of a step (batch), or no division (none).
    """
    epsilon: Annotated[tuple[float, ...], AT_MOST_TWO] = ()
    """Clipping range of the probability ratio between the model and the one that sampled; with two
    numbers, such as 0.2,0.28, the second one is for increases (TRL's epsilon_high). For cispo the
    last number is the largest ratio itself. By default 0.2, for gspo 0.0003,0.0004, and for cispo
    5.
    """
    num_iterations: Annotated[int, at_least(1)] = 1
    """Optimizer steps on the same completions."""
    rollout_url: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Server that completes the prompts, such as http://host:8000: vLLM, or another with OpenAI's
    completions API that loads LoRA adapters at run time. Prompts with images need vLLM with
    --enable-scale-out. The difference between its probabilities and the trainer's is corrected
    (truncated importance sampling). By default the model in training generates them itself.
    """
    rollout_ahead: bool = False
    """Have rollout_url's server complete the prompts of the next step while a step trains. Steps
    then learn from completions of weights that are one step older (num_iterations steps, if that is
    above 1); the correction for a server covers it.
    """
    on_reward_error: Annotated[Literal["stop", "zero"], MAY_DIFFER] = "stop"
    """Action when a reward function fails or takes hang_minutes: stop ends the run with a
    checkpoint, zero counts a reward of 0.
    """
    eval_rewards: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Functions, as in rewards, that score answers to the held-out prompts at each evaluation, with
    any objective: the model answers greedily, and eval_reward is the mean of their sums.
    """
