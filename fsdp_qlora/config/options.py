"""Every option of training, once: its name, type, default, limit, marks and help.

A field of `TrainConfig` is the flag, the YAML key and the attribute. Its type is annotated with its limit and its marks
(marks.py). The sentence under it is its help (text.py), and the `== ... ==` comments are the headings of `--help`.
conflicts.py lists the options that exclude each other.
"""

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
    OF_USER,
    PER_NODE,
    POSITIVE,
    SHARE,
    SHARE_BELOW_1,
    SHARE_OR_STEPS,
    SIZE_OR_WORD,
    SOME_BLOCKS,
    Limit,
    Mark,
    all_or_at_least_1,
    at_least,
    between,
    multiple_of,
    of_quantizer,
    one_of_names,
    one_of_numbers,
)
from fsdp_qlora.config.objectives import OBJECTIVES, TEXTS, RowKind
from fsdp_qlora.config.train_types import TRAIN_TYPES, TrainType

Group = TypeVar("Group")

MOST_OF_AUTO = 4096  # tokens, of --context_length auto
_LOSS_TYPES = dict.fromkeys(["auto", *(name for row in OBJECTIVES.values() for name in row.loss_types)])


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run."""

    # == launch ==
    nproc_per_node: Annotated[int, all_or_at_least_1("or a number of processes"), MAY_DIFFER, PER_NODE] = -1
    """Processes on this machine when started as one process; -1 is one per visible GPU, one on a CPU, and 1 keeps a run
    to one process on a machine with several GPUs. world_size is the same."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_DIFFER] = "auto"
    """Where to compute; auto takes the visible GPUs, or the CPU of a machine that has none. A dry run without a GPU
    plans for one, unless this is cpu."""

    # == model ==
    model_name: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE, OF_RESULT] = "Qwen/Qwen3-8B-Base"
    """Name on the Hugging Face hub, or local folder, of the decoder-only model to fine-tune."""
    trust_remote_code: Annotated[bool, MAY_DIFFER, OF_USER] = False
    """Run Python code from the model's files, with your permissions; models that transformers does not know need it.
    Read that code first."""
    attn_implementation: Annotated[Literal["auto", "sdpa", "flash_attention_2", "eager"], MAY_DIFFER] = "auto"
    """Attention kernels; auto uses torch's flash kernel or flash-attn's on Ampere and newer GPUs, else SDPA, or eager
    for models that SDPA does not support."""
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"], OF_RESULT
    ] = "auto"
    """Number format of the computation; auto is bf16 on GPUs that support it, fp16 on older GPUs and fp32 on the CPU.
    Trainable weights are kept in fp32; with fp16 the loss is scaled, and a step whose gradients overflow is skipped.
    Use fp32 to compare runs digit by digit."""

    # == training ==
    train_type: Annotated[str, one_of_names(TRAIN_TYPES), OF_RESULT] = "qlora"
    """What trains: an adapter on a 4-bit base (qlora), on an HQQ base of 8 to 2 bits (hqq_lora), on an 8-bit base
    (int8_lora), on a 16-bit base (lora), a DoRA adapter on such a base (bnb_dora, hqq_dora, dora), the blocks that
    `expand` added to a quantized base (bnb_llama_pro, hqq_llama_pro), or all weights (full); the custom_
    names of the 2024 program mean the same as those without it."""
    objective: Annotated[str, one_of_names(OBJECTIVES)] = "sft"
    """What is learned of the rows: sft learns the texts; grpo learns from answers that the model gives to prompts, by
    their rewards; the others learn from a chosen and a rejected answer to each prompt, or kto from answers with a
    label: dpo, ipo and kto compare with the model that training starts from, whose log-probabilities come in the same
    forward pass, and cpo, simpo and orpo compare with nothing. Names and defaults are TRL's."""
    beta: Annotated[float | None, NOT_NEGATIVE] = None
    """Strength of a preference objective: how little the model may move from the base (dpo, ipo, cpo), or the factor of
    the odds ratio (orpo); for simpo 2 to 2.5 is usual. Of grpo the weight of the divergence from the base, which is not
    computed at 0. By default 0 for grpo, else 0.1."""
    loss_type: Annotated[str, one_of_names(_LOSS_TYPES)] = "auto"
    """Loss of the margin between the two answers in dpo and cpo: sigmoid, hinge, robust (unbiased where the share
    label_smoothing of the pairs is the wrong way round), sigmoid_norm (sigmoid of means over tokens). What grpo divides
    the sum over tokens by: dapo (the tokens of a step), grpo (the tokens of each answer, and the answers), dr_grpo (the
    answers times max_completion_length). auto is sigmoid, or dapo for grpo."""
    label_smoothing: Annotated[float, Limit(lambda value: 0 <= value < 0.5, "0 or more and below 0.5")] = 0.0
    """Share of the pairs that may be the wrong way round: with sigmoid the conservative loss, with robust the unbiased
    one."""
    sft_weight: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight of the chosen answers' usual loss, a mean over tokens, beside that of the pairs; by default 1 for orpo and
    cpo (TRL's cpo_alpha), else 0."""
    simpo_gamma: Annotated[float, NOT_NEGATIVE] = 0.5
    """Margin by which simpo wants the chosen answer's reward to be larger."""
    desirable_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of kto's desired answers; weigh the rarer kind up, so that both count about alike."""
    undesirable_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of kto's other answers."""
    rating_threshold: Annotated[float | None, FINITE] = None
    """For rows with ratings: an answer is good for kto if its rating is at least this; of several rated answers the
    best is chosen over the worst if this is between them."""
    precompute_reference: Annotated[bool, MAY_DIFFER] = False
    """Compute the log-probabilities that dpo, ipo and kto compare with once before training, and keep them beside the
    tokenized rows; worth it from the second epoch or run on, or to spare the adapter to start from its copy."""
    adapter: Annotated[str | None, OF_ADAPTER, MAY_DIFFER, PER_NODE] = None
    """Folder of a PEFT adapter to train further, from an earlier run or another trainer, or its name on the hub. Its
    rank, scale and layers are kept; optimizer and rows begin from scratch. To resume an interrupted run, do not change
    this option: see resume."""
    lora_rank: Annotated[int, at_least(1), OF_ADAPTER] = 16
    """Rank of the adapter; raise it when the training loss stays high, at the cost of memory."""
    lora_alpha: Annotated[float, POSITIVE, OF_ADAPTER] = 32
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, SHARE_BELOW_1, OF_ADAPTER] = 0.0
    """Dropout on the adapter's input; try 0.05 to 0.1 when a small dataset is overfitted."""
    lora_target_modules: Annotated[tuple[str, ...], NOT_EMPTY, OF_ADAPTER] = ("all",)
    """Linear layers that get an adapter: all (or all-linear), default (PEFT's choice for the model), layer names such
    as q_proj,v_proj, or one regular expression for whole paths such as .*layers.1\\d.*_proj (without commas)."""
    lora_target_parameters: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Expert weights of a mixture-of-experts model that get an adapter too, named as in PEFT, such as
    mlp.experts.gate_up_proj,mlp.experts.down_proj; by default none."""
    modules_to_save: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Embeddings and head to train in full with the adapter and save in its file, such as embed_tokens,lm_head; for new
    tokens or another language. Each takes 16 bytes per weight, shared by the ranks."""
    use_rslora: Annotated[bool, OF_ADAPTER] = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank), which keeps high ranks learning (rsLoRA)."""
    init_lora_weights: Annotated[str, OF_ADAPTER] = "true"
    """Initial values of the adapter: true (A random, B zero), or computed from each weight: pissa or olora (its main
    directions, which are removed from the base), pissa_niter_16 (pissa, approximate and much faster), loftq (the
    quantization error)."""
    rank_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Other ranks for some layers, such as down_proj=32,layers.0.self_attn.q_proj=4; a name is a regular expression
    for the end of a path, as in PEFT, and the first match wins."""
    alpha_pattern: Annotated[tuple[str, ...], OF_ADAPTER] = ()
    """Other values of lora_alpha for some layers, written like rank_pattern."""
    batch_size: Annotated[int, at_least(1), MAY_DIFFER] = 1
    """Rows per process in one forward pass; raise it until memory is full."""
    context_length: Annotated[Literal["auto"] | int, at_least(2), OF_RESULT] = "auto"
    """Longest row in tokens; longer rows are truncated, and a row whose prompt fills it is left out. The report
    on the data counts both. auto is the smallest power of two that keeps 99% of the rows of each dataset whole, at most
    4,096 and the model's own limit; a run that is resumed keeps its number."""
    gradient_accumulation_steps: Annotated[int, at_least(1), MAY_DIFFER] = 1
    """Forward and backward passes per optimizer step; raise it for a larger batch in the same memory."""
    batching: Annotated[Literal["padding_free", "packed", "padded"], MAY_DIFFER] = "padding_free"
    """How rows become a micro-batch: padding_free concatenates them without padding, attention does not cross rows, and
    ranks get about equally many tokens; packed also takes as many rows as fit batch_size x context_length tokens, the
    same rows per optimizer step in fewer micro-batches, which saves time when gradient_accumulation_steps is above 1;
    padded pads them to the longest. A model that computes something else without padding is padded anyway."""
    num_epochs: Annotated[int, at_least(1)] = 1
    """Passes over the dataset."""
    max_steps: Annotated[int, all_or_at_least_1("(all epochs) or a number of optimizer steps")] = -1
    """Stop after this many optimizer steps of the whole run; -1 runs all epochs."""
    lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate; by default 2e-4 for adapters and new blocks, and 1e-5 for full and for preferences."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or decreasing to 0 after the last step."""
    warmup: Annotated[int | float, SHARE_OR_STEPS] = 0.03
    """Optimizer steps over which the learning rate rises from 0: their share of all, such as 0.03, or their number."""
    optimizer: Literal[
        "adamw", "adam", "sgd", "adadelta", "fused_adamw", "fused_adam", "adamw_8bit", "paged_adamw_8bit", "lion",
        "lion_8bit",
    ] = "adamw"  # fmt: skip
    """Optimizer; the 8-bit ones need less memory, and the paged one moves state that does not fit to the host. On a GPU
    adamw and adam are fused; fused_adamw and fused_adam are so for weights on a CPU too."""
    loraplus_lr_ratio: Annotated[float, POSITIVE, OF_ADAPTER] = 1.0
    """Learning rate of the adapter's B over that of A (LoRA+); 16 with a lower lr often learns faster."""
    wd: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay; 0.01 to 0.1 is usual when all weights train."""
    grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Largest global gradient norm, to which larger gradients are scaled; lower it when the loss jumps. 0 leaves all as
    they are."""
    seed: Annotated[int, between(0, 2**32 - 1)] = 42
    """Seed of the adapter's initial values, the dropout, the order of the rows and which of them are held out."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, so that a run on a GPU can be repeated and resumed to the
    last bit; slower, and an operation that has no such kernel raises an error. Runs on a CPU are always
    deterministic."""

    # == reinforcement learning ==
    rewards: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE, OF_USER] = ()
    """Functions that score the answers of grpo, whose rewards are added up: FILE.py:function, or the name of one that
    comes with the program, with =WEIGHT behind it if that is not 1, such as exact_match,style.py:is_short=0.5."""
    num_generations: Annotated[int, at_least(2)] = 8
    """Answers to each prompt, which are compared with each other."""
    max_completion_length: Annotated[int, at_least(1)] = 512
    """Longest answer in tokens; a longer one is cut."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Temperature at which answers are sampled, and learned from."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation of rewards by which advantages are divided: group (of the answers to a prompt), batch (of all
    answers of a step), none."""
    epsilon: Annotated[float, SHARE] = 0.2
    """How far a token's probability may fall, relative to that when the answer was sampled, until it is no longer
    learned."""
    epsilon_high: Annotated[float | None, NOT_NEGATIVE] = None
    """The same for a rise, such as 0.28; by default epsilon."""
    num_iterations: Annotated[int, at_least(1)] = 1
    """Optimizer steps on the same answers."""
    correct_mismatch: bool = False
    """Weigh each token by how much more probable it is to the trainer than to the server that has sampled it, at most 3
    times (truncated importance sampling)."""
    rollout_url: Annotated[str | None, MAY_DIFFER, PER_NODE, OF_USER] = None
    """Server that answers the prompts, such as http://host:8000: one with OpenAI's completions API that takes LoRA
    adapters at run time, as vLLM. By default the model that trains answers them itself."""
    on_reward_error: Annotated[Literal["stop", "zero"], MAY_DIFFER] = "stop"
    """What to do when a reward function fails: stop ends the run with a checkpoint, zero counts a reward of 0."""
    reward_timeout: Annotated[float, POSITIVE, MAY_DIFFER] = 60.0
    """Seconds that a reward function may take for the answers of a step."""

    # == memory ==
    auto: Annotated[bool, MAY_DIFFER] = False
    """Before training choose the fastest settings that are planned to fit the GPUs: batch_size and
    gradient_accumulation_steps with the same rows per step, and sharding_strategy and use_cpu_offload where these are
    auto. A run that is resumed in its folder keeps them; `fsdp-qlora plan --auto` shows them for other GPUs."""
    sharding_strategy: Annotated[
        Literal["auto", "full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"],
        MAY_DIFFER,
        OF_RESULT,
    ] = "auto"
    """How the model is distributed: full_shard needs the least memory, shard_grad_op keeps gathered weights until the
    backward pass, ddp replicates the model on every process, hybrid_ shards within a machine and replicates between
    machines. On GPUs auto chooses ddp if the whole model fits on each with a margin, else, between machines,
    hybrid_full_shard if it fits on one of them, else full_shard; on a CPU full_shard."""
    context_parallel_size: Annotated[Literal["auto"] | int, SIZE_OR_WORD, MAY_DIFFER] = 1
    """Processes of a machine that share each micro-batch, for rows too long for one GPU: each computes a part of the
    tokens, and in attention a part of the heads. An optimizer step then has as many times fewer rows; auto is as small
    as the longest rows need, and multiplies gradient_accumulation_steps by it."""
    recompute: Annotated[Literal["auto", "all", "none"] | int, COUNT_OR_WORD, MAY_DIFFER] = "auto"
    """Decoder blocks whose activations are computed again in the backward pass instead of kept: all needs the least
    memory, none is the fastest, a number means the first ones. On GPUs auto finds the smallest number that fits, by
    probing before the first step; on a CPU auto means all."""
    use_cpu_offload: Annotated[Literal["auto"] | bool | int, SOME_BLOCKS, MAY_DIFFER, OF_RESULT] = "auto"
    """Keep the frozen base (with full: the weights, gradients and optimizer) in host memory, and copy each block
    to the GPU when it is needed. A number above 1 offloads that many decoder blocks. On GPUs
    auto offloads all if the model does not fit otherwise."""
    use_activation_cpu_offload: Annotated[bool, MAY_DIFFER] = False
    """Keep the checkpointed activations in host memory; for long contexts that do not fit otherwise."""

    loading_buffer_mib: Annotated[int, at_least(1), MAY_DIFFER, PER_NODE] = 128
    """Host memory per process, in MiB, for weights that are read but not yet stored; raise it when a network disk has a
    high latency."""

    # == quantization ==
    quant_type: Annotated[Literal["nf4", "fp4"], of_quantizer("bnb_4bit")] = "nf4"
    """4-bit format of the frozen base; nf4 fits normally distributed weights better."""
    double_quant: Annotated[bool, of_quantizer("bnb_4bit")] = True
    """Quantize the scales too: saves about 0.4 bits per weight."""
    n_bits: Annotated[int, one_of_numbers(8, 4, 3, 2), of_quantizer("hqq")] = 4
    """Bits per weight of an HQQ base: 8, 4, 3 or 2; fewer save memory and cost quality."""
    group_size: Annotated[int, multiple_of(32), of_quantizer("hqq")] = 64
    """Weights that share a scale and a zero point in an HQQ base, a multiple of 32; smaller groups are more accurate,
    and each takes 32 bits."""
    int8_threshold: Annotated[float, NOT_NEGATIVE, of_quantizer("int8")] = 6.0
    """Activations of at least this magnitude are not rounded to 8 bits with an int8 base (LLM.int8's outliers); 0
    rounds all of them, which is faster and less accurate."""
    allow_unquantized: Annotated[bool, MAY_DIFFER, OF_RESULT] = False
    """Continue when less than 90% of the parameters of the decoder blocks can be quantized (embeddings and head do not
    count); the rest takes its full memory."""
    quant_cache: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE, OF_USER] = "auto"
    """Folder that caches the quantized weights (in 4 bits a quarter of the model's size) for the next start, with any
    number of processes; auto is quantized/ in FSDP_QLORA_CACHE or the user's cache folder, off disables the cache."""

    # == data ==
    dataset: Annotated[tuple[str, ...], NOT_EMPTY, MAY_DIFFER, PER_NODE] = ("alpaca_sample",)
    """Rows to train on, one or more of: alpaca, alpaca_sample, alpaca_demo (no network needed), guanaco, sql,
    orca_math, dummy (to measure speed), owner/name:config[split][:1000] on the Hugging Face hub, a .json, .jsonl,
    .csv, .tsv, .parquet or .txt file (or one of these with .gz or .zst), or a folder of them or of
    datasets.save_to_disk. Several are joined; with weights, as in a.jsonl:0.7 b.parquet:0.3, an epoch has these
    shares and ends before a dataset would repeat a row; the next epoch continues with the next rows of each."""
    dataset_samples: Annotated[int | None, at_least(1)] = None
    """Use only the first rows of each dataset, this many; by default all of them (alpaca_sample, orca_math and dummy
    have sizes of their own)."""
    streaming: bool = False
    """Read and tokenize the dataset, files or one of the hub, while the run trains; for datasets larger than memory or
    disk. Without max_steps its rows are counted first."""
    shuffle_buffer: Annotated[int, at_least(1)] = 10_000
    """Rows that streaming shuffles together and holds in memory; raise it when neighbouring rows are alike."""
    dataset_format: Annotated[Literal[
        "auto", "alpaca", "pretokenized", "preference", "ratings", "label", "rating", "messages", "sharegpt", "dolly",
        "question_answer", "instances", "rationale", "moss", "tree", "prompt_completion", "guanaco", "text",
    ], OF_RESULT] = "auto"  # fmt: skip
    """Format of the rows; auto detects it from the names of the columns."""
    columns: Annotated[tuple[str, ...], MAY_DIFFER, OF_RESULT] = ()
    """The dataset's columns whose names differ from the format's, as FORMAT'S=DATASET'S, such as
    instruction=task,output=result; ignore=NAME trains without a column that a row would be refused for."""
    prompt_template: Annotated[str | None, MAY_DIFFER, PER_NODE, OF_RESULT] = None
    """Text around instructions and questions: alpaca, question_answer, plain, vicuna, chat (the model's own chat
    template), a text file with {instruction}, {input} and {system}; or a chat template for models that have none:
    chatml, user_assistant, a .jinja file. By default the model's chat template, for instructions and questions where
    the model was made for chats: where it stops at a token that this template writes; else the format's."""
    learn: Annotated[Literal["assistant", "last", "all"], MAY_DIFFER, OF_RESULT] = "assistant"
    """What is learned of a row: every turn of the assistant (or every response), only the last one, or all text."""
    show_samples: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Print this many rows as the model sees them, with what is learned in colour, and stop."""
    max_bad_rows: Annotated[float, SHARE, MAY_DIFFER] = 0.01
    """Largest share of the rows that may be left out: malformed ones (with no output, say) and those whose prompt fills
    the context, which are listed in rejected.jsonl; with more the run does not start."""
    eval_fraction: Annotated[float, SHARE_BELOW_1] = 0.0
    """Share of the rows that is held out for evaluation."""
    eval_dataset: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Rows for evaluation, named as in dataset: rows.jsonl, folder[test], owner/name[validation]. Several are measured
    one by one, as in chat=chat.jsonl code=code.jsonl; the first one's loss decides which checkpoint is the best."""
    eval_steps: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Evaluate every this many optimizer steps; 0 evaluates only before and after training."""
    early_stopping: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """End the training after this many evaluations in a row without a lower loss; 0 is never. The adapter of the lowest
    is in best/."""
    sample_prompts: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """File of prompts, .jsonl or one in each line, that are answered at each evaluation; the answers are in
    samples.jsonl."""
    eval_tasks: Annotated[tuple[str, ...], MAY_DIFFER, OF_USER] = ()
    """Tasks of lm-eval, by name or as YAML files, that the sharded model is measured on at each evaluation."""

    # == output ==
    save_model: Annotated[bool, MAY_DIFFER] = True
    """Save checkpoints, and the adapter (or the model, for full) at the end; turn it off when only speed is
    measured."""
    output_dir: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE, OF_USER] = "output"
    """Folder for the results: the adapter, the tokenizer, config.yaml, metrics.jsonl and the checkpoints."""
    overwrite_output_dir: Annotated[bool, MAY_DIFFER, PER_NODE, OF_USER] = False
    """Replace the results of a finished run or of another run in output_dir; an unfinished run with the same options is
    resumed anyway, unless resume is off."""
    base_name: Annotated[str | None, MAY_DIFFER, OF_RESULT] = None
    """Name of the base model on the Hugging Face hub, OWNER/NAME, for the adapter's adapter_config.json and card; by
    default model_name's, which loaders do not find if it is a local folder."""
    push_to_hub: Annotated[str | None, MAY_DIFFER, OF_USER] = None
    """Upload the result to this repository on the Hugging Face hub, OWNER/NAME, which is made if it is not there, at
    the end of the run or of its budget; it is kept in output_dir even if the upload fails."""
    push_public: Annotated[bool, MAY_DIFFER, OF_USER] = False
    """Make a new repository of push_to_hub public, and let push_to_hub and mirror write to a public one; by default a
    new one is private, and a public one is refused."""
    log_to: Annotated[tuple[Literal["tqdm", "stdout", "wandb", "tensorboard", "jsonl"], ...], NOT_EMPTY, MAY_DIFFER] = (
        "tqdm",
    )
    """Where metrics go, one or more; metrics.jsonl and report.html in output_dir are always written. tensorboard writes
    to tensorboard/ in output_dir. If only this or wandb is given, the terminal has a progress bar too; jsonl leaves it
    silent."""
    wandb: Annotated[tuple[str, ...], MAY_DIFFER] = ()
    """What the run is on wandb: project=, by default fsdp_qlora, name=, group= (of runs that belong together), and
    entity=, the user or team that owns it."""
    verbose: Annotated[bool, MAY_DIFFER, PER_NODE] = False
    """Print more at the start: memory by part, kernels, how weights were read, the structure of the model; in a dry run
    all options too."""
    dry_run: Annotated[bool, MAY_DIFFER] = False
    """Build everything without weights, print the sizes, the memory per process and the steps, and stop; verbose
    prints the options too."""

    # == never losing a run ==
    resume: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "auto"
    """Where to start: auto resumes this run from its newest intact checkpoint in output_dir, off starts from scratch,
    and the folder of a checkpoint or of another run of the same options and rows starts from there. To train an adapter
    further, with other options or rows, give adapter instead."""
    save_steps: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Save a checkpoint every this many optimizer steps, besides save_minutes; 0 saves by the clock only. One is always
    saved at the end, at a stop, and after each evaluation that is the best so far."""
    save_minutes: Annotated[float, at_least(0), MAY_DIFFER] = 15.0
    """Save a checkpoint every this many minutes; raise it when all weights train and the disk is slow. 0 is never."""
    save_total_limit: Annotated[int, at_least(1), MAY_DIFFER] = 3
    """How many of the newest checkpoints are kept, besides the one with the lowest evaluation loss."""
    mirror: Annotated[str | None, MAY_DIFFER, PER_NODE, OF_USER] = None
    """Where each checkpoint is copied during training: a folder on another disk or machine, a URL (s3://, gcs://,
    az://, sftp://), hf:OWNER/NAME (a private repository), or rclone:REMOTE:PATH. An empty output_dir, as on a new
    machine, is filled from it."""
    max_hours: Annotated[float | None, POSITIVE, MAY_DIFFER] = None
    """Stop with a checkpoint before the run has taken this many hours, including its earlier starts."""
    on_nonfinite: Annotated[Literal["halt", "skip"], MAY_DIFFER] = "halt"
    """What to do when a loss or gradient is not finite: halt ends the run, skip leaves out the step (10 steps or 1% at
    most)."""
    hang_minutes: Annotated[float, at_least(0), MAY_DIFFER] = 15.0
    """End the run when a process makes no progress for this long, and name the process; raise it when a micro-batch or
    a checkpoint takes longer. 0 is never. Before training, a missing process is waited for 5 minutes at most."""

    # == profiling ==
    profile_memory: Annotated[bool, MAY_DIFFER] = False
    """Log the memory in use after each phase of the start and after the first steps."""
    profile: Annotated[tuple[str, ...], MAY_DIFFER] = ()
    """Record optimizer steps with torch.profiler: the first and the last one, such as 10:12, and what else to record of
    stack (source lines), shapes (of inputs) and memory (a timeline). Where the time went is printed, and written with
    the traces to profiles/ in output_dir."""

    @property
    def kind(self) -> TrainType:
        """The adapter, quantizer and trained part that `train_type` means."""
        return TRAIN_TYPES[self.train_type]

    @property
    def has_reference_beside(self) -> bool:
        """Whether a reference passes through the model beside the policy."""
        return self.has_reference and not self.precompute_reference

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares with the model that training starts from."""
        return OBJECTIVES[self.objective].has_reference and self.objective_settings["beta"] > 0

    @property
    def objective_settings(self) -> dict[str, Any]:
        """The options whose default the objective decides, as they are used."""
        row = OBJECTIVES[self.objective]
        loss_type = row.loss_types[0] if self.loss_type == "auto" else self.loss_type
        return {"beta": row.beta if self.beta is None else self.beta, "loss_type": loss_type}

    @property
    def context_size(self) -> int:
        """Ranks that share each micro-batch, 1 as long as auto has not decided."""
        return 1 if self.context_parallel_size == "auto" else self.context_parallel_size

    @property
    def keeps_start(self) -> bool:
        """Whether that reference is an adapter, which is kept once more, and not the base."""
        return self.has_reference_beside and (self.adapter is not None or self.init_lora_weights != "true")

    @property
    def is_preview(self) -> bool:
        """Whether the run is only shown, by one process, and nothing is trained."""
        return self.dry_run or self.show_samples > 0

    @property
    def learning_rate(self) -> float:
        """`lr`, or what suits the train type and the objective where it is not given."""
        if self.lr is not None:
            return self.lr
        return 1e-5 if self.kind.trains == "all" or self.row_kind != TEXTS else 2e-4

    @property
    def longest_row(self) -> int:
        """The tokens of `context_length`; while it is auto, the most that this may become."""
        return MOST_OF_AUTO if isinstance(self.context_length, str) else self.context_length

    @property
    def row_kind(self) -> RowKind:
        """The kind of rows that the objective learns from."""
        return OBJECTIVES[self.objective].row_kind

    def pick(self, cls: type[Group], *, prefix: str = "", **given: Any) -> Group:
        """The options that belong together, as the dataclass that a library function takes.

        Args:
            cls: a dataclass; each field that is not in `given` is the option of that name.
            prefix: what the options' names begin with and the fields' do not; an option without it is taken where
                there is none with it.
        Raises:
            AttributeError: a field is no option and not given, even if it has a default.
        """
        names = [field.name for field in fields(cls) if field.init and field.name not in given]  # type: ignore[arg-type]
        found = {name: prefix + name if hasattr(self, prefix + name) else name for name in names}
        return cls(**{name: getattr(self, option) for name, option in found.items()}, **given)


DEFAULTS = TrainConfig()

_HINTS = get_type_hints(TrainConfig, include_extras=True)


def marks_of(name: str) -> tuple[Mark | Limit, ...]:
    """The annotations of an option's type."""
    return getattr(_HINTS[name], "__metadata__", ())


def names_marked(mark: Mark) -> tuple[str, ...]:
    """The options with a mark, in the order of the fields."""
    return tuple(name for name in _HINTS if mark in marks_of(name))


RESULT_OPTIONS = {
    name for name in _HINTS for mark in marks_of(name) if isinstance(mark, Mark) and mark.is_of_result
} - {"adapter"}  # a folder of this machine
"""The options that commands read from the files of a result."""


LIMITS = {name: mark for name in _HINTS for mark in marks_of(name) if isinstance(mark, Limit)}
"""Option -> the limit of its values."""


def option_types() -> dict[str, Any]:
    """Option -> its type, without marks; that of a name out of a table is a Literal."""
    types = get_type_hints(TrainConfig)
    return types | {name: Literal[limit.choices] for name, limit in LIMITS.items() if limit.choices}
