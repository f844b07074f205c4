"""Every option of training, once: its name, type, default, limit, marks and help.

A field of `TrainConfig` is the flag, the YAML key and the attribute. Its type is annotated with its
limit and its marks (marks.py). The sentence under it is its help (text.py), and the `== ... ==`
comments are the headings of `--help`. conflicts.py lists the options that exclude each other.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from fsdp_qlora.config.marks import (
    COUNT_OR_WORD,
    FINITE,
    MAY_DIFFER,
    NOT_EMPTY,
    NOT_NEGATIVE,
    OF_ADAPTER,
    OF_RESULT,
    ONE_OR_TWO,
    PER_NODE,
    POSITIVE,
    REPLACE,
    SAMPLES,
    SAVE_TIMES,
    SHARE,
    SHARE_BELOW_1,
    SHARE_OR_STEPS,
    SIZE_OR_WORD,
    SWITCH_OR_COUNT,
    Limit,
    Mark,
    all_or_at_least_1,
    at_least,
    between,
    of_quantizer,
    one_of_names,
)
from fsdp_qlora.config.objectives import OBJECTIVES, PROMPTS, TEXTS, RowKind
from fsdp_qlora.config.train_types import QUANT_TYPES, TRAIN_TYPES, TrainType

Group = TypeVar("Group")

LogTo = Literal[
    "tqdm", "stdout", "wandb", "tensorboard", "jsonl", "project=", "name=", "group=", "entity="
]
MOST_OF_AUTO = 4096  # tokens, of --context_length auto
_LOSS_TYPES = dict.fromkeys(
    ["auto", *(name for row in OBJECTIVES.values() for name in row.loss_types)]
)


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run."""

    # == model ==
    model_name: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE, OF_RESULT] = "Qwen/Qwen3-8B-Base"
    """Name on the Hugging Face hub, or local folder, of the decoder-only model to fine-tune."""
    train_type: Annotated[str, one_of_names(TRAIN_TYPES), OF_RESULT] = "qlora"
    """Part of the model that trains. An adapter on a base in 4 bits (qlora, as custom_qlora), 8 to
    2 bits by HQQ (hqq_lora), 8 bits (int8_lora) or 16 bits (lora, as custom_lora); a DoRA adapter
    (bnb_dora, hqq_dora, dora); the blocks that `expand` inserted into a quantized base
    (bnb_llama_pro, hqq_llama_pro); or all weights (full).
    """
    precision: Annotated[
        Literal[
            "auto",
            "fp32",
            "bf16",
            "fp16",
            "fp16_autocast",
            "bf16_autocast",
            "bf16_buffers_autocast",
        ],
        OF_RESULT,
    ] = "auto"
    """Number format of the computation; auto is bf16 on GPUs that support it, fp16 on older GPUs
    and fp32 on the CPU. Trainable weights are kept in fp32; with fp16 the loss is scaled, and a
    step whose gradients overflow is skipped.
    """
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "flash_attention_2", "eager"], MAY_DIFFER
    ] = "auto"
    """Attention kernels; auto uses PyTorch's flash kernel or flash-attn on Ampere and newer GPUs,
    else SDPA, or eager for models that do not support SDPA.
    """
    trust_remote_code: Annotated[bool, MAY_DIFFER] = False
    """Run Python code from the model's files, with your permissions. Models that transformers does
    not know need it; read that code first.
    """
    quant_type: Annotated[
        Literal["auto", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"], of_quantizer("bnb_4bit")
    ] = "auto"
    """Format of the frozen base: nf4 or fp4 of bitsandbytes, or one in which models are served:
    mxfp4 (4.25 bits per weight), nvfp4 (4.5) or fp8 (8, with a scale for each row). auto keeps the
    weights of a model that is published in one of these as they are, and is nf4 for others.
    """
    double_quant: Annotated[bool, of_quantizer("bnb_4bit")] = True
    """Quantize the scales of nf4's and fp4's blocks too, which saves about 0.4 bits per weight."""
    n_bits: Annotated[
        int, Limit(lambda value: value in (8, 4, 3, 2), "8, 4, 3 or 2"), of_quantizer("hqq")
    ] = 4
    """Bits per weight of an HQQ base: 8, 4, 3 or 2; fewer save memory and cost quality."""
    group_size: Annotated[
        int,
        Limit(lambda value: value >= 32 and value % 32 == 0, "a multiple of 32"),
        of_quantizer("hqq"),
    ] = 64
    """Number of weights that share a scale and a zero point in an HQQ base, a multiple of 32;
    smaller groups are more accurate, and each takes 32 bits.
    """
    int8_threshold: Annotated[float, NOT_NEGATIVE, of_quantizer("int8")] = 6.0
    """Magnitude from which activations are not rounded to 8 bits with an int8 base (LLM.int8's
    outliers); 0 rounds all of them, which is faster and less accurate.
    """
    allow_unquantized: Annotated[bool, MAY_DIFFER, OF_RESULT] = False
    """Train although less than 90% of the parameters of the decoder blocks can be quantized
    (embeddings and head do not count); the others take their full memory.
    """
    quant_cache: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "auto"
    """Folder that caches the quantized weights (in 4 bits a quarter of the model's size) for later
    starts; auto is quantized/ in FSDP_QLORA_CACHE or in the user's cache folder, off disables the
    cache.
    """

    # == data ==
    dataset: Annotated[tuple[str, ...], NOT_EMPTY, MAY_DIFFER, PER_NODE] = ("alpaca_sample",)
    """Rows to train on, one or more of: alpaca, alpaca_sample, alpaca_demo (no network needed),
    guanaco, sql, orca_math, dummy (to measure speed), owner/name:config[split][:1000] on the
    Hugging Face hub, a .json, .jsonl, .csv, .tsv, .parquet or .txt file (or one of these with .gz
    or .zst), or a folder of them or of datasets.save_to_disk. Several are joined; with weights, as
    in a.jsonl:0.7 b.parquet:0.3, an epoch has these shares and ends before a dataset would repeat a
    row; the next epoch continues with the next rows of each.
    """
    dataset_samples: Annotated[int | None, at_least(1)] = None
    """Number of first rows to use of each dataset; by default all (alpaca_sample, orca_math, dummy
    have own sizes).
    """
    dataset_format: Annotated[
        Literal[
            "auto",
            "alpaca",
            "pretokenized",
            "preference",
            "ratings",
            "label",
            "rating",
            "messages",
            "sharegpt",
            "dolly",
            "question_answer",
            "prompt_completion",
            "guanaco",
            "text",
        ],
        OF_RESULT,
    ] = "auto"
    """Format of the rows; auto detects it from the names of the columns."""
    columns: Annotated[tuple[str, ...], MAY_DIFFER, OF_RESULT] = ()
    """Columns of the dataset whose names differ from the format's, as FORMAT'S=DATASET'S, such as
    instruction=task,output=result; ignore=NAME leaves out a column that makes rows invalid."""
    prompt_template: Annotated[str | None, MAY_DIFFER, PER_NODE, OF_RESULT] = None
    """Text around instructions and questions: alpaca, question_answer, plain, vicuna, chat (the
    model's own chat template), a text file with {instruction}, {input} and {system}; or a chat
    template for models without one: chatml, user_assistant, a .jinja file. By default the model's
    chat template, also for instructions and questions if the model was made for chats (it stops at
    a token that its template writes); otherwise the format's text.
    """
    learn: Annotated[Literal["assistant", "last", "all"], MAY_DIFFER, OF_RESULT] = "assistant"
    """Tokens to train on: assistant (every turn of the assistant, or every response), last (only
    the last one) or all (the prompts too).
    """
    context_length: Annotated[Literal["auto"] | int, at_least(2), OF_RESULT] = "auto"
    """Longest row in tokens; longer rows are truncated, and a row whose prompt fills it is left
    out. auto is the smallest power of two that keeps 99% of the rows of each dataset whole, at most
    4,096; a resumed run keeps its value.
    """
    max_bad_rows: Annotated[float, SHARE, MAY_DIFFER] = 0.01
    """Largest share of the rows that may be left out, malformed or with a prompt that fills the
    context; with more the run does not start. rejected.jsonl lists them.
    """
    eval_fraction: Annotated[float, SHARE_BELOW_1] = 0.0
    """Share of the rows to hold out for evaluation, such as 0.05."""
    eval_dataset: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Rows for evaluation, named as in dataset: rows.jsonl, folder[test], owner/name[validation].
    Several are evaluated one by one, as in chat=chat.jsonl code=code.jsonl; the first one's loss
    decides which checkpoint is the best.
    """

    # == training ==
    objective: Annotated[str, one_of_names(OBJECTIVES)] = "sft"
    """Training objective, named as in TRL: sft trains on texts; dpo, ipo, cpo, simpo and orpo on
    pairs of a chosen and a rejected answer; kto on answers with a label; grpo on the model's own
    completions of prompts, by their rewards; distill on the probabilities of a teacher, another
    model or the frozen base with a prompt of its own, and distill_on_policy on these for the
    model's own completions. cpo, simpo and orpo need no reference model; that of dpo, ipo and kto,
    and distill's base, run in the same forward pass.
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
    epochs.
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
    """Evaluations in a row without a lower loss after which training ends (best/ has the best
    adapter); 0 is never.
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
    lora_target_modules: Annotated[tuple[str, ...], NOT_EMPTY, OF_ADAPTER] = ("all",)
    """Linear layers that get an adapter: all (or all-linear), default (PEFT's choice for the
    model), layer names such as q_proj,v_proj, or one regular expression for whole paths such as
    .*layers.1\\d.*_proj (without commas).
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
    embeddings and head train (PEFT's trainable_token_indices). A row starts from the mean of all,
    or, as in "<think>: begin to reason", of a description's; that of a token which the model has is
    kept.
    """
    use_rslora: Annotated[bool, OF_ADAPTER] = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank),
    which keeps high ranks learning (rsLoRA).
    """
    init_lora_weights: Annotated[Literal["true", "loftq"], OF_ADAPTER] = "true"
    """Initial values of the adapter: true (A random, B zero), or loftq (from the quantization
    error).
    """
    rank_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Ranks that differ for some layers, such as down_proj=32,layers.0.self_attn.q_proj=4; a name
    is a regular expression for the end of a path, as in PEFT, and the first match wins.
    """
    alpha_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Values of lora_alpha that differ for some layers, written like rank_pattern."""
    loraplus_lr_ratio: Annotated[float, POSITIVE, OF_ADAPTER] = 1.0
    """Learning rate of the adapter's B divided by that of its A (LoRA+); 16 with a lower lr often
    learns faster.
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
    (the answers times max_completion_length). auto is sigmoid, or dapo for grpo.
    """
    label_smoothing: Annotated[
        float, Limit(lambda value: 0 <= value < 0.5, "0 or more and below 0.5")
    ] = 0.0
    """Share of the pairs whose answers may be swapped: conservative with loss_type sigmoid,
    unbiased with robust.
    """
    sft_weight: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of the usual loss on the chosen answers (of distill, on all), beside that of the
    objective; by default 1 for orpo and cpo, else 0.
    """
    simpo_gamma: Annotated[float, NOT_NEGATIVE] = 0.5
    """Margin by which the chosen answer's reward should be larger in simpo."""
    kto_weights: Annotated[tuple[float, ...], ONE_OR_TWO] = (1.0, 1.0)
    """Weights of kto's desired and of its other answers (TRL's desirable_weight,
    undesirable_weight); raise that of the rarer kind, such as 3,1, so that both count about alike.
    """
    rating_threshold: Annotated[float | None, FINITE] = None
    """Rating from which an answer is good, for rows with ratings: kto's label, or, between the
    ratings of a row's best and worst answer, what makes them a pair.
    """
    precompute_reference: Annotated[bool, MAY_DIFFER] = False
    """Compute the reference's log-probabilities for dpo, ipo and kto once before training, and keep
    them beside the tokenized rows; saves time from the second epoch or run on, and the copy of the
    starting adapter.
    """

    # == distillation ==
    teacher: str | None = None
    """Model that distill learns from, a name or folder, or a folder that `teach` wrote. Before
    training it goes over the rows, quantized as train_type says and sharded by the same plan; that
    of distill_on_policy is on a server, teacher_url. By default the frozen base, with the prompts
    of the columns teacher_prompt and teacher_system.
    """
    teacher_adapter: str | None = None
    """Folder of a PEFT adapter of the teacher."""
    teacher_url: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Server that has the teacher of distill_on_policy, such as http://host:8000: vLLM, or another
    whose completions API gives prompt_logprobs.
    """
    top_k: Annotated[int, at_least(1)] = 64
    """Likeliest tokens of the teacher to keep for each learned token; all others count as one. Each
    takes 6 bytes.
    """

    # == rewards ==
    rewards: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Functions that score the completions in grpo; their rewards are added up. Each is
    FILE.py:function or the name of a built-in one, with =WEIGHT if that is not 1, such as
    exact_match,style.py:is_short=0.5.
    """
    num_generations: Annotated[int, at_least(2)] = 8
    """Completions per prompt, which are compared with each other."""
    max_completion_length: Annotated[int, at_least(1)] = 512
    """Longest completion in tokens in grpo and distill_on_policy; longer ones are cut."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Temperature of sampling, and of the probabilities that are trained; of distill that of
    student and teacher.
    """
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which advantages are divided: over the completions of a prompt (group),
    over all of a step (batch), or not divided (none).
    """
    epsilon: Annotated[tuple[float, ...], ONE_OR_TWO] = (0.2,)
    """Clipping range of the probability ratio between the model and the one that sampled; with two
    numbers, such as 0.2,0.28, the second one is for increases (TRL's epsilon_high).
    """
    num_iterations: Annotated[int, at_least(1)] = 1
    """Optimizer steps on the same completions."""
    rollout_url: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Server that completes the prompts, such as http://host:8000: vLLM, or another with OpenAI's
    completions API that loads LoRA adapters at run time. The difference between its probabilities
    and the trainer's is corrected (truncated importance sampling). By default the model in training
    generates them itself.
    """
    on_reward_error: Annotated[Literal["stop", "zero"], MAY_DIFFER] = "stop"
    """Action when a reward function fails or takes hang_minutes: stop ends the run with a
    checkpoint, zero counts a reward of 0.
    """

    # == memory ==
    auto: Annotated[bool, MAY_DIFFER] = False
    """Choose the fastest settings that are planned to fit the GPUs before training: batch_size and
    gradient_accumulation_steps with the same rows per step, and sharding_strategy and
    use_cpu_offload where these are auto. A resumed run keeps them; `fsdp-qlora plan --auto` shows
    them for other GPUs.
    """
    sharding_strategy: Annotated[
        Literal[
            "auto",
            "full_shard",
            "shard_grad_op",
            "ddp",
            "hybrid_full_shard",
            "hybrid_shard_grad_op",
        ],
        MAY_DIFFER,
        OF_RESULT,
    ] = "auto"
    """Distribution of the model: full_shard needs the least memory, shard_grad_op keeps gathered
    weights until the backward pass, ddp replicates the model on every process, hybrid_ shards
    within a machine and replicates between machines. On GPUs auto chooses ddp if the whole model
    fits on each with a margin, else, between machines, hybrid_full_shard if it fits on one of them,
    else full_shard; on a CPU full_shard.
    """
    recompute: Annotated[
        Literal["auto", "all", "none", "offload"] | int, COUNT_OR_WORD, MAY_DIFFER
    ] = "auto"
    """Decoder blocks that recompute their activations in the backward pass instead of keeping them
    (activation checkpointing): all needs little memory, none is the fastest, a number means the
    first ones, and offload is all with the blocks' inputs in host memory, for very long rows. On
    GPUs auto finds the smallest number that fits, by probing before the first step; on a CPU auto
    means all.
    """
    use_cpu_offload: Annotated[
        Literal["auto"] | bool | int, SWITCH_OR_COUNT, MAY_DIFFER, OF_RESULT
    ] = "auto"
    """Keep the frozen base (with full: the weights, gradients and optimizer) in host memory, and
    copy each block to the GPU when it is needed. A number above 1 offloads that many decoder
    blocks. On GPUs auto offloads all if the model does not fit otherwise.
    """
    context_parallel_size: Annotated[Literal["auto"] | int, SIZE_OR_WORD, MAY_DIFFER] = 1
    """Processes of a machine that share each micro-batch, for rows too long for one GPU: each
    computes a part of the tokens, and in attention a part of the heads. An optimizer step then has
    as many times fewer rows; auto is as small as the longest rows need, and multiplies
    gradient_accumulation_steps by it.
    """

    # == output ==
    output_dir: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "output"
    """Folder for the results: the adapter, the tokenizer, config.yaml, metrics.jsonl and the
    checkpoints.
    """
    save_model: Annotated[bool, MAY_DIFFER] = True
    """Save checkpoints, and the adapter (or the model, for full) at the end; turn it off to measure
    speed only.
    """
    save_every: Annotated[tuple[str, ...], SAVE_TIMES, MAY_DIFFER] = ("15m",)
    """Minutes (15m) or optimizer steps (500) between two checkpoints, or both (500,15m); raise it
    for slow disks. One is always saved at the end, at a stop, and after each evaluation that is the
    best so far; none saves no more.
    """
    save_total_limit: Annotated[int, at_least(1), MAY_DIFFER] = 3
    """Number of newest checkpoints to keep, besides the one with the lowest evaluation loss."""
    mirror: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Copy of each checkpoint elsewhere: a folder on another disk or machine, a URL (s3://, gcs://,
    az://, sftp://), or hf:OWNER/NAME (a private repository; hf:OWNER/NAME:public allows a public
    one). An empty output_dir, as on a new machine, is filled from it.
    """
    push_to_hub: Annotated[str | None, MAY_DIFFER] = None
    """Repository on the Hugging Face hub, OWNER/NAME, to upload the result to at the end of the run
    or of its budget. A new one is private, and a public one is refused, unless :public follows the
    name. output_dir has the result even if the upload fails.
    """
    base_name: Annotated[str | None, MAY_DIFFER, OF_RESULT] = None
    """Name of the base model on the Hugging Face hub, OWNER/NAME, for the adapter's
    adapter_config.json and card; by default model_name, which others cannot find if it is a local
    folder.
    """
    log_to: Annotated[tuple[LogTo, ...], NOT_EMPTY, MAY_DIFFER] = ("tqdm",)
    """Destinations of the metrics, besides metrics.jsonl and report.html in output_dir. tensorboard
    writes to tensorboard/ in output_dir. wandb takes settings, as in wandb,project=mine,name=first:
    project, name, group (for runs that belong together) and entity (the owner). Only jsonl leaves
    the terminal silent.
    """
    eval_steps: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Optimizer steps between two evaluations; 0 evaluates only before and after training."""
    eval_tasks: Annotated[tuple[str, ...], MAY_DIFFER] = ()
    """Tasks of lm-eval, by name or as YAML files, to measure the sharded model on at each
    evaluation.
    """
    sample_prompts: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """File of prompts, .jsonl or one in each line, to answer at each evaluation; samples.jsonl has
    the answers.
    """

    # == run ==
    resume: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "auto"
    """Start of the run: auto resumes the run in output_dir from its newest intact checkpoint, off
    starts from scratch, and a folder starts from that checkpoint, or run of the same options and
    rows. auto:replace, off:replace and so on replace a finished or another run in output_dir. To
    train an adapter with other options or rows, see adapter.
    """
    nproc_per_node: Annotated[
        int, all_or_at_least_1("or a number of processes"), MAY_DIFFER, PER_NODE
    ] = -1
    """Processes to start on this machine; -1 is one per visible GPU, or one on a CPU. world_size is
    the same.
    """
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_DIFFER] = "auto"
    """Device of the computation; auto takes the visible GPUs, or the CPU of a machine without one.
    A dry run without a GPU plans for one, unless this is cpu.
    """
    dry_run: Annotated[Literal["samples", "samples="] | bool, SAMPLES, MAY_DIFFER] = False
    """Print something about the run and stop before training: true prints the sizes, the memory per
    process and the steps, without loading weights; samples prints three rows as the model sees
    them, with the trained tokens in colour, and samples=10 ten.
    """
    verbose: Annotated[bool, MAY_DIFFER, PER_NODE] = False
    """Print more at the start: memory, kernels, how weights were read, the model; in a dry run all
    options too.
    """
    max_hours: Annotated[float | None, POSITIVE, MAY_DIFFER] = None
    """Hours that the run may take, earlier starts included; it stops with a checkpoint before."""
    hang_minutes: Annotated[float, at_least(0), MAY_DIFFER] = 15.0
    """Minutes without progress of a process after which the run ends and names it; raise it when a
    micro-batch, a checkpoint or a reward function takes longer. 0 is never. A missing process is
    waited for 5 minutes at most.
    """
    on_nonfinite: Annotated[Literal["halt", "skip"], MAY_DIFFER] = "halt"
    """Action when a loss or gradient is not finite: halt ends the run, skip leaves out the step (10
    steps or 1% at most).
    """

    @property
    def kind(self) -> TrainType:
        """The adapter, quantizer and trained part that `train_type` means."""
        kind = TRAIN_TYPES[self.train_type]
        return (
            kind._replace(quantizer=QUANT_TYPES[self.quant_type])
            if kind.quantizer == "bnb_4bit"
            else kind
        )

    @property
    def has_reference_beside(self) -> bool:
        """Whether a reference passes through the model beside the policy."""
        return self.has_reference and not self.precompute_reference

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares with the model that training starts from."""
        if not OBJECTIVES[self.objective].has_reference or self.teacher:
            return False
        return self.distills or self.objective_settings["beta"] > 0

    @property
    def distills(self) -> bool:
        """Whether the objective learns from a teacher."""
        return "teacher" in OBJECTIVES[self.objective].options

    @property
    def objective_settings(self) -> dict[str, Any]:
        """The options whose default the objective decides, as they are used."""
        row = OBJECTIVES[self.objective]
        loss_type = row.loss_types[0] if self.loss_type == "auto" else self.loss_type
        return {"beta": row.beta if self.beta is None else self.beta, "loss_type": loss_type}

    @property
    def hang_seconds(self) -> float:
        """The limit of waits for servers and reward functions: `hang_minutes`, as far as a clock
        can wait.
        """
        return min(60 * self.hang_minutes or math.inf, 1e7)

    @property
    def context_size(self) -> int:
        """Ranks that share each micro-batch, 1 as long as auto has not decided."""
        return 1 if self.context_parallel_size == "auto" else self.context_parallel_size

    @property
    def keeps_start(self) -> bool:
        """Whether the first adapter is kept once more: a reference is more than the base here."""
        return self.has_reference_beside and (
            self.adapter is not None or self.init_lora_weights != "true"
        )

    @property
    def start_from(self) -> str:
        """Where `resume` starts: auto, off or a folder."""
        start = self.resume.removesuffix(REPLACE)
        return "off" if start.lower() in ("no", "false") else start  # as YAML spells it

    @property
    def is_preview(self) -> bool:
        """Whether the run is only shown, by one process, and nothing is trained."""
        return self.dry_run is not False

    @property
    def learning_rate(self) -> float:
        """`lr`, or what suits the train type and the objective where it is not given."""
        if self.lr is not None:
            return self.lr
        return (
            1e-5
            if self.kind.trains == "all" or not (self.objective == "sft" or self.distills)
            else 2e-4
        )

    @property
    def longest_row(self) -> int:
        """The tokens of `context_length`; while it is auto, the most that this may become."""
        return MOST_OF_AUTO if isinstance(self.context_length, str) else self.context_length

    @property
    def row_kind(self) -> RowKind:
        """The kind of rows that the objective learns from."""
        own = OBJECTIVES[self.objective].row_kind
        return own if not self.teacher else PROMPTS if own.is_sampled else TEXTS

    @property
    def teaches_itself(self) -> bool:
        """Whether the base, with a prompt of its own, is the teacher."""
        return self.row_kind.has_teacher

    @property
    def answers_per_prompt(self) -> int:
        """Completions of a prompt in a step."""
        return self.num_generations if self.rewards else 1

    def pick(self, cls: type[Group], *, prefix: str = "", **others: Any) -> Group:
        """The options that belong together, as the dataclass that a library function takes.

        Args:
            cls: a dataclass; each field that is not in `others` is the option of that name. prefix:
            what the options' names begin with and the fields' do not; an option without it is taken
            where
                there is none with it.
        Raises:
            AttributeError: a field is no option and not given, even if it has a default.
        """
        names = [field.name for field in fields(cls) if field.init and field.name not in others]  # type: ignore[arg-type]
        option_of = {
            name: prefix + name if hasattr(self, prefix + name) else name for name in names
        }
        return cls(**{name: getattr(self, option) for name, option in option_of.items()}, **others)


DEFAULTS = TrainConfig()

_HINTS = get_type_hints(TrainConfig, include_extras=True)


def marks_of(name: str) -> tuple[Mark | Limit, ...]:
    """The annotations of an option's type."""
    return getattr(_HINTS[name], "__metadata__", ())


def names_marked(mark: Mark) -> tuple[str, ...]:
    """The options with a mark, in the order of the fields."""
    return tuple(name for name in _HINTS if mark in marks_of(name))


RESULT_OPTIONS = {
    name
    for name in _HINTS
    for mark in marks_of(name)
    if isinstance(mark, Mark) and mark.is_of_result
} - {"adapter"}  # a folder of this machine
"""The options that commands read from the files of a result."""


LIMITS = {name: mark for name in _HINTS for mark in marks_of(name) if isinstance(mark, Limit)}
"""Option -> the limit of its values."""


def option_types() -> dict[str, Any]:
    """Option -> its type, without marks; that of a name out of a table is a Literal."""
    types = get_type_hints(TrainConfig)
    return types | {name: Literal[limit.choices] for name, limit in LIMITS.items() if limit.choices}
