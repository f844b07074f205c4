"""Each end of a run leaves an adapter, and `export` makes the same of any checkpoint."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.checkpoint.checkpoint import published
from fsdp_qlora.data.text.templates import CHAT_TEMPLATES
from tests.chaos.harness import KILLED, adapter, numbers, run, status
from tests.helpers.models import PROBE, Models, make_model
from tests.helpers.reference import PROMPT, PROMPT_WITH_INPUT, load_adapter, load_decoded_base
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.parity.test_multimodal import make_multimodal

OPTIONS = {
    "precision": "fp32",
    "lora_rank": 4,
    "lr": 1e-2,
    "lr_scheduler": "constant",
    "warmup": 0,
    "eval_fraction": 0.1,
    "save_every": "none",
    "quant_cache": "off",
    "context_length": 256,
}
STOPPED_AT = 3


@pytest.fixture(scope="module")
def inputs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    rows = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", make_rows(24))
    return {**OPTIONS, "model_name": models(), "dataset": rows}


@pytest.fixture(scope="module")
def finished_at(
    inputs: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """finished_at(3): the folder of a run on two ranks that had no more than 3 steps, with its
    model's logits.
    """
    made: dict[int, Path] = {}

    def get(steps: int) -> Path:
        if steps not in made:
            made[steps] = folder = tmp_path_factory.mktemp("finished") / "out"
            train_ok(
                2, folder, **{**inputs, "max_steps": steps}, logits_file=folder.parent / "logits"
            )
        return made[steps]

    return get


def stop_at_step(how: str) -> None:
    """Let every rank be told to stop, or meet a loss that is not finite, in its step after
    STOPPED_AT - 1.
    """
    from fsdp_qlora.data.batches.schedule import StepRows
    from fsdp_qlora.distributed.supervision.stops import Budget
    from fsdp_qlora.training.trainer import Trainer

    original = Trainer.train_step

    def train_step(self: Trainer, rows: StepRows) -> object:
        step = rows.step
        if step == STOPPED_AT - 1 and how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif step == STOPPED_AT - 1 and how == "--max_hours":
            Budget.is_used_up = lambda *_: True  # type: ignore[method-assign]
        elif step == STOPPED_AT and how == "not finite":
            loss = self._loss
            self._loss = lambda *args: loss(*args) * torch.nan  # type: ignore[method-assign]
        return original(self, rows)

    Trainer.train_step = train_step  # type: ignore[method-assign, assignment]


def files_of(folder: Path) -> dict[str, bytes]:
    """The result's files by name, as result.json lists them."""
    names = json.loads((folder / "result.json").read_text())["files"]
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "training.json",
    } <= set(names)
    return {name: (folder / name).read_bytes() for name in [*names, "result.json"]}


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [("SIGTERM", 75), ("not finite", 1), pytest.param("--max_hours", 3, marks=pytest.mark.nightly)],
)
def test_a_run_that_ends_early_leaves_an_adapter_that_peft_loads(
    how, exit_code, inputs, finished_at, tmp_path
):
    options = {**inputs, "max_steps": 6, "output_dir": tmp_path / "out", "max_hours": 1}
    output = run(options, tmp_path / "logs", [exit_code] * 2, fault=partial(stop_at_step, how))
    out = tmp_path / "out"
    reference = finished_at(STOPPED_AT)
    assert status(out)["saved_step"] == STOPPED_AT
    assert f"Adapter of step {STOPPED_AT}: {out}" in output
    assert adapter(out) == adapter(reference)
    with torch.no_grad():
        logits = load_adapter(load_decoded_base(Path(str(inputs["model_name"]))), out)(
            input_ids=PROBE
        ).logits
    torch.testing.assert_close(
        logits, load_file(reference.parent / "logits")["logits"], atol=1e-4, rtol=1e-4
    )
    card = (out / "README.md").read_text()
    for prompt in (PROMPT, PROMPT_WITH_INPUT):
        assert (
            f"```text\n{prompt.format(instruction='{instruction}', input='{input}')}\n```" in card
        )
    newest = out / "checkpoints" / f"step_{STOPPED_AT:06d}"
    assert main(["export", str(newest), "--out", str(tmp_path / "again")]) == 0
    assert files_of(tmp_path / "again") == files_of(out)
    run(options, tmp_path / "logs_resumed")
    assert (
        adapter(out) == adapter(finished_at(6))
        and json.loads((out / "training.json").read_text())["step"] == 6
    )


def evaluate_to(losses: dict[int, float], killed_at: str) -> None:
    """Let evaluations give these losses, by step. A rank dies in that of step 5, or before it saves
    the result.
    """
    from fsdp_qlora.export import save_results as saving
    from fsdp_qlora.training.trainer import Trainer

    def evaluate(self: Trainer, step: int, *_: object) -> dict[str, float]:
        if step == 5 and killed_at == "evaluation":
            KILLED()
        return {"eval_loss": losses[step], "perplexity": 1.0, "num_target_tokens": 1}

    Trainer.evaluate = evaluate  # type: ignore[method-assign, assignment]
    if killed_at == "result":
        saving.save_adapter = lambda *_, **__: KILLED()


