"""Models whose modules read the weights of linear layers, such as hybrids of Mamba and attention for their kernels."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.models import read_directly
from fsdp_qlora.quantizers.routed import expert_parameters
from tests.reference import decode, load_adapter, load_base
from tests.tiny import PROBE, SIZES, flags, make_rows, read_metrics, train_ok, write_rows

Models = Callable[..., Path]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "jamba": {"mamba_d_state": 16, "mamba_dt_rank": 16, "attn_layer_period": 2, "attn_layer_offset": 1,
              "num_experts": 4, "num_experts_per_tok": 2},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 16},
    # Coefficients of a class of their own, read in methods other than forward.
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 8,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "activation_sparsity_pattern": [0.0, 0.0],
    },
    "bloom": {},  # reads weights only where its slow_but_exact is set
    "llama": {},
}  # fmt: skip
TRAINED = {"granitemoehybrid": "mamba.out_proj", "nemotron_h": "mixer.out_proj"}


class Watched(nn.Linear):
    """Notes that its weight is read by another module."""

    is_read = is_busy = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.is_busy = True
        y = super().forward(input)
        self.is_busy = False
        return y

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.is_busy:
            self.is_read = True
        return super().__getattr__(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_that_others_read_are_those_that_a_pass_reads(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    found = read_directly(model)
    linears = {path: module for path, module in model.base_model.named_modules() if type(module) is nn.Linear}
    for linear in linears.values():
        linear.__class__ = Watched
    model(input_ids=PROBE, use_cache=False)
    read = [f"{model.base_model_prefix}.{path}" for path, linear in linears.items() if linear.is_read]
    assert found == read and bool(found) == (family not in ("bloom", "llama"))


@pytest.mark.parametrize("family", TRAINED)
def test_a_hybrid_of_mamba_trains_on_two_ranks_and_peft_loads_its_adapter(
    family: str, models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, left_out = models(family, **FAMILIES[family]), TRAINED[family]
    options = {"model_name": folder, "allow_unquantized": True, "precision": "fp32", "batch_size": 2}
    said = train_ok(
        2,
        tmp_path / "out",
        logits_file=tmp_path / "logits",
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        max_steps=2,
        lr=1e-2,
        **options,
    )
    line = f"Neither quantized nor adapted, since other modules read their weights: {left_out} (1)."
    assert said.count(line) == 1 and len(read_metrics(tmp_path / "out")) == 2
    main(["plan", "--gpu", "RTX 3090", *flags(**options)])
    printed = capsys.readouterr()
    assert line in printed.out + printed.err
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    adapted = {re.sub(r"\.lora_[AB].*|base_model\.model\.", "", name) for name in saved}
    assert adapted and not any(path.endswith(left_out) for path in adapted)
    base = load_base(folder, four_bit=False)
    with torch.no_grad():
        for path in [*(f"{path}.weight" for path in adapted), *expert_parameters(base)]:
            weight = base.get_parameter(path)
            weight.copy_(decode(weight))
        unadapted = base.eval()(input_ids=PROBE).logits
        logits = load_file(tmp_path / "logits")["logits"]
        assert (load_adapter(base, tmp_path / "out")(input_ids=PROBE).logits - logits).abs().max() < 1e-4
    assert (unadapted - logits).abs().max() > 1e-2
