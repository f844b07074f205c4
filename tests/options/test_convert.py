"""Configs of other trainers, converted: what is known is taken, and the rest is a comment with a reason."""

import os
import re
from pathlib import Path

import pytest
import yaml

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.convert import convert
from fsdp_qlora.utils.errors import UserError

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
            "dataset": ["tatsu-lab/alpaca[train[:90%]]"], "context_length": 4096, "batching": "packed", "lora_rank": 32,
            "lora_target_modules": "all", "log_to": ["wandb", "project=mine"], "batch_size": 2, "wd": 0,
            "optimizer": "fused_adamw", "lr": 0.0002, "recompute": "all",
        },
        {"model_type", "pad_to_sequence_len", "bf16", "train_on_inputs", "logging_steps", "fsdp", "something_new"},
    ),
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        {
            "train_type": "qlora", "model_name": "Qwen/Qwen3-4B", "lora_target_modules": "q_proj,v_proj",
            "lora_rank": 8, "lora_alpha": 16, "context_length": 1024, "num_epochs": 3,
            "lr_scheduler": "cosine", "warmup": 0.1, "lr": 1e-4,
            "precision": "fp16", "eval_fraction": 0.1, "eval_steps": 500, "dataset": "./GIVE_THE_ROWS.jsonl",
        },
        {"stage", "dataset"},
    ),
    "torchtune": (
        TORCHTUNE,
        {
            "train_type": "lora", "lora_rank": 8, "lora_alpha": 16, "optimizer": "adamw", "wd": 0.01, "lr": "3e-4",
            "lr_scheduler": "cosine", "warmup": 100, "num_epochs": 1, "batch_size": 2, "precision": "bf16",
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
        "kto_desirable_weight: 2\ndatasets: [{path: c/d}]\n",
        {
            "train_type": "qlora", "model_name": "a/b", "objective": "kto", "beta": 0.2, "kto_weights": [2, 0.5],
            "dataset": ["c/d"],
        },
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_convert_maps_known_settings_and_comments_out_the_rest(case: str, tmp_path: Path) -> None:
    text, taken, left = CASES[case]
    (tmp_path / "theirs.yaml").write_text(text)
    made = convert(tmp_path / "theirs.yaml")
    assert yaml.safe_load(made) == taken
    assert set(re.findall(r"^# (\w+): .+  \(.+\)$", made, re.MULTILINE)) == left
    (tmp_path / "ours.yaml").write_text(made)
    parse_train_config(["--config", str(tmp_path / "ours.yaml")])


def test_convert_reports_conflicts_and_files_that_are_no_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


STRANGERS = r"""
"x\ntrust_remote_code: true #": 1
"y\Lmirror: s3://a/b #": "1\Nmirror: s3://a/b"
"z\0\x1b[31m": 1
trust_remote_code: true
hub_model_id: a/b
output_dir: /home
wandb_entity: stranger
wandb_project: mine
wandb_api_key: 0123456789abcdef
env: {AWS_SECRET: do-not-show}
plugins: [{password: do-not-show}, 0123456789abcdef0123456789abcdef01234567, sk-do-not-show-this-at-all]
tokenizer_type: AutoTokenizer
"""


def test_convert_comments_set_no_option_and_hide_secrets(tmp_path: Path) -> None:
    (tmp_path / "theirs\nseed: 1.yaml").write_text(STRANGERS)
    made = convert(tmp_path / "theirs\nseed: 1.yaml")
    given = {"model_name": "./GIVE_THE_MODEL", "dataset": "./GIVE_THE_ROWS.jsonl"}
    assert yaml.safe_load(made) == {"train_type": "full", "log_to": ["wandb", "project=mine"], **given}
    _, _, comments = made.partition("# Not taken over:\n")
    assert [line[:2] for line in comments.splitlines()] == ["# "] * 11  # splitlines knows U+2028 and U+0085 too
    assert comments.count("give it yourself") == 4 and "AutoTokenizer" in comments and "\x1b" not in comments
    assert not re.search("0123456789abcdef|do-not-show", made)


LAUGHS = "a: &a [x, x]\n" + "".join(f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n" for last, name in ("ab", "bc"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "aliases"),
        ("lr: !!float x", "tags"),
        ("lr: 2020-13-45", "month"),
        ("lr: 0b_", "invalid literal"),
        ("a: 1\n" * 2**18, "1,048,576 bytes"),
    ],
)
def test_convert_refuses_huge_and_empty_files(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        convert(tmp_path / "theirs.yaml")


def test_convert_rejects_numbers_too_long_to_print(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(f"lr: {'9' * 6000}\nseed: 0x{'f' * 6000}\nstage: sft\nlora_rank: '8'\n")
    assert yaml.safe_load(convert(tmp_path / "theirs.yaml"))["lora_alpha"] == 16


def test_convert_reads_shell_pipes_and_refuses_named_pipes(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"lora_r: 8\n")
    os.close(writer)
    assert yaml.safe_load(convert(Path(f"/dev/fd/{reader}")))["lora_rank"] == 8
    os.close(reader)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="it is not a file"):
            convert(path)
