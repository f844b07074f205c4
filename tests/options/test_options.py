"""Options that decide what a run does around the training step: what is planned, logged, saved and
stopped.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_qlora.commands.run_config import parse_train_config
from tests.helpers.metrics import metrics_of, read_metrics
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok

NUM_ROWS = 18
RANK = 4
BLOCK = 64


@pytest.fixture(scope="module")
def run_yaml(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs below have in common, as a user would write it."""
    folder = tmp_path_factory.mktemp("run")
    options = {
        "model_name": str(models()),
        "dataset": str(write_rows(folder / "rows.jsonl", make_rows(NUM_ROWS))),
        "eval_dataset": str(write_rows(folder / "held_out.jsonl", make_rows(3, seed=2))),
        "lora_rank": RANK,
        "lora_dropout": 0.1,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "lr": 5.0e-3,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def run(run_yaml: Path) -> tuple[Path, str]:
    """A run of YAML and flags on two ranks: (output_dir, what it printed)."""
    output_dir = run_yaml.parent / "out"
    output = train_ok(
        2, output_dir, config=run_yaml, lr=1e-3, num_epochs=2, max_steps=5, eval_steps=2
    )
    return output_dir, output


def line_with(text: str, output: str) -> str:
    """The first printed line that contains `text`."""
    return next(line.strip() for line in output.splitlines() if text in line)


# --- before the run
# ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry_run(run_yaml: Path) -> str:
    options = {"world_size": 2, "output_dir": run_yaml.parent / "not_made", "num_epochs": 3}
    argv = flags(config=run_yaml, dry_run=True, device="cpu", verbose=True, **options)
    statuses, output = run_ranks(1, argv, run_yaml.parent / "dry_logs")
    assert statuses == [0], output
    return output


def test_dry_run_counts_the_parameters_that_transformers_and_peft_count(dry_run, models):
    model = AutoModelForCausalLM.from_pretrained(models())
    total = model.num_parameters()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    quantized = sum(
        p.numel() for name, p in model.named_parameters() if any(n in name for n in names)
    )
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=names, task_type="CAUSAL_LM"))
    trainable = adapted.num_parameters(only_trainable=True)
    assert line_with("Model:", dry_run).startswith(
        f"Model: LlamaForCausalLM, {total / 1e3:.1f}K parameters, {100 * quantized / total:.1f}% "
        f"quantized; {trainable / 1e3:.1f}K train (LoRA on 14 layers)"
    )


def test_dry_run_gives_the_bytes_per_rank_that_two_ranks_then_hold(dry_run, run, models):
    # of the first of two ranks, which has the larger halves
    codes = statistics = frozen = trainable = 0
    for name, parameter in AutoModelForCausalLM.from_pretrained(models()).named_parameters():
        if "proj" not in name:
            frozen += half(parameter.shape[0]) * parameter[0].numel() * 4
            continue
        blocks = parameter.numel() // BLOCK
        codes += half(blocks) * BLOCK // 2
        # One byte per block, four to a stored float32, and 4 bytes per 256 blocks.
        statistics += half(math.ceil(blocks / 4)) * 4 + half(math.ceil(blocks / 256)) * 4
        trainable += (half(RANK) * parameter.shape[1] + half(parameter.shape[0]) * RANK) * 4
    assert line_with("quantized weights", dry_run) == (
        f"quantized weights {kib(codes)}, their statistics {kib(statistics)}, other frozen weights "
        f"{kib(frozen)}, trainable weights (fp32) {kib(trainable)}, their gradients "
        f"{kib(trainable)}, optimizer state {kib(2 * trainable)}"
    )
    assert (f"rank 0 has {kib(codes + statistics + frozen + trainable)} of") in line_with(
        "Proof:", run[1]
    )


def half(rows: int) -> int:
    return math.ceil(rows / 2)


def kib(count: int) -> str:
    return f"{count / 1024:.2f} KiB" if count >= 1024 else f"{count} B"


def test_dry_run_plans_the_steps_and_writes_nothing(dry_run, run_yaml):
    # 18 rows in steps of 2 ranks x 2 micro-batches x 2 rows: two whole ones and one of the 2 rows
    # left.
    assert "Steps: 9 of 8 rows" in dry_run and "3 per epoch," in dry_run
    assert not (run_yaml.parent / "not_made").exists()


def test_dry_run_without_a_gpu_plans_for_one_and_ends_with_its_memory(run_yaml, tmp_path):
    argv = flags(
        config=run_yaml,
        dry_run=True,
        world_size=2,
        output_dir=tmp_path / "not_made",
        use_cpu_offload=True,
    )
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [0], output
    assert line_with("Model:", output).endswith(", bf16") and "Options:" not in output
    *_, memory, _, step = output.strip().splitlines()
    needs = (
        r"Memory: each rank needs about [\d.]+ MiB of the GPU, [\d.]+ MiB of the host; 2 ranks "
        r"on GPUs that are .*"
    )
    assert re.fullmatch(needs + ", full_shard with the base in host memory", memory)
    assert re.search(
        r"peak at the (backward|loss): adapters as gathered [\d.]+ KiB, .*block inputs",
        step,
    )


def test_dry_run_prints_the_options_as_a_config_file(dry_run, run_yaml, tmp_path):
    (tmp_path / "printed.yaml").write_text(dry_run.split("Options:\n")[1].split("\n\n")[0])
    printed = parse_train_config(["--config", str(tmp_path / "printed.yaml")])
    # The options of the run that was planned: with them as --config it starts.
    options = {"world_size": 2, "output_dir": run_yaml.parent / "not_made", "num_epochs": 3}
    asked = parse_train_config(
        ["--config", str(run_yaml), *flags(device="cpu", verbose=True, **options)]
    )
    # As the text has them.
    decided = asked.objective_row.decided(asked)
    assert printed == replace(asked, **decided._asdict())


# --- the run
# -------------------------------------------------------------------------------------------


def test_a_run_is_repeated_bit_for_bit_from_the_config_it_leaves(run, tmp_path):
    output_dir, _ = run
    train_ok(2, tmp_path / "again", config=output_dir / "config.yaml", deterministic=True)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert read_metrics(tmp_path / "again", key) == read_metrics(output_dir, key)
    adapter = "adapter_model.safetensors"
    assert (tmp_path / "again" / adapter).read_bytes() == (output_dir / adapter).read_bytes()


def test_max_steps_stops_within_an_epoch_with_its_evaluations(run):
    records = metrics_of(run[0])
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 2, 4, 5]
    assert [record["epoch"] for record in records][-1] == pytest.approx(5 / 3)


# --- a run that keeps nothing but its record
# -----------------------------------------------------------


def test_save_model_false_leaves_only_the_record_of_the_run(run_yaml, tmp_path):
    output_dir = tmp_path / "unsaved"
    output = train_ok(1, output_dir, config=run_yaml, max_steps=2, save_model=False)
    left = ["config.yaml", "facts.json", "metrics.jsonl", "report.html", "run.json", "status.json"]
    assert sorted(path.name for path in output_dir.iterdir()) == left
    assert len(read_metrics(output_dir)) == 2
    assert "Nothing saved, metrics only" in output
