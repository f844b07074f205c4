"""Training goes on from an adapter: a new run whose model is, before its first step, the earlier
run's at its end.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.model.adapters.peft_folder import read_adapter
from fsdp_qlora.utils.errors import UserError
from tests.commands.test_merge import make_adapter
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, Models
from tests.helpers.reference import load_adapter, load_base
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok
from tests.parity.test_experts import FAMILIES

# What identifies a run besides what the adapter decides.
COMMON = {
    "precision": "fp32",
    "lr": 1e-2,
    "max_steps": 2,
    "context_length": 256,
    "save_every": "none",
}
KINDS: dict[str, dict[str, object]] = {
    "qlora, with patterns, embeddings and head": {
        "modules_to_save": "embed_tokens,lm_head",
        "lora_rank": 4,
        "rank_pattern": "q_proj=2,down_proj=6",
        "alpha_pattern": "v_proj=5",
    },
    "bnb_dora": {
        "train_type": "bnb_dora",
        "lora_rank": 4,
        "lora_target_modules": "q_proj,down_proj",
    },
    "hqq_lora": {"train_type": "hqq_lora", "use_rslora": True, "lora_rank": 5},
    "int8_lora": {"train_type": "int8_lora", "lora_rank": 4},
    "experts": {
        "lora_rank": 4,
        "lora_target_modules": "q_proj",
        "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("rows")
    rows = write_rows(folder / "rows.jsonl", make_rows(16))
    return {
        **COMMON,
        "dataset": rows,
        "eval_dataset": write_rows(folder / "held_out.jsonl", make_rows(5, seed=3)),
    }


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.nightly] * (kind in ("hqq_lora", "int8_lora")))
        for kind in KINDS
    ],
)
def test_a_pretrained_adapter_starts_at_its_last_evaluation_loss(kind, models, data, tmp_path):
    model = models("mixtral", **FAMILIES["mixtral"]) if kind == "experts" else models()
    train_ok(2, tmp_path / "first", model_name=model, **data, **KINDS[kind])
    first = read_metrics(tmp_path / "first", "eval_loss")
    assert abs(first[0] - first[-1]) > 1e-3
    rows = write_rows(tmp_path / "others.jsonl", make_rows(12, seed=7))
    given = {**data, "train_type": KINDS[kind].get("train_type", "qlora"), "dataset": rows}
    for ranks in (1, 2) if kind.startswith("qlora") else (2,):
        out = tmp_path / f"second_{ranks}"
        output = train_ok(ranks, out, **given, model_name=model, adapter=tmp_path / "first")
        second = read_metrics(out, "eval_loss")
        assert abs(second[0] - first[-1]) < 1e-6 and second[-1] != second[0], (ranks, first, second)
        assert f"The adapter starts from {tmp_path / 'first'}" in output
    # The second stage's result is one for the original base too, of the same form, and names its
    # parent.
    names = ("adapter_config.json", "adapter_model.safetensors")
    one, two = ([(tmp_path / run / name) for name in names] for run in ("first", "second_2"))
    assert json.loads(one[0].read_text()) == json.loads(two[0].read_text())
    shapes = [
        {name: value.shape for name, value in load_file(file).items()} for file in (one[1], two[1])
    ]
    assert shapes[0] == shapes[1]
    record = json.loads((tmp_path / "second_2" / "training.json").read_text())
    run_id = json.loads((tmp_path / "first" / "run.json").read_text())["run_id"]
    assert record["parent"] == {"name": "first", "run_id": run_id, "step": 2}
    assert f"run {run_id} at step 2" in (tmp_path / "second_2" / "README.md").read_text()


def peft_adapter(folder: Path, model: Path, **options: object) -> torch.Tensor:
    """An adapter that PEFT made, with values in A and B, in `folder`;
    returns its logits of PROBE.
    """
    torch.manual_seed(1)
    adapted = get_peft_model(
        load_base(model, four_bit=False), LoraConfig(task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
        adapted.save_pretrained(folder)
        logits: torch.Tensor = adapted.eval()(input_ids=PROBE).logits
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
        },
        {
            "r": 3,
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "use_dora": True,
        },
    ],
)
def test_an_adapter_made_by_peft_can_be_trained_further(options, models, data, tmp_path):
    expected = peft_adapter(tmp_path / "made", models(), **options)
    train_type = "dora" if "use_dora" in options else "lora"
    given = {
        **data,
        "model_name": models(),
        "train_type": train_type,
        "adapter": tmp_path / "made",
        "lr": 1e-30,
    }
    train_ok(2, tmp_path / "out", **given, logits_file=tmp_path / "logits")
    torch.testing.assert_close(
        load_file(tmp_path / "logits")["logits"], expected, atol=1e-4, rtol=1e-4
    )
    with torch.no_grad():
        again = load_adapter(load_base(models(), four_bit=False), tmp_path / "out")(
            input_ids=PROBE
        ).logits
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def trained(
    models: Models, data: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "out"
    train_ok(1, folder, **data, model_name=models(), lora_rank=2)
    return folder


def test_another_base_or_a_changed_adapter_file_is_refused(trained, models, data, tmp_path):
    shutil.copytree(trained, tmp_path / "first")
    other = tmp_path / "other"
    shutil.copytree(models(), other)
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    given = {**data, "adapter": tmp_path / "first", "output_dir": tmp_path / "out"}
    statuses, output = run_ranks(2, flags(**given, model_name=other), tmp_path / "logs0")
    assert statuses == [2, 2] and ("it was trained on other weights than --model_name") in output
    weights = tmp_path / "first" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    statuses, output = run_ranks(2, flags(**given, model_name=models()), tmp_path / "logs1")
    assert (
        statuses == [2, 2]
        and ("adapter_model.safetensors has changed: its SHA-256 differs") in output
    )


def test_options_that_contradict_the_adapter_are_refused(models, tmp_path):
    good = make_adapter(models(), tmp_path / "good", target_modules=["q_proj", "up_proj"])
    words = ["--adapter", str(good), "--output_dir", str(tmp_path / "out")]
    config = parse_train_config(words)
    assert (config.lora_rank, config.lora_alpha, set(config.lora_target_modules)) == (
        4,
        8,
        {"q_proj", "up_proj"},
    )
    assert parse_train_config([*words, "--lora_rank", "4"]) == config
    cases = {
        ("--lora_rank", "16"): r"--lora_rank is 16, but the adapter's is 4: leave it out",
        ("--train_type", "bnb_dora"): r"is LoRA and --train_type bnb_dora trains DoRA. Give one of "
        r"lora, qlora",
        ("--train_type", "full"): r"full has no adapter: leave out --adapter",
        ("--output_dir", str(good)): r"is in output_dir",
        ("--adapter", str(tmp_path)): r"has no adapter_config.json",
    }
    for more, reason in cases.items():
        with pytest.raises(UserError, match=reason):
            parse_train_config([*words, *more])


def test_resuming_a_finished_run_suggests_the_option_adapter(trained, models, data, tmp_path):
    given = {**data, "model_name": models(), "lora_rank": 2, "output_dir": trained}
    advice = f"give another --output_dir and --adapter {trained}"
    statuses, output = run_ranks(1, flags(**{**given, "max_steps": 4}), tmp_path / "logs0")
    assert statuses == [2] and "--max_steps was 2 and is 4" in output and advice in output
    other = {**given, "resume": trained, "output_dir": tmp_path / "more", "lora_rank": 3}
    statuses, output = run_ranks(1, flags(**other), tmp_path / "logs1")
    assert statuses == [2] and advice in output
    with pytest.raises(
        UserError,
        match=r"it is a checkpoint. Export its adapter: fsdp-qlora export",
    ):
        read_adapter(trained / "checkpoints" / "step_000002")
