"""Options of other trainers (axolotl, LLaMA-Factory, TRL and transformers, torchtune): what they are called here."""

from typing import NamedTuple

# Option here -> its names there. Names that are spelled almost as ours (lora_targets) are found without a row.
_THEIRS = {
    "model_name": "model model_name_or_path base_model",
    "train_type": "load_in_4bit load_in_8bit use_peft use_dora peft_use_dora finetuning_type quantization_bit",
    "objective": "rl stage",
    "beta": "rl_beta pref_beta",
    "sft_weight": "cpo_alpha pref_ftx",
    "desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "adapter": "lora_model_dir adapter_name_or_path",
    "lora_rank": "lora_r",
    "lora_target_modules": "target_modules lora_target lora_target_linear",
    "modules_to_save": "lora_modules_to_save additional_target",
    "use_rslora": "peft_use_rslora",
    "dataset": "datasets dataset_name",
    "eval_dataset": "test_datasets",
    "dataset_samples": "max_samples",
    "eval_fraction": "val_set_size val_size",
    "learn": "train_on_inputs",
    "context_length": "max_length max_seq_length max_seq_len sequence_len cutoff_len",
    "batch_size": "per_device_train_batch_size micro_batch_size",
    "num_epochs": "num_train_epochs epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim optimizer",
    "wd": "weight_decay",
    "grad_norm": "max_grad_norm clip_grad_norm",
    "warmup_steps": "num_warmup_steps",
    "use_activation_cpu_offload": "enable_activation_offloading activation_offloading",
    "precision": "bf16 fp16 dtype torch_dtype",
    "padding": "padding_free",
    "packing": "sample_packing neat_packing",
    "attn_implementation": "flash_attention flash_attn",
    "recompute": "gradient_checkpointing enable_activation_checkpointing",
    "double_quant": "double_quantization bnb_4bit_use_double_quant",
    "resume": "resume_from_checkpoint",
    "early_stopping": "early_stopping_patience",
    "push_to_hub": "hub_model_id",
    "log_to": "report_to",
    "project_name": "wandb_project",
    "name": "wandb_name run_name",
    "entity": "wandb_entity",
}
OTHER_NAMES = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}

# Why there is no such option here -> the options there.
_REASONS = {
    "every step is logged": "logging_steps log_every_n_steps logging_strategy",
    "the model is sharded without a config (see sharding_strategy, use_cpu_offload)": "deepspeed fsdp fsdp_config",
    "it is found from the model's files": "model_type tokenizer_type tokenizer lora_fan_in_fan_out",
    "rows are prepared and cached without it": "dataset_prepared_path overwrite_cache preprocessing_num_workers "
    "dataloader_num_workers dataset_num_proc shuffle",
    "fused kernels are used without it": "use_liger_kernel enable_liger_kernel plugins xformers_attention tf32",
    "give lora_target_modules": "lora_attn_modules apply_lora_to_mlp apply_lora_to_output",
    "training needs no such word": "do_train do_eval strict debug local_rank ddp_timeout",
    "activations are never recomputed reentrantly": "gradient_checkpointing_kwargs",
    "rows are concatenated without padding": "pad_to_sequence_len group_by_length",
    "the model's own chat template is used (see prompt_template)": "chat_template template",
    "the tokenizer's own are used": "special_tokens eos_token pad_token",
    "a checkpoint has all that a resume needs": "save_only_model save_strategy save_adapter_weights_only",
    "report.html in output_dir shows it": "plot_loss",
    "eval_steps says when to evaluate": "eval_strategy evaluation_strategy evals_per_epoch eval_table_size",
    "save_minutes and save_steps say when to save": "saves_per_epoch",
    "batch_size counts for the evaluation too": "per_device_eval_batch_size eval_batch_size",
    "only answers are learned (see learn)": "assistant_only_loss completion_only_loss",
    "log_to wandb logs the metrics": "wandb_watch wandb_log_model use_wandb",
    "noise on embeddings is not supported": "neftune_noise_alpha",
    "a row is not split over ranks": "context_parallel_size sequence_parallel_degree",
}
_NOT_HERE = {name: reason for reason, names in _REASONS.items() for name in names.split()}

_OFF = {"false": ""}
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_hf", "paged_adamw", "paged_adamw_32bit"), "adamw"),  # all in 32 bits
    "adamw_torch_fused": "fused_adamw",
    "adamw_bnb_8bit": "adamw_8bit",
}
# Options there -> their value there -> the value here, "" for the default. A value without a row is the same here.
_VALUES = {
    "load_in_4bit": {"true": "qlora", **_OFF},
    "load_in_8bit": {"true": "int8_lora", **_OFF},
    "quantization_bit": {"4": "qlora", "8": "int8_lora"},
    "use_peft": {"true": "lora", "false": "full"},
    "finetuning_type": {"lora": "lora", "full": "full"},
    "rl stage": {"sft": "", "pt": ""},
    "use_dora peft_use_dora": {"true": "bnb_dora", **_OFF},
    "lora_target_linear": {"true": "all", **_OFF},
    "train_on_inputs": {"true": "all", **_OFF},
    "optim optimizer": _OPTIMIZERS,
    "bf16": {"true": "bf16", "auto": "", **_OFF},
    "fp16": {"true": "fp16", **_OFF},
    "dtype torch_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": ""},
    "padding_free": {"true": "false", "false": "true"},
    "sample_packing neat_packing": {"true": "true", "false": "false"},
    "flash_attention": {"true": "", **_OFF},
    "flash_attn": {"fa2": "flash_attention_2", "auto": "", "disabled": "eager"},
    _THEIRS["recompute"]: {"true": "all", "false": "none"},
    "resume_from_checkpoint": {"true": "", **_OFF},
    "report_to": {"none": "", "all": ""},
}
_VALUES_OF = {name: rows for names, rows in _VALUES.items() for name in names.split()}


class Advice(NamedTuple):
    """option: the one here. value: its value, "" if it is the same as there. reason: why there is no option instead."""

    option: str = ""
    value: str = ""
    reason: str = ""


def advise(name: str, value: str = "") -> Advice | None:
    """What an option of another program is here; None if it is not known.

    Args:
        value: as it is given there; "" if it is given without one.
    """
    if name in _NOT_HERE:
        return Advice(reason=_NOT_HERE[name])
    if name not in OTHER_NAMES:
        return None
    found = _VALUES_OF.get(name, {}).get((value or "true").lower())
    return Advice(reason="that is the default here") if found == "" else Advice(OTHER_NAMES[name], found or "")
