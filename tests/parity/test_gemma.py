"""Gemma 4 and 3n, whose blocks differ in size, share keys and values, and get embeddings of their own."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.model.architecture.models import find_blocks
from fsdp_qlora.model.architecture.shapes import block_shapes
from tests.tiny import SIZES

KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "sliding_window": 7,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 2}
EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "31b": ("gemma4_text", {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "e4b": ("gemma4_text", {**GEMMA_4, **PER_LAYER, "use_double_wide_mlp": True}),
    "26b-a4b": ("gemma4_text", {**GEMMA_4, **EXPERTS, "enable_moe_block": True}),
    "3n": (
        "gemma3n_text",
        {
            **{"num_hidden_layers": 4, "layer_types": KINDS, "sliding_window": 7, "laurel_rank": 8, **PER_LAYER},
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
}


@pytest.mark.parametrize("form", [*FORMS, "qwen3"])
def test_sizes_of_a_block_are_those_of_its_own_layers(form: str) -> None:
    family, sizes = FORMS.get(form, (form, {}))
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes, window = block_shapes(config), sizes.get("sliding_window")
    for shape, block in zip(shapes, find_blocks(model), strict=True):
        attention = block.self_attn
        keys = getattr(attention, "k_proj", None)
        assert (shape.hidden, shape.attended) == (attention.q_proj.in_features, attention.q_proj.out_features)
        assert keys is None or keys.out_features == shape.groups * shape.head_dim
        assert shape.has_keys == (not getattr(attention, "is_kv_shared_layer", False))
        assert shape.window == (window if getattr(attention, "is_sliding", False) else None)
    assert len(set(shapes)) == {"e4b": 4, "3n": 4, "qwen3": 1}.get(form, 2)
