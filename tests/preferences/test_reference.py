"""The reference that passes through the model beside the policy: right in every layout, gathered
once, never moving.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.metrics import metrics_of
from tests.helpers.rows import write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, run_ranks, train_ok
from tests.preferences.pairs import make_pairs

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Name -> (ranks, options): each computes the same.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (1, {"batch_size": 1, "gradient_accumulation_steps": 6, "batching": "packed"}),
    "offloaded": (2, {"use_cpu_offload": True}),
    "activations offloaded": (2, {"recompute": "offload"}),
    "a rank without rows": (4, {"batch_size": 2}),
    "one rank": (1, {"batch_size": 6}),
    "no recompute": (2, {"recompute": "none"}),
    "padded": (2, {"batching": "padded"}),
    "streamed": (1, {"batch_size": 3, "gradient_accumulation_steps": 2, "use_cpu_offload": True}),
}
PARTS = {"few": [*LAYOUTS][:4], "more": [*LAYOUTS][4:]}
# Name -> (family, its sizes, options).
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qlora": ("qwen2", {}, {"train_type": "qlora"}),
    "bnb_dora": ("llama", {}, {"train_type": "bnb_dora"}),
    "hqq_lora": ("llama", {}, {"train_type": "hqq_lora"}),
    "experts": (
        "mixtral",
        MOE,
        {"train_type": "qlora", "lora_target_parameters": "gate_up_proj,down_proj"},
    ),
    "whole logits": ("llama", {"logit_unknown": 2.0}, {"train_type": "lora"}),
}


def options(model: Path, folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "model_name": model,
        "dataset": write_rows(folder / "pairs.jsonl", make_pairs(16)),
        "objective": "dpo",
        "precision": "fp32",
        "lr": 1e-2,
        "num_epochs": 3,
        "eval_fraction": 0.25,
        **changed,
    }


def numbers(output: Path) -> list[dict[str, float]]:
    """Losses and metrics of pairs, of all steps and evaluations."""
    kept = ("loss", "eval_loss", "grad_norm")
    return [
        {key: record[key] for key in record if key in kept or "/" in key}
        for record in metrics_of(output)
    ]


@pytest.mark.parametrize("part", all_slow_but("", PARTS, nightly=["more"]))
def test_steps_do_not_depend_on_ranks_micro_batches_and_layout(part, models, tmp_path):
    run = options(models("llama"), tmp_path, train_type="qlora")
    train_ok(2, tmp_path / "plain", **run, batch_size=3)
    expected = numbers(tmp_path / "plain")
    assert len(expected) == 8 and expected[-1]["rewards/margins"] > 0.5
    for name, (ranks, changed) in ((name, LAYOUTS[name]) for name in PARTS[part]):
        output = tmp_path / name.replace(" ", "_")
        rows = {"batch_size": 3} if name != "a rank without rows" else {}
        if name == "a rank without rows":
            run = {**run, "num_epochs": 1}
        said = train_ok(ranks, output, **{**run, **rows, **changed})
        found = numbers(output)
        if name == "a rank without rows":  # eight rows in the first step, four in the second
            assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
            continue
        assert len(found) == len(expected), said[-2000:]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.nightly] * (kind in ("bnb_dora", "hqq_lora")))
        for kind in KINDS
    ],
)
def test_the_reference_is_the_base_and_does_not_move(kind, models, tmp_path):
    family, sizes, changed = KINDS[kind]
    train_ok(
        2, tmp_path / "out", **options(models(family, **sizes), tmp_path, batch_size=6, **changed)
    )
    first, *_, last = (record for record in metrics_of(tmp_path / "out") if "eval_loss" in record)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0  # to the bit
    assert first["eval_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert last["rewards/accuracies"] == 1 and last["eval_loss"] < 0.5
    for side in ("chosen", "rejected"):
        reference = [
            record[f"logps/{side}"] - record[f"rewards/{side}"] / 0.1 for record in (first, last)
        ]
        assert reference[1] == pytest.approx(reference[0], rel=1e-5)


@pytest.mark.parametrize("start", ["adapter", "loftq"])
def test_an_adapter_that_training_starts_from_is_the_reference(start, models, tmp_path):
    run = options(models("llama"), tmp_path, train_type="qlora", batch_size=6)
    train_ok(1, tmp_path / "earlier", **{**run, "objective": "cpo"})
    base = next(record for record in metrics_of(tmp_path / "earlier") if "eval_loss" in record)
    begin = (
        {"adapter": tmp_path / "earlier"} if start == "adapter" else {"init_lora_weights": "loftq"}
    )
    train_ok(
        2,
        tmp_path / "whole",
        **run,
        **begin,
        save_every=3,
        lora_dropout=0 if start == "adapter" else 0.1,
    )
    first, *_, last = (record for record in metrics_of(tmp_path / "whole") if "eval_loss" in record)
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0  # to the bit
    assert last["rewards/accuracies"] == 1
    for side in ("chosen", "rejected"):
        reference = [
            record[f"logps/{side}"] - record[f"rewards/{side}"] / 0.1 for record in (first, last)
        ]
        assert reference[1] == pytest.approx(reference[0], rel=1e-5)
        assert reference[0] != pytest.approx(base[f"logps/{side}"], rel=1e-4)
    train_ok(
        2,
        tmp_path / "resumed",
        **run,
        **begin,
        resume=tmp_path / "whole/checkpoints/step_000003",
        lora_dropout=0 if start == "adapter" else 0.1,
    )
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "resumed")
    whole, resumed = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    )
    assert whole == resumed and (tmp_path / "whole/best").is_dir()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_precomputed_reference_is_that_of_the_pass_to_the_bit(objective, models, tmp_path):
    """Also from a checkpoint on, without the cache; and it is read again unless base, adapter or
    rows have changed.
    """
    pairs = make_pairs(16, seed=3)
    rows = [
        {"prompt": p["prompt"], "completion": p["chosen"], "label": True} for p in pairs[:8]
    ] + [{"prompt": p["prompt"], "completion": p["rejected"], "label": False} for p in pairs[8:]]
    file = write_rows(tmp_path / "own.jsonl", rows if objective == "kto" else pairs)
    run = options(
        models("llama"),
        tmp_path,
        dataset=file,
        objective=objective,
        train_type="qlora",
        batch_size=3,
    )
    before = {**run, "precompute_reference": True}
    found = "log-probabilities are read"
    train_ok(2, tmp_path / "beside", **run, save_every=3)
    assert found not in train_ok(2, tmp_path / "whole", **before)
    assert found in train_ok(
        1, tmp_path / "again", **{**before, "lr": 1e-4, "beta": 0.3, "lora_rank": 4}
    )
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "beside")
    with mock.patch.dict(os.environ, FSDP_QLORA_CACHE=str(tmp_path / "empty")):
        train_ok(
            2, tmp_path / "resumed", **before, resume=tmp_path / "beside/checkpoints/step_000003"
        )
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "whole")
    changes: list[dict[str, Any]] = [
        {"model_name": models("llama", rope_theta=7.0)},
        {"adapter": tmp_path / "whole"},
    ]
    changes += [{"train_type": "lora"}, {"dataset": write_rows(tmp_path / "other.jsonl", rows[1:])}]
    for number, changed in enumerate(changes if objective == "kto" else []):
        assert found not in train_ok(
            1, tmp_path / str(number), **{**before, **changed, "max_steps": 1}
        )


def _train_counting_gathers(argv: list[str], file: Path) -> int:
    """Trains, and writes the number of gathers of each step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    import train
    from fsdp_qlora.training.trainer import Trainer

    counts = []
    train_step = Trainer.train_step

    def counted_step(*args: Any) -> dict[str, Any]:
        before = gather.call_count
        record = train_step(*args)
        counts.append(gather.call_count - before)
        return record

    with (
        mock.patch.object(groups, "foreach_all_gather", wraps=groups.foreach_all_gather) as gather,
        mock.patch.object(Trainer, "train_step", counted_step),
    ):
        status = train.main(argv)
    file.write_text(json.dumps(counts))
    return status


