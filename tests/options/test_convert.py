"""Configs of other trainers, converted: what is known is taken, and the rest is a comment with a reason."""

import re
from pathlib import Path

import pytest
import yaml

from fsdp_qlora.cli.main import main
from fsdp_qlora.commands.convert import convert
from fsdp_qlora.config.cli import parse_train_config

pytestmark = pytest.mark.quick

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets:
  - {path: tatsu-lab/alpaca, type: alpaca, split: "train[:90%]"}
val_set_size: 0.05
adapter: qlora
lora_model_dir:
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_target_linear: true
wandb_project: mine
micro_batch_size: 2
optimizer: adamw_torch_fused
learning_rate: 0.0002
bf16: auto
train_on_inputs: false
gradient_checkpointing: true
early_stopping_patience:
logging_steps: 1
weight_decay: 0.0
fsdp: [full_shard]
something_new: 3
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
finetuning_type: lora
quantization_bit: 4
stage: sft
lora_rank: 8
lora_target: q_proj,v_proj
dataset: identity
cutoff_len: 1024
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
fp16: true
val_size: 0.1
eval_steps: 500
learning_rate: 1.0e-4
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_rank: 8, lora_alpha: 16}
optimizer: {_component_: torch.optim.AdamW, weight_decay: 0.01, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset}
resume_from_checkpoint: false
epochs: 1
batch_size: 2
dtype: bf16
"""
# Config -> what is taken, and the names that are comments.
CASES: dict[str, tuple[str, dict[str, object], set[str]]] = {
    "axolotl": (
        AXOLOTL,
        {
            "train_type": "qlora", "model_name": "NousResearch/Meta-Llama-3-8B", "eval_fraction": 0.05,
            "dataset": ["tatsu-lab/alpaca[train[:90%]]"], "context_length": 4096, "packing": True, "lora_rank": 32,
            "lora_target_modules": "all", "project_name": "mine", "log_to": ["wandb"], "batch_size": 2, "wd": 0,
            "optimizer": "fused_adamw", "lr": 0.0002, "recompute": "all",
        },
        {"model_type", "pad_to_sequence_len", "bf16", "train_on_inputs", "logging_steps", "fsdp", "something_new"},
    ),
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        {
            "train_type": "qlora", "model_name": "Qwen/Qwen3-4B", "lora_target_modules": "q_proj,v_proj",
            "lora_rank": 8, "lora_alpha": 16, "context_length": 1024, "num_epochs": 3,
            "lr_scheduler": "cosine", "warmup_ratio": 0.1, "lr": 1e-4,
            "precision": "fp16", "eval_fraction": 0.1, "eval_steps": 500, "dataset": "./GIVE_THE_ROWS.jsonl",
        },
        {"stage", "dataset"},
    ),
    "torchtune": (
        TORCHTUNE,
        {
            "train_type": "lora", "lora_rank": 8, "lora_alpha": 16, "optimizer": "adamw", "wd": 0.01, "lr": "3e-4",
            "lr_scheduler": "cosine", "warmup_steps": 100, "num_epochs": 1, "batch_size": 2, "precision": "bf16",
            "model_name": "./GIVE_THE_MODEL", "dataset": "./GIVE_THE_ROWS.jsonl",
        },
        {"dataset", "resume_from_checkpoint"},
    ),
    "16 bits": (
        """
base_model: a/b
adapter: lora
load_in_8bit: false
use_dora: true
optimizer: paged_adamw_32bit
datasets: [{path: json, data_files: [c.jsonl, d.jsonl]}]
""",
        {"train_type": "dora", "model_name": "a/b", "optimizer": "adamw", "dataset": ["c.jsonl", "d.jsonl"]},
        set(),
    ),
    "all weights": (
        "base_model: a/b\ndatasets: [{path: c/d}]\n",
        {"train_type": "full", "model_name": "a/b", "dataset": ["c/d"]},
        set(),
    ),
    "preferences": (
        "base_model: a/b\nload_in_4bit: true\nrl: kto\nrl_beta: 0.2\nkto_undesirable_weight: 0.5\n"
        "datasets: [{path: c/d}]\n",
        {
            "train_type": "qlora", "model_name": "a/b", "objective": "kto", "beta": 0.2, "undesirable_weight": 0.5,
            "dataset": ["c/d"],
        },
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_known_is_taken_and_the_rest_is_a_comment(case: str, tmp_path: Path) -> None:
    text, taken, left = CASES[case]
    (tmp_path / "theirs.yaml").write_text(text)
    made = convert(tmp_path / "theirs.yaml")
    assert yaml.safe_load(made) == taken
    assert set(re.findall(r"^# (\w+): .+  \(.+\)$", made, re.MULTILINE)) == left
    (tmp_path / "ours.yaml").write_text(made)
    parse_train_config(["--config", str(tmp_path / "ours.yaml")])


def test_conflicts_and_files_that_are_no_configs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    for text, said in (
        ("base_model: a/b\neval_steps: 5\n", "--eval_steps needs rows"),
        ("base_model: a/b\nload_in_8bit: true\nuse_dora: true\n", "'GIVE_ONE' is not a choice"),
    ):
        path.write_text(text)
        assert main(["convert", str(path)]) == 0
        made = capsys.readouterr().out
        assert "# To be changed before it starts: " in made and said in made
    for text in ("- a", "a: [", ""):
        path.write_text(text)
        assert main(["convert", str(path)]) == 2 and str(path) in capsys.readouterr().err