def test_early_stopping_survives_a_kill_and_keeps_the_best_adapter(inputs, finished_at, tmp_path):
    losses = {0: 3.5, 1: 4.5, 2: 4.6, 3: 4.0, 4: 4.2, 5: 4.1, 6: 3.0}
    options = {
        **inputs,
        "max_steps": 6,
        "output_dir": tmp_path / "out",
        "eval_steps": 1,
        "early_stopping": 2,
    }
    options["save_every"] = 1
    out = tmp_path / "out"
    # The second start goes on behind the first of the two evaluations without a lower loss.
    for killed_at, newest in (("evaluation", 4), ("result", 5)):
        output = run(
            options, tmp_path / killed_at, ANY, fault=partial(evaluate_to, losses, killed_at)
        )
        assert max(published(out / "checkpoints")) == newest, output
    assert not (out / "adapter_model.safetensors").exists()
    assert (
        "Stopped early after step 5: 2 evaluations without a lower loss than 4.0000 of step 3."
    ) in output
    before = numbers(out)
    output = run(options, tmp_path / "logs1", fault=partial(evaluate_to, losses, ""))
    assert ("Stopped early after step 5") in output and (
        "3.5000 -> 4.1000, lowest trained 4.0000 at step 3"
    ) in output
    assert numbers(out) == before and status(out)["state"] == "finished"
    assert adapter(out) == adapter(finished_at(5)) and adapter(out / "best") == adapter(
        finished_at(3)
    )
    assert main(["export", str(out), "--best", "--out", str(tmp_path / "best")]) == 0
    assert files_of(tmp_path / "best") == files_of(out / "best")
    assert "finished already" in run(options, tmp_path / "logs2")


CASES = {
    "loftq": {"init_lora_weights": "loftq"},
    "DoRA and a trained head": {
        "train_type": "bnb_dora",
        "modules_to_save": "lm_head",
        "rank_pattern": "q_proj=2",
    },
    "chats": {"prompt_template": "chatml"},
    "8-bit states, which are per rank": {"optimizer": "adamw_8bit"},
    "a whole model": {"train_type": "full", "lora_rank": 16},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.nightly] * (case == "loftq")) for case in CASES]
)
def test_exporting_the_last_checkpoint_equals_the_runs_result(case, inputs, tmp_path):
    out = tmp_path / "out"
    train_ok(2, out, **{**inputs, "max_steps": 2, "base_name": "owner/base", **CASES[case]})
    assert main(["export", str(out), "--out", str(tmp_path / "again")]) == 0
    again = tmp_path / "again"
    names = json.loads((out / "result.json").read_text())["files"]
    assert {path.name for path in again.iterdir()} == {*names, "result.json"}
    for name in [*names, "result.json"]:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    if case == "chats":
        assert AutoTokenizer.from_pretrained(again).chat_template == CHAT_TEMPLATES["chatml"]
        assert "tokenizer.apply_chat_template(" in (again / "README.md").read_text()
    if case != "a whole model":
        assert PeftConfig.from_pretrained(again).base_model_name_or_path == "owner/base"
        assert "base_model: owner/base" in (again / "README.md").read_text()


def test_export_names_folders_that_it_cannot_use(inputs, finished_at, models, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    newest = finished_at(3) / "checkpoints" / "step_000003"
    damaged.mkdir()
    for path in newest.iterdir():
        (damaged / path.name).write_bytes(
            path.read_bytes()[: -8 if path.suffix == ".safetensors" else None]
        )
    other = models("qwen2", num_hidden_layers=1)
    cases = [
        ([str(tmp_path / "none")], "there is no such folder"),
        ([str(other)], "has no checkpoint. Give"),
        ([str(damaged)], "is damaged: state_00000.safetensors has"),
        (
            [str(newest), "--model_name", str(other)],
            "belongs to a model with other trainable parameters",
        ),
        ([str(newest), "--base_name", "x"], "must be OWNER/NAME, a repository on the hub"),
    ]
    for words, reason in cases:
        assert main(["export", *words, "--out", str(tmp_path / "out")]) == 2
        assert reason in capsys.readouterr().err
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_full_says_which_tensors_it_leaves_out(tmp_path):
    model = make_model(tmp_path / "model", "qwen3_5_text", layer_types=["full_attention"] * 2)
    weights = load_file(model / "model.safetensors")
    # which predict a second token
    ahead = {f"mtp.{name}.weight": torch.ones(2, 2) for name in "abcd"}
    save_file({**weights, **ahead}, model / "model.safetensors", metadata={"format": "pt"})
    options = {
        "model_name": model,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "max_steps": 1,
    }
    says = "Qwen3_5ForCausalLM does not build: mtp.a.weight, mtp.b.weight, mtp.c.weight (4 in all)"
    assert says in train_ok(1, tmp_path / "out", **options, train_type="full", precision="fp32")


@pytest.mark.slow
def test_the_best_of_a_model_with_a_part_for_images_has_that_part(tmp_path):
    model = make_multimodal(tmp_path / "model", "gemma3")
    options = {
        "model_name": model,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        "eval_fraction": 0.25,
    }
    options |= {
        "train_type": "full",
        "precision": "fp32",
        "lr": 1e-3,
        "max_steps": 2,
        "eval_steps": 1,
    }
    output = train_ok(1, tmp_path / "out", **options, context_length=256)
    assert "not saved" not in output
    # of the same step
    last, best = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("", "best"))
    assert last.keys() == best.keys() and all(torch.equal(last[name], best[name]) for name in last)
