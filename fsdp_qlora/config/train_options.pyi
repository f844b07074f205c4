"""The keywords of `fsdp_qlora.train`, for editors and type checkers. Written by scripts/update_docs.py."""
# ruff: noqa
# fmt: off

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

class TrainOptions(TypedDict, total=False):
    model_name: str | PathLike[str]
    "Name on the Hugging Face hub, or local folder, of the decoder-only model to fine-tune."
    train_type: Literal['full', 'lora', 'qlora', 'dora', 'bnb_dora', 'custom_lora', 'custom_qlora', 'hqq_lora', 'hqq_dora', 'int8_lora', 'bnb_llama_pro', 'hqq_llama_pro']
    "Part of the model that trains. An adapter on a base in 4 bits (qlora, as custom_qlora), 8 to 2 bits by HQQ (hqq_lora), 8 bits (int8_lora) or 16 bits (lora, as custom_lora); a DoRA adapter (bnb_dora, hqq_dora, dora); the blocks that `expand` inserted into a quantized base (bnb_llama_pro, hqq_llama_pro); or all weights (full)."
    precision: Literal['auto', 'fp32', 'bf16', 'fp16', 'fp16_autocast', 'bf16_autocast', 'bf16_buffers_autocast']
    "Number format of the computation; auto is bf16 on GPUs that support it, fp16 on older GPUs and fp32 on the CPU. Trainable weights are kept in fp32; with fp16 the loss is scaled, and a step whose gradients overflow is skipped."
    attn_implementation: Literal['auto', 'sdpa', 'flash_attention_2', 'eager']
    "Attention kernels; auto uses PyTorch's flash kernel or flash-attn on Ampere and newer GPUs, else SDPA, or eager for models that do not support SDPA."
    trust_remote_code: bool
    "Run Python code from the model's files, with your permissions. Models that transformers does not know need it; read that code first."
    quant_type: Literal['auto', 'nf4', 'fp4', 'mxfp4', 'nvfp4', 'fp8']
    "Format of the frozen base: nf4 or fp4 of bitsandbytes, or one in which models are served: mxfp4 (4.25 bits per weight), nvfp4 (4.5) or fp8 (8, with a scale for each row). auto keeps the weights of a model that is published in one of these as they are, and is nf4 for others."
    double_quant: bool
    "Quantize the scales of nf4's and fp4's blocks too, which saves about 0.4 bits per weight."
    n_bits: int
    "Bits per weight of an HQQ base: 8, 4, 3 or 2; fewer save memory and cost quality."
    group_size: int
    "Number of weights that share a scale and a zero point in an HQQ base, a multiple of 32; smaller groups are more accurate, and each takes 32 bits."
    int8_threshold: float
    "Magnitude from which activations are not rounded to 8 bits with an int8 base (LLM.int8's outliers); 0 rounds all of them, which is faster and less accurate."
    allow_unquantized: bool
    "Train although less than 90% of the parameters of the decoder blocks can be quantized (embeddings and head do not count); the others take their full memory."
    quant_cache: str | PathLike[str]
    "Folder that caches the quantized weights (in 4 bits a quarter of the model's size) for later starts; auto is quantized/ in FSDP_QLORA_CACHE or in the user's cache folder, off disables the cache."
    dataset: Any
    "Rows to train on, one or more of: alpaca, alpaca_sample, alpaca_demo (no network needed), guanaco, sql, orca_math, dummy (to measure speed), owner/name:config[split][:1000] on the Hugging Face hub, a .json, .jsonl, .csv, .tsv, .parquet or .txt file (or one of these with .gz or .zst), or a folder of them or of datasets.save_to_disk. Several are joined; with weights, as in a.jsonl:0.7 b.parquet:0.3, an epoch has these shares and ends before a dataset would repeat a row; the next epoch continues with the next rows of each."
    dataset_samples: int | None
    "Number of first rows to use of each dataset; by default all (alpaca_sample, orca_math and dummy have their own sizes)."
    dataset_format: Literal['auto', 'alpaca', 'pretokenized', 'preference', 'messages_rejected', 'json_pair', 'ratings', 'label', 'rating', 'messages', 'sharegpt', 'dolly', 'question_answer', 'prompt_completion', 'guanaco', 'text', 'responses', 'items', 'request_response', 'atif', 'verifiers']
    "Format of the rows; auto detects it from the names of the columns."
    columns: str | PathLike[str] | Sequence[Any]
    "Columns of the dataset whose names differ from the format's, as FORMAT'S=DATASET'S, such as instruction=task,output=result; ignore=NAME leaves out a column that makes rows invalid."
    prompt_template: str | PathLike[str] | None
    "Text around instructions and questions: alpaca, question_answer, plain, vicuna, chat (the model's own chat template), a text file with {instruction}, {input} and {system}; or a chat template for models without one: chatml, user_assistant, a .jinja file. By default the model's chat template, also for instructions and questions if the model was made for chats (it stops at a token that its template writes); otherwise the format's text."
    learn: str | PathLike[str] | Sequence[Any]
    "Tokens to train on: assistant (every turn of the assistant, or every response), last (only the last one), final (the answers behind the last result of a tool, else the last one) or all (the prompts too). Further words leave parts of these turns out, which are then only read: -reasoning, -empty_reasoning (blocks without words) and -tool_calls, as in assistant,-reasoning. An empty block that a chat template writes by itself is only read, unless +empty_reasoning is given."
    context_length: Literal['auto'] | int
    "Maximum tokens per row; longer rows are truncated, and a row whose prompt fills it is left out. auto is the smallest power of two that keeps 99% of the rows of each dataset whole, at most 4,096; a resumed run keeps its value."
    max_bad_rows: float
    "Maximum share of rows that are left out, because they are malformed or their prompt fills the context; with more, the run does not start. rejected.jsonl lists them."
    shuffle: bool
    "Take the rows in a random order, another one in each epoch. false takes them in their own order in every epoch, as for a curriculum, and several datasets one after the other."
    drop_duplicates: bool
    "Leave out rows to train on that equal an earlier or a held-out one: in their tokens, what is learned of them, and images. Without it they are counted, where there are at most 134 million tokens. Prompts are compared by their tokens alone."
    eval_fraction: float
    "Share of the rows to hold out for evaluation, such as 0.05."
    eval_dataset: Any
    "Rows for evaluation, named as in dataset: rows.jsonl, folder[test], owner/name[validation]. Several are evaluated one by one, as in chat=chat.jsonl code=code.jsonl; the first one's loss decides which checkpoint is the best."
    objective: Literal['sft', 'dpo', 'ipo', 'kto', 'cpo', 'simpo', 'orpo', 'grpo', 'distill', 'distill_on_policy']
    "Training objective, named as in TRL: sft trains on texts; dpo, ipo, cpo, simpo and orpo on pairs of a chosen and a rejected answer; kto on answers with a label; grpo on the model's own completions of prompts, by their rewards; distill on the probabilities of a teacher, another model or the frozen base with a prompt of its own, and distill_on_policy on these for the model's own completions. cpo, simpo and orpo need no reference model; the reference of dpo, ipo and kto, and distill's base, run in the same forward pass."
    lr: float | None
    "Peak learning rate; by default 2e-4 for adapters and new blocks, and 1e-5 for full and for preferences."
    batch_size: int
    "Rows per process in one forward pass; raise it until memory is full."
    gradient_accumulation_steps: int
    "Forward and backward passes per optimizer step; raise it for a larger batch in the same memory."
    num_epochs: int
    "Passes over the dataset."
    max_steps: int
    "Number of optimizer steps after which the run ends, earlier starts included; -1 runs all epochs. Of a dataset that has many more rows than the steps take, a part is read."
    lr_scheduler: Literal['constant', 'linear', 'cosine']
    "Learning rate after the warm-up: constant, or decreasing to 0 after the last step."
    warmup: int | float
    "Optimizer steps over which the learning rate rises from 0: a share of all, such as 0.03, or a number."
    optimizer: Literal['adamw', 'adam', 'sgd', 'adadelta', 'fused_adamw', 'fused_adam', 'adamw_8bit', 'paged_adamw_8bit', 'lion', 'lion_8bit']
    "Optimizer; the 8-bit ones need less memory, and the paged one moves state that does not fit to the host. On a GPU adamw and adam are fused; fused_adamw and fused_adam are fused for weights on a CPU too."
    wd: float
    "Weight decay; 0.01 to 0.1 is usual when all weights train."
    grad_norm: float
    "Largest global gradient norm; larger gradients are scaled down to it. Lower it when the loss jumps; 0 turns clipping off."
    neftune_alpha: float
    "Noise on the embeddings in training (NEFTune): even, up to neftune_alpha / sqrt(tokens of the row * hidden size); 5 is usual for short instructions, 0 is none."
    batching: Literal['padding_free', 'packed', 'padded']
    "Layout of a micro-batch. padding_free concatenates its rows without padding, keeps attention within each row and gives all ranks about equally many tokens. packed also takes as many rows as fit batch_size x context_length tokens, which saves time with gradient_accumulation_steps above 1. padded pads to the longest row, as some models need."
    early_stopping: int
    "Number of evaluations in a row without a lower loss (or a higher score: see best_by) after which training ends (best/ has the best adapter); 0 is never."
    best_by: str | PathLike[str] | None
    "Measure of the held-out rows that chooses best/ and counts for early_stopping: loss (the lowest), or with eval_rewards a score (the highest): reward for the sum of all functions, or the name of one. By default the loss, and reward where a run has no held-out loss."
    seed: int
    "Seed of the adapter's initial values, the dropout, the order of the rows and the choice of held-out rows."
    deterministic: bool
    "Use only kernels that give the same bits every time, so that a run on a GPU can be repeated and resumed to the last bit; slower, and an operation without such a kernel raises an error. Runs on a CPU are always deterministic."
    adapter: str | PathLike[str] | None
    "Folder of a PEFT adapter to train further, or its name on the hub. Its rank, scale and layers are kept; optimizer and rows start anew. To resume an interrupted run, leave this option as it is: see resume."
    lora_rank: int
    "Rank of the adapter; raise it when the training loss stays high, at the cost of memory."
    lora_alpha: float
    "Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."
    lora_dropout: float
    "Dropout on the adapter's input; try 0.05 to 0.1 when the model overfits a small dataset."
    lora_target_modules: str | PathLike[str] | Sequence[Any]
    "Linear layers that get an adapter: all (or all-linear), default (PEFT's choice for the model), layer names such as q_proj,v_proj, or one regular expression for whole paths such as .*layers.1\\d.*_proj (without commas). These are of the decoder; vision and projector, beside them or alone, add the layers that compute images. With none, experts alone have an adapter."
    lora_target_parameters: str | PathLike[str] | Sequence[Any]
    "Expert weights of a mixture-of-experts model that get an adapter too, named as in PEFT, such as mlp.experts.gate_up_proj,mlp.experts.down_proj; by default none."
    modules_to_save: str | PathLike[str] | Sequence[Any]
    "Embeddings and head to train in full with the adapter and to save in its file, such as embed_tokens,lm_head; for new tokens or another language. Each takes 16 bytes per weight, divided among the ranks."
    add_tokens: str | PathLike[str] | Sequence[Any]
    "New tokens, such as <think>,</think>, or a .txt file of one in each line; only their rows of embeddings and head train (PEFT's trainable_token_indices). A row starts from the mean of all rows or, as in \"<think>: begin to reason\", of a description's rows; a token that the model has keeps its row."
    use_rslora: bool
    "Scale the adapter by lora_alpha / sqrt(lora_rank), which keeps high ranks learning (rsLoRA)."
    init_lora_weights: Literal['true', 'loftq']
    "Initial values of the adapter: true (A random, B zero), or loftq (from the quantization error)."
    merge_aware: bool
    "Train the adapter as it will be merged: each weight with its update is rounded to the format of the base's files before it is multiplied, so that merge writes the very weights that were evaluated. For a base in MXFP4, NVFP4, FP8 or bitsandbytes' 4 bits; the adapter alone is of no use."
    rank_pattern: str | PathLike[str] | Sequence[Any]
    "Ranks that differ for some layers, such as down_proj=32,layers.0.self_attn.q_proj=4; a name is a regular expression for the end of a path, as in PEFT, and the first match wins."
    alpha_pattern: str | PathLike[str] | Sequence[Any]
    "Values of lora_alpha that differ for some layers, written like rank_pattern."
    loraplus_lr_ratio: float
    "Ratio of the learning rates of the adapter's B and A (LoRA+); 16 with a lower lr often learns faster."
    beta: float | None
    "Strength of a preference objective: higher values keep the model closer to the base (dpo, ipo, kto, cpo) or weigh the odds ratio (orpo); for simpo 2 to 2.5 is usual. For grpo, the KL weight: 0, the default, disables the reference. For distill, the divergence: 0, the default, is KL(teacher || student), 1 is KL(student || teacher), and what is between is the generalized Jensen-Shannon divergence."
    loss_type: Literal['auto', 'sigmoid', 'dft', 'hinge', 'robust', 'sigmoid_norm', 'dapo', 'grpo', 'dr_grpo', 'gspo', 'cispo']
    "Loss of dpo and cpo: sigmoid, hinge, robust (unbiased if the share label_smoothing of the pairs is swapped), sigmoid_norm (sigmoid of means over tokens). For grpo, the divisor of the sum over tokens: dapo (the tokens of a step), grpo (each answer's tokens, then the answers), dr_grpo (the answers times max_completion_length); gspo clips the ratio of a whole answer, divided as by grpo, and cispo keeps the gradient of clipped tokens, divided as by dapo. For sft, dft multiplies the loss of each token by its probability, which has no gradient. auto is the plain loss for sft, dapo for grpo, and else sigmoid."
    label_smoothing: float
    "Share of the pairs whose answers may be swapped: conservative with loss_type sigmoid, unbiased with robust."
    sft_weight: float | None
    "Weight of the usual loss on the chosen answers (with distill, on all answers), added to the objective's loss; by default 1 for orpo and cpo, else 0."
    simpo_gamma: float
    "Margin by which the chosen answer's reward should be larger in simpo."
    kto_weights: str | PathLike[str] | Sequence[Any]
    "Weights of kto's desired and undesired answers (TRL's desirable_weight, undesirable_weight); raise the weight of the rarer kind, such as 3,1, so that both count about equally."
    rating_threshold: float | None
    "Rating from which an answer is good, for rows with ratings. kto labels answers by it; the other objectives pair a row's best and worst answer if it lies between their ratings."
    precompute_reference: bool
    "Compute the reference's log-probabilities for dpo, ipo and kto once before training, and cache them with the tokenized rows; saves time from the second epoch or run on, and the copy of the starting adapter."
    teacher: str | PathLike[str] | None
    "Model that distill learns from, a name or folder, or a folder that `teach` wrote. It is quantized as train_type says, sharded by the same plan, and computes its probabilities before training; distill_on_policy needs it on a server, teacher_url. By default the frozen base, with the prompts of the columns teacher_prompt and teacher_system."
    teacher_adapter: str | PathLike[str] | None
    "Folder of a PEFT adapter of the teacher."
    teacher_url: str | PathLike[str] | None
    "Server that has the teacher of distill_on_policy, such as http://host:8000: vLLM, or another whose completions API gives prompt_logprobs."
    top_k: int
    "Number of the teacher's top tokens to keep for each learned token; all others count as one. Each takes 6 bytes."
    rewards: str | PathLike[str] | Sequence[Any]
    "Functions that score the completions in grpo; their rewards are added. Each is FILE.py:function or the name of a built-in one, with =WEIGHT if that is not 1, such as exact_match,style.py:is_short=0.5."
    environment: str | PathLike[str] | Sequence[Any]
    "Environment of grpo whose tools the model calls, in several turns: FILE.py:Class (TRL's form of environments), or verifiers:NAME. Several have names that the rows' column environment gives, such as game=play.py:Game,code=run.py:Code."
    max_turns: int
    "Maximum turns of the model in an episode with an environment."
    tool_seconds: float
    "Seconds that a call of an environment may take; a longer one ends its episode."
    episode_seconds: float
    "Seconds that all calls of an environment in an episode may take together."
    num_generations: int
    "Completions per prompt, which are compared with each other."
    max_completion_length: int
    "Maximum tokens per completion in grpo and distill_on_policy, and of an answer that eval_rewards scores; longer completions are truncated."
    temperature: float
    "Sampling temperature. The loss uses the same temperature; with distill it applies to student and teacher."
    scale_rewards: Literal['group', 'batch', 'none']
    "Standard deviation by which advantages are divided: over the completions of a prompt (group), over all completions of a step (batch), or no division (none)."
    epsilon: str | PathLike[str] | Sequence[Any]
    "Clipping range of the probability ratio between the model and the one that sampled; with two numbers, such as 0.2,0.28, the second one is for increases (TRL's epsilon_high). For cispo the last number is the largest ratio itself. By default 0.2, for gspo 0.0003,0.0004, and for cispo 5."
    num_iterations: int
    "Optimizer steps on the same completions."
    rollout_url: str | PathLike[str] | None
    "Server that completes the prompts, such as http://host:8000: vLLM, or another with OpenAI's completions API that loads LoRA adapters at run time. Prompts with images need vLLM with --enable-scale-out. The difference between its probabilities and the trainer's is corrected (truncated importance sampling). By default the model in training generates them itself."
    rollout_ahead: bool
    "Have rollout_url's server complete the prompts of the next step while a step trains. Steps then learn from completions of weights that are one step older (num_iterations steps, if that is above 1); the correction for a server covers it."
    on_reward_error: Literal['stop', 'zero']
    "Action when a reward function fails or takes hang_minutes: stop ends the run with a checkpoint, zero counts a reward of 0."
    eval_rewards: str | PathLike[str] | Sequence[Any]
    "Functions, as in rewards, that score answers to the held-out prompts at each evaluation, with any objective: the model answers greedily, and eval_reward is the mean of their sums."
    auto: bool
    "Choose the fastest settings that are planned to fit the GPUs before training: batch_size and gradient_accumulation_steps with the same rows per step, and sharding_strategy and use_cpu_offload where these are auto. A resumed run keeps them; `fsdp-qlora plan --auto` shows them for other GPUs."
    sharding_strategy: Literal['auto', 'full_shard', 'shard_grad_op', 'ddp', 'hybrid_full_shard', 'hybrid_shard_grad_op']
    "Distribution of the model: full_shard needs the least memory, shard_grad_op keeps gathered weights until the backward pass, ddp replicates the model on every process, hybrid_ shards within a machine and replicates between machines. On GPUs auto chooses ddp if the whole model fits on each with a margin, else, between machines, hybrid_full_shard if it fits on one of them, else full_shard; on a CPU full_shard."
    recompute: Literal['auto', 'all', 'none', 'offload', 'host'] | int
    "Decoder blocks that recompute their activations in the backward pass instead of keeping them (activation checkpointing): all needs little memory, none is the fastest, a number means the first ones, and offload is all with the blocks' inputs in host memory, for very long rows. host recomputes none, and keeps the activations of all blocks but the last in host memory. On GPUs auto finds the smallest number that fits, by probing before the first step; on a CPU auto means all."
    kernels: Literal['auto', 'plain']
    "Ways in which the parts of a block are computed. auto computes layers that share an input together, and on a GPU takes, for each part, the fastest kernel that is right there: a short trial at the start shows which are. plain takes the kernels of PyTorch and the libraries for all parts."
    use_cpu_offload: Literal['auto'] | bool | int
    "Keep the frozen base (with full: the weights, gradients and optimizer) in host memory, and copy each block to the GPU when it is needed. A number above 1 offloads that many decoder blocks. On GPUs auto offloads all if the model does not fit otherwise."
    context_parallel_size: Literal['auto'] | int
    "Processes of a machine that share each micro-batch, for rows too long for one GPU: each computes a part of the tokens, and in attention a part of the heads. With N of them, an optimizer step has N times fewer rows. auto picks the smallest N that fits the longest rows, and multiplies gradient_accumulation_steps by it."
    output_dir: str | PathLike[str]
    "Folder for the results: the adapter, the tokenizer, config.yaml, metrics.jsonl and the checkpoints."
    save_model: bool
    "Save checkpoints, and the adapter (or the model, for full) at the end; turn it off to measure speed only."
    save_every: str | PathLike[str] | Sequence[Any]
    "Minutes (15m) or optimizer steps (500) between two checkpoints, or both (500,15m); raise it for slow disks. Checkpoints are also saved at the end, on a stop, and after a new best evaluation; none saves only these."
    save_total_limit: int
    "Number of newest checkpoints to keep, besides the one with the lowest evaluation loss."
    mirror: str | PathLike[str] | None
    "Copy of each checkpoint elsewhere: a folder on another disk or machine, a URL (s3://, gcs://, az://, sftp://), or hf:OWNER/NAME (a private repository; hf:OWNER/NAME:public allows a public one). An empty output_dir, as on a new machine, is filled from it."
    push_to_hub: str | PathLike[str] | None
    "Repository on the Hugging Face hub, OWNER/NAME, to upload the result to at the end of the run or of its budget. A new one is private, and a public one is refused, unless :public follows the name. output_dir has the result even if the upload fails."
    base_name: str | PathLike[str] | None
    "Name of the base model on the Hugging Face hub, OWNER/NAME, for the adapter's adapter_config.json and card; by default model_name, which others cannot find if it is a local folder."
    log_to: str | PathLike[str] | Sequence[Any]
    "Destinations of the metrics, besides metrics.jsonl and report.html in output_dir. tensorboard writes to tensorboard/ in output_dir. wandb and trackio take settings, as in wandb,project=mine,name=first: project, name, group (for runs that belong together) and, wandb alone, entity (the owner). Only jsonl leaves the terminal silent."
    eval_steps: int
    "Optimizer steps between two evaluations; 0 evaluates only before and after training."
    eval_tasks: str | PathLike[str] | Sequence[Any]
    "Tasks of lm-eval, by name or as YAML files, to measure the sharded model on at each evaluation."
    sample_prompts: str | PathLike[str] | None
    "File of prompts, .jsonl or one in each line, to answer at each evaluation; samples.jsonl has the answers."
    resume: str | PathLike[str]
    "Start of the run: auto resumes the run in output_dir from its newest intact checkpoint, off starts from scratch, and a folder starts from that checkpoint, or run with the same options and rows. auto:replace, off:replace and so on replace a finished or another run in output_dir. To train an adapter with other options or rows, see adapter."
    nproc_per_node: int
    "Number of processes to start on this machine; -1 is one per visible GPU, or one on a CPU. world_size is another name for it."
    device: Literal['auto', 'cpu', 'cuda']
    "Device of the computation; auto takes the visible GPUs, or the CPU of a machine without one. A dry run without a GPU plans for one, unless this is cpu."
    dry_run: Literal['samples', 'samples='] | bool
    "Print the plan or rows and stop before training: true prints the sizes, the memory per process and the steps, without loading weights; samples prints three rows as the model sees them, with the trained tokens in colour, and samples=10 ten."
    verbose: bool
    "Print more at the start: memory, kernels, how weights were read, the model; in a dry run all options too."
    max_hours: float | None
    "Maximum hours of the run, earlier starts included; it stops in time, with a checkpoint."
    hang_minutes: float
    "Minutes without progress of a process after which the run ends and names it; raise it when a micro-batch, a checkpoint or a reward function takes longer. 0 is never. A missing process ends the run after at most 5 minutes."
    on_nonfinite: Literal['halt', 'skip']
    "Action when a loss or gradient is not finite: halt ends the run, skip leaves out the step (at most 10 steps or 1% of them)."
