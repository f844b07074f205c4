"""Options of other programs -> ours: for people who come from there, and what spelling alone would not find."""

# Name there -> the option here, with its value where the name stands for one.
OTHER_NAMES = {
    # the Hugging Face trainer, PEFT and TRL
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "weight_decay": "wd",
    "max_grad_norm": "grad_norm",
    "max_length": "context_length",
    "max_seq_length": "context_length",
    "model": "model_name",
    "model_name_or_path": "model_name",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "report_to": "log_to",
    "run_name": "name",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "target_modules": "lora_target_modules",
    "resume_from_checkpoint": "resume",
    "dataset_name": "dataset",
    "load_in_4bit": "train_type qlora",
    "load_in_8bit": "train_type int8_lora",
    "use_peft": "train_type qlora",
    "use_dora": "train_type bnb_dora",
    "padding_free": "padding false",
    "bf16": "precision bf16",
    "fp16": "precision fp16",
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "double_quant",
    # axolotl
    "base_model": "model_name",
    "lora_model_dir": "adapter",
    "early_stopping_patience": "early_stopping",
    "hub_model_id": "push_to_hub",
    "datasets": "dataset",
    "sequence_len": "context_length",
    "sample_packing": "packing true",
    "micro_batch_size": "batch_size",
    "val_set_size": "eval_fraction",
    "lora_r": "lora_rank",
    "lora_target_linear": "lora_target_modules all",
    "wandb_project": "project_name",
    "wandb_name": "name",
    "wandb_entity": "entity",
    "flash_attention": "attn_implementation flash_attention_2",
    # LLaMA-Factory
    "adapter_name_or_path": "adapter",
    "finetuning_type": "train_type qlora",
    "cutoff_len": "context_length",
    "neat_packing": "packing true",
    "lora_target": "lora_target_modules",
    "quantization_bit": "train_type qlora",
    "max_samples": "dataset_samples",
    "val_size": "eval_fraction",
    "flash_attn": "attn_implementation",
}

# Name there -> why nothing stands for it here.
UNSUPPORTED = {
    "logging_steps": "every step is logged",
}