def test_policy_and_reference_gather_each_block_once_for_both(models, tmp_path):
    counts = []
    for objective in ("cpo", "dpo"):  # without and with a reference
        run = options(
            models("llama"), tmp_path, train_type="qlora", objective=objective, batch_size=6
        )
        argv = flags(**run, output_dir=tmp_path / objective, quant_cache="off", log_to="stdout")
        file = tmp_path / f"{objective}.txt"
        statuses, said = on_ranks(
            2, _train_counting_gathers, (argv, file), tmp_path / f"{objective}_logs"
        )
        assert statuses == [0, 0], said[-3000:]
        counts.append(json.loads(file.read_text()))
    assert counts[0] == counts[1] and counts[0][0] > 4


@pytest.mark.parametrize("shows_images", [False, True])
def test_reference_pass_keeps_no_graph(shows_images):
    from fsdp_qlora.sharding.both_states import BothStates
    from fsdp_qlora.sharding.recompute import ReferencePass, recomputed_blocks, wrap_blocks

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                types.append(type(x))
            return x

    types: list[type] = []
    model = Model()
    wrap_blocks(model, offload=False)
    reference = ReferencePass(model)
    x = torch.randn(2, 4, 3)
    assert len(recomputed_blocks(model)) == 3 and model(x).shape == x.shape
    types.clear()
    with reference.beside_policy(shows_images=shows_images):
        policy, beside = model(x).chunk(2)
    # The model's own code gets a reference only where it may add images' features to it.
    between = BothStates if shows_images else torch.Tensor
    assert types == [between, between, torch.Tensor]
    assert torch.equal(policy, beside)  # without adapters
    beside.sum().backward()
    assert all(
        not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None
    )


@pytest.mark.slow
def test_a_model_that_refuses_two_batches_in_one_is_named(models, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "sort", "chosen": " go", "rejected": " no"}) + "\n")
    options = {
        "model_name": models("gpt_bigcode"),
        "dataset": path,
        "objective": "dpo",
        "train_type": "lora",
    }
    argv = flags(output_dir=tmp_path / "out", context_length=64, log_to="stdout", **options)
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [2] and "cannot run a reference in the policy's forward pass" in output
    assert "--precompute_reference true" in output
