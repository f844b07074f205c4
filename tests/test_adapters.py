"""Adapter kinds, their variants and first values, against PEFT's own and against each other's splits."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from fsdp_qlora.adapters import first_adapter_value
from tests.reference import LINEARS, batch_loss, encode, load_adapter, load_base, load_decoded_base
from tests.tiny import PROBE, make_rows, read_metrics, train_ok, write_rows

Models = Callable[..., Path]
RUN = {"lr": 1e-2, "lr_scheduler": "constant", "warmup_steps": 0, "precision": "fp32"}


def peft_losses(
    base: nn.Module,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    seed: int | None,
    groups: Callable[[nn.Module], list[dict[str, object]]] | None = None,
    **options: object,
) -> tuple[list[float], nn.Module]:
    """Full-batch AdamW steps of PEFT's own adapter on `base`, from our A and B (from PEFT's own where seed is None).

    Returns:
        The losses, and the trained model.
    """
    config = LoraConfig(**{"target_modules": list(LINEARS), "task_type": "CAUSAL_LM", **options})
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name and seed is not None:
                own = name.replace(".default", "")
                parameter.copy_(first_adapter_value(own, parameter.shape, seed=seed))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups(model) if groups else trained, lr=RUN["lr"], weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = batch_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=PROBE).logits
    return logits


# --- DoRA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train_type", "model_type"), [("bnb_dora", "qwen2"), ("dora", "llama")])
def test_dora_equals_pefts_on_the_decoded_base_and_peft_loads_it(
    train_type: str, model_type: str, models: Models, tmp_path: Path
) -> None:
    folder, rows = models(model_type), make_rows(4, seed=3)
    train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        logits_file=tmp_path / "logits.safetensors",
        train_type=train_type,
        batch_size=2,
        num_epochs=10,
        lora_rank=4,
        lora_alpha=6,
        seed=5,
        **RUN,
    )
    base = load_decoded_base(folder) if train_type == "bnb_dora" else load_base(folder, four_bit=False)
    expected, trained = peft_losses(
        copy.deepcopy(base), encode(folder, rows), steps=10, seed=5, r=4, lora_alpha=6, use_dora=True
    )
    assert expected[-1] < expected[0] - 0.5
    # The same numbers up to the order of fp32 sums, which ten steps of Adam amplify.
    assert read_metrics(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_magnitude_vector"
    own = trained.get_submodule(name.replace("lora_magnitude_vector", "lora_magnitude_vector.default")).weight
    assert torch.allclose(saved[name], own, rtol=1e-3)

    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    assert (logits_of(base) - logits).abs().max() > 1e-1
    assert (logits_of(load_adapter(base, tmp_path / "out")) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("train_type", ["bnb_dora", "dora"])
def test_dora_does_not_depend_on_the_split_over_ranks_and_micro_batches(
    train_type: str, models: Models, tmp_path: Path
) -> None:
    # 60 columns: rows end within blocks of 64 weights, and shards within rows.
    folder = models("llama", intermediate_size=100, hidden_size=60, head_dim=10, num_attention_heads=6)
    runs = {}
    for ranks, micro_batches in [(1, 4), (2, 2), (4, 1)]:
        train_ok(
            ranks,
            tmp_path / f"{ranks}",
            model_name=folder,
            dataset=write_rows(tmp_path / "rows.jsonl", make_rows(18)),
            train_type=train_type,
            gradient_accumulation_steps=micro_batches,
            **{**RUN, "lr": 1e-3},
        )
        runs[ranks] = read_metrics(tmp_path / f"{ranks}") + read_metrics(tmp_path / f"{ranks}", "grad_norm")
    assert runs[2] == pytest.approx(runs[1], rel=1e-5) and runs[4] == pytest.approx(runs[1], rel=1e-5)
