"""Text trains the decoder of a model for images and text, as PEFT does on the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig

from tests.helpers.metrics import read_metrics
from tests.helpers.models import SIZES
from tests.helpers.reference import batch_loss, encode, load_adapter, load_base
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, train_ok
from tests.helpers.tokenizers import make_tokenizer
from tests.parity import test_experts

FULL_BATCH = {
    "batch_size": 2,
    "lr": 1e-3,
    "lr_scheduler": "constant",
    "warmup": 0,
    "precision": "fp32",
}
TEXT = {
    **test_experts.FAMILIES["deepseek_v3"],
    **SIZES,
    "vocab_size": 340,
    "layer_types": ["full_attention", "full_attention"],
    "num_experts": 4,
    "num_local_experts": 4,
    "qk_head_dim": 32,
}
VISION = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "pooling_kernel_size": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"rope_parameters": ROPE},
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_vl_moe": {"rope_parameters": ROPE},
    "glm4v": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mistral3": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    # Embeddings and keys as in E4B; images that see their own later tokens as in 31B.
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 340,
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 32,
        "max_position_embeddings": 1024,
        "enable_moe_block": False,
        "top_k_experts": None,
    },
    "internvl": {},
    "exaone4_5": {"layer_types": ["sliding_attention", "full_attention"]},
    "kimi_k25": {"num_key_value_heads": 4},
    "llava": {},
    "step3p7": {
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
        "share_expert_dim": 64,
        "num_sliding_attention_heads": 4,
        "swiglu_limits": [0.0, 0.1],
    },
}
# Families whose text is tested without the parts for images.
FOR_IMAGES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": FAMILIES["qwen3_5"],
    # Experts beside a dense MLP.
    "gemma4 as 26B": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
        "global_head_dim": 32,
        "max_position_embeddings": 1024,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "paligemma": {},
}
# Of each structure one family is trained in continuous integration; gemma3 and gemma4 are in
# test_images.py.
ALIKE = {"qwen2_5_vl", "glm4v", "mistral3", "internvl", "exaone4_5", "kimi_k25", "step3p7"}
ALIKE |= {"qwen3_5", "gemma3", "gemma4"}


def shrunk(config: PretrainedConfig, sizes: dict[str, Any], **others: Any) -> PretrainedConfig:
    """A part's configuration with the sizes that it knows."""
    known = config.to_dict()
    known.pop("per_layer_config", None)
    return type(config)(
        **known | {name: size for name, size in sizes.items() if name in known} | others
    )


def make_multimodal(folder: Path, family: str, text: str = "") -> Path:
    """A random model of images and text in fp32 with its tokenizer, as a user would have it on
    disk.

    text: the family of its text model, if it has another one by default.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family.split()[0]]()
    if text:
        config.text_config = CONFIG_MAPPING[text]()
    for part, sizes, others in (
        ("text_config", TEXT, (FAMILIES | FOR_IMAGES)[family]),
        ("vision_config", VISION, {}),
    ):
        setattr(
            config,
            part,
            shrunk(getattr(config, part) or config.sub_configs[part](), sizes, **others),
        )
        getattr(config, part).initializer_range = 0.1
    if hasattr(config, "projection_hidden_size"):
        config.projection_hidden_size = config.vision_config.hidden_size
    config.tie_word_embeddings = False
    for name in vars(config):
        if name.endswith(("_token_id", "_token_index")):
            setattr(config, name, 320 + len(name) % 16)  # in no text
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", all_slow_but("qwen3_vl", FAMILIES, nightly=ALIKE))
def test_text_trains_the_decoder_and_peft_loads_it_on_the_whole_model(family, tmp_path):
    (tmp_path / "model").mkdir()
    folder = make_multimodal(tmp_path / "model", family)
    rows = make_rows(12, seed=1)
    held_out = make_rows(3, seed=2)
    # bitsandbytes quantizes no experts, and of gemma4 what is not in its blocks, too.
    in_16_bits = family in ("qwen3_vl_moe", "kimi_k25", "step3p7", "gemma4")
    output = train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        eval_dataset=write_rows(tmp_path / "held_out.jsonl", held_out),
        num_epochs=1,
        train_type="lora" if in_16_bits else "qlora",
        **FULL_BATCH,
    )
    before, after = read_metrics(tmp_path / "out", "eval_loss")
    batch = encode(folder, held_out)
    base = load_base(folder, four_bit=not in_16_bits, auto=AutoModelForImageTextToText)
    with torch.no_grad():
        assert batch_loss(base, batch).item() == pytest.approx(before, rel=1e-4)
        reloaded = load_adapter(base, tmp_path / "out")
        assert batch_loss(reloaded, batch).item() == pytest.approx(after, rel=1e-4)
    named = {
        name.replace(".default", "") for name, _ in reloaded.named_parameters() if "lora_" in name
    }
    assert (
        named
        and named == set(load_file(tmp_path / "out" / "adapter_model.safetensors"))
        and abs(after - before) > 1e-3
    )
    assert "The parts for images are sharded as they are and do not train (model.v" in output
    assert "Rows are padded" not in output
