"""The keywords of `fsdp_qlora.train` with their types, for editors and type checkers.

Written by scripts/update_docs.py from the fields of TrainConfig; nothing imports it when a program runs.
"""
# ruff: noqa: E501
# fmt: off

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str]
Texts = Text | Sequence[Text]


class TrainKeywords(TypedDict, total=False):
    """docs/options.md says what each option does."""

    world_size: int
    nproc_per_node: int
    master_addr: Text
    master_port: int
    device: Literal["auto", "cpu", "cuda"]
    model_name: Text
    trust_remote_code: bool
    llama_pro_path: Text | None
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "eager"]
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast"]
    train_type: Literal["full", "lora", "qlora", "dora", "bnb_dora", "custom_lora", "custom_qlora", "hqq_lora", "hqq_dora", "int8_lora", "bnb_llama_pro", "hqq_llama_pro"]
    adapter: Text | None
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: Texts
    lora_target_parameters: Texts
    modules_to_save: Texts
    use_rslora: bool
    init_lora_weights: Text
    rank_pattern: Texts
    alpha_pattern: Texts
    batch_size: int
    context_length: int
    gradient_accumulation_steps: int
    padding: bool
    packing: bool
    num_epochs: int
    max_steps: int
    lr: float | None
    lr_scheduler: Literal["constant", "linear", "cosine"]
    warmup_ratio: float
    warmup_steps: int
    optimizer: Literal["adamw", "adam", "sgd", "adadelta", "fused_adamw", "fused_adam", "adamw_8bit", "paged_adamw_8bit", "lion", "lion_8bit", "adafactor", "muon", "schedule_free_adamw"]
    loraplus_lr_ratio: float
    wd: float
    apply_gradient_clipping: bool
    grad_norm: float
    seed: int
    deterministic: bool
    sharding_strategy: Literal["auto", "full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"]
    recompute: Literal["auto", "all", "none"] | None
    use_gradient_checkpointing: bool | None
    compile: bool
    use_cpu_offload: Literal["auto"] | None
    use_activation_cpu_offload: bool
    loading_buffer_mib: int
    quant_type: Literal["nf4", "fp4"]
    double_quant: bool
    n_bits: int
    group_size: int
    int8_threshold: float
    quant_storage: Literal["auto", "fp32", "fp16", "bf16"]
    allow_unquantized: bool
    quant_cache: Text
    dataset: Texts
    dataset_samples: int | None
    streaming: bool
    shuffle_buffer: int
    dataset_format: Literal["auto", "alpaca", "pretokenized", "preference", "messages", "sharegpt", "dolly", "question_answer", "prompt_completion", "guanaco", "text"]
    columns: Texts
    prompt_template: Text | None
    learn: Literal["assistant", "last", "all"]
    show_samples: int
    on_bad_row: Literal["skip", "error"]
    max_bad_rows: float
    eval_fraction: float
    eval_dataset: Texts
    eval_steps: int
    early_stopping: int
    sample_prompts: Text | None
    save_model: bool
    output_dir: Text
    overwrite_output_dir: bool
    base_name: Text | None
    push_to_hub: Text | None
    push_public: bool
    log_to: Literal["tqdm", "stdout", "wandb", "tensorboard", "trackio", "jsonl"] | Sequence[Literal["tqdm", "stdout", "wandb", "tensorboard", "trackio", "jsonl"]]
    project_name: Text
    name: Text | None
    group: Text | None
    entity: Text | None
    verbose: bool
    dry_run: bool
    resume: Text
    save_steps: int
    save_minutes: float
    save_total_limit: int
    mirror: Text | None
    max_hours: float | None
    max_cost_usd: float | None
    price_per_hour: float | None
    on_nonfinite: Literal["halt", "skip"]
    hang_minutes: float
    profile_memory: bool
    profile: bool
    profiling_output: Text
    with_stack: bool
    with_shapes: bool
    export_trace: bool
    export_memory_timeline: bool
    wait_steps: int
    profiling_warmup_steps: int
    active_steps: int
    repeat: int
    profiling_frequency: int
    low_memory: bool | None
    no_sync: bool | None
    reentrant_checkpointing: bool | None
    loading_workers: int | None
