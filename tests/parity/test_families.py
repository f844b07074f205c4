"""Every family of the table in docs/models.md trains as a plain loop of transformers
and PEFT does.
"""

import functools
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.falcon.modeling_falcon import FalconLinear

from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.architecture.structure import is_linear
from fsdp_qlora.model.experts import expert_parameters, route_experts
from tests.helpers.models import PROBE
from tests.helpers.reference import decode, encode, load_adapter, load_base, train_peft
from tests.helpers.rows import make_rows
from tests.helpers.run import ROOT, all_slow_but
from tests.parity.test_train_types import train_ours

# A family gets those that its configuration knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 64
    ),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "index_head_dim", "o_lora_rank"), 32
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(
        ("first_k_dense_replace", "n_group", "topk_group", "num_dense_layers", "n_shared_experts"),
        1,
    ),
    **dict.fromkeys(("index_n_heads", "zero_expert_num", "o_groups"), 2),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size"), 128),
    **dict.fromkeys(("attention_dropout", "residual_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
    "sliding_window": 8,
    # all: few heads often score 0, and which of equal scores are chosen depends on the batch
    "index_topk": 256,
}
LATENT = {"num_key_value_heads": 4}  # keys and values of all heads from one vector
PLAIN = (
    "apertus",
    "cohere2",
    "doge",
    "ernie4_5",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "llama",
    "ministral3",
    "mistral",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "afmoe",
    "cohere2_moe",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "granitemoe",
    "hy_v3",
    "hy_v4",
    "llama4_text",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "sarvam_moe",
    "solar_open",
)
OF_LATENTS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "sarvam_mla",
    "youtu",
)
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in PLAIN},
    **dict.fromkeys(OF_LATENTS, LATENT),
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_head_dim": 16,
    },
    "gpt_oss": {"rope_parameters": {"rope_type": "default"}},
    "longcat_flash": {**LATENT, "num_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}
_TABLE = re.findall(
    r"^\| ([\w, ]+) \| (padding-free|padded)",
    (ROOT / "docs/models.md").read_text(),
    re.M,
)
ROWS = {family: rows for families, rows in _TABLE for family in families.split(", ")}
KNOWN = [family for family in FAMILIES if family in CONFIG_MAPPING]  # older versions know fewer
IN_CI = {"sarvam_moe", "longcat_flash", "stablelm"}


@pytest.mark.parametrize("family", all_slow_but("sarvam_moe", KNOWN, nightly={*FAMILIES} - IN_CI))
def test_losses_and_adapter_of_a_family_are_those_of_peft(family, models, tmp_path):
    known = CONFIG_MAPPING[family]().to_dict()
    folder = models(
        family, **{key: size for key, size in SMALL.items() if key in known} | FAMILIES[family]
    )
    rows = make_rows(8, seed=3)
    settings = {"num_epochs": 3, "gradient_accumulation_steps": 2, "verbose": True}
    losses, logits = train_ours(
        folder, rows, tmp_path / "out", lora_alpha=6, lr=1e-2, train_type="qlora", **settings
    )
    said = (tmp_path / "out_logs" / "rank0.log").read_text()
    assert ROWS[family] == (
        "padded" if "Rows are padded with this model" in said else "padding-free"
    )
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    adapted = {re.sub(r"\.lora_[AB].*|base_model\.model\.", "", name) for name in saved}

    def decoded() -> nn.Module:
        base = load_base(folder, four_bit=False)
        route_experts(base, torch.device("cpu"))
        with torch.no_grad():
            for path in [*(f"{path}.weight" for path in adapted), *expert_parameters(base)]:
                weight = base.get_parameter(path)
                weight.copy_(decode(weight))
        return base

    # PEFT takes some layers by their weights, since their names are those of experts in weight
    # files.
    config = LoraConfig.from_pretrained(tmp_path / "out")
    first = functools.partial(first_adapter_value, seed=5)
    targets = {
        "target_modules": config.target_modules,
        "target_parameters": config.target_parameters,
    }
    options = {"r": 4, "lora_alpha": 6, **targets}
    expected, trained = train_peft(
        decoded(), encode(folder, rows), first, steps=3, lr=1e-2, **options
    )
    assert losses == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0] - 0.01
    assert saved.keys() == get_peft_model_state_dict(trained).keys()
    with torch.no_grad():
        assert (
            load_adapter(decoded(), tmp_path / "out")(input_ids=PROBE).logits - logits
        ).abs().max() < 1e-4


def test_the_table_of_the_documentation_has_the_tested_families():
    assert ROWS.keys() == FAMILIES.keys()


class Scaled(nn.Linear):
    """Has a parameter of its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * self.scale * super().forward(input)


def test_a_layer_is_linear_by_what_it_computes():
    hooked = nn.Linear(6, 4)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    with torch.device("meta"):
        layers = [
            FalconLinear(6, 4),
            nn.Linear(6, 4, bias=False),
            DeepseekV4GroupedLinear(6, 4, 2),
            Scaled(6, 4),
        ]
    assert [is_linear(layer) for layer in (*layers, hooked, nn.LayerNorm(4))] == [
        True,
        True,
        *[False] * 4,
    ]
