"""The decoder's blocks and tables are those of text, in models with tables of positions and with
other encoders.
"""

import functools
import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.architecture.decoder import find_blocks, find_towers
from fsdp_qlora.model.architecture.meta_model import build_meta_model
from fsdp_qlora.model.model_parts import ModelParts
from tests.helpers.models import SIZES, make_model
from tests.helpers.reference import encode, load_base, train_peft
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags
from tests.helpers.tokenizers import make_tokenizer
from tests.parity.test_train_types import train_ours

NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
# An encoder of sound that is larger than the decoder and has as many blocks.
PHI4: dict[str, Any] = {
    "original_max_position_embeddings": 256,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "crop_size": 28,
        "image_token_id": 310,
    },
    "audio_config": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "nemo_conv_channels": 32,
        "nemo_activation": "relu",
        "ext_pw_out_channel": 128,
        "depthwise_separable_out_channel": 128,
        "audio_token_id": 311,
    },
}
# An encoder of images with more blocks than the decoder.
GIT = {
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
    }
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_bigcode": NO_DROPOUT,
    "phi4_multimodal": PHI4,
    "llama4_text": {},
}


@pytest.mark.parametrize("family", all_slow_but("gpt_bigcode", FAMILIES, nightly=["llama4_text"]))
def test_losses_and_adapter_on_two_ranks_are_those_of_peft(family, models, tmp_path):
    folder = models(family, **FAMILIES[family])
    rows = make_rows(8, seed=3)
    settings = {
        "train_type": "lora",
        "lora_alpha": 6,
        "lr": 1e-2,
        "num_epochs": 3,
        "gradient_accumulation_steps": 2,
    }
    losses, _ = train_ours(folder, rows, tmp_path / "out", **settings)
    targets = LoraConfig.from_pretrained(tmp_path / "out").target_modules
    base = load_base(folder, four_bit=False)
    first = functools.partial(first_adapter_value, seed=5)
    options = {"r": 4, "lora_alpha": 6, "target_modules": targets}
    expected, trained = train_peft(base, encode(folder, rows), first, steps=3, lr=1e-2, **options)
    assert losses == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0] - 0.01
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    reference = get_peft_model_state_dict(trained)
    assert saved.keys() == reference.keys()
    assert max((saved[name] - reference[name]).abs().max().item() for name in saved) < 1e-3


def on_meta(family: str, **overrides: Any) -> Any:
    sizes = {
        name: size
        for name, size in SIZES.items()
        if family != "xlnet" or name != "max_position_embeddings"
    }
    config = AutoConfig.for_model(family, **{**sizes, **overrides})
    options = {
        "dtype": torch.float32,
        "compute_dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return build_meta_model(config, attn_implementation="auto", **options)


OWN_SIZES = {"gemma3n_text": {"num_kv_shared_layers": 0}, "xlnet": {"d_head": 16}}
TABLES = {  # family -> whether ranks may share its embedding, and its other tables of tokens
    "gpt_bigcode": (True, []),  # its table of positions is none
    "bert": (True, []),
    "llama4_text": (True, []),  # it moves tokens to the device of its weights
    "gemma3n_text": (True, ["model.embed_tokens_per_layer"]),
    "xlnet": (False, []),  # it looks up a column of the batch after another
}


@pytest.mark.quick
@pytest.mark.parametrize("family", TABLES)
def test_only_tables_of_the_batchs_tokens_are_shared(family):
    model = on_meta(family, **OWN_SIZES.get(family, {}))
    parts = ModelParts(model)
    paths = {module: path for path, module in model.named_modules()}
    assert (parts.looks_up, [paths[table] for table in parts.token_tables]) == TABLES[family]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("family", "overrides", "blocks", "towers"),
    [
        (
            "phi4_multimodal",
            PHI4,
            "model.layers",
            ["model.embed_tokens_extend.image_embed", "model.embed_tokens_extend.audio_embed"],
        ),
        ("git", GIT, "git.encoder.layer", ["git.image_encoder"]),
    ],
)
def test_an_encoder_inside_of_a_decoder_is_not_taken_for_it(family, overrides, blocks, towers):
    model = on_meta(family, **overrides)
    assert model.get_submodule(blocks) is find_blocks(model) and list(find_towers(model)) == towers


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("blt", "is of type 'blt', whose config.json gives no hidden size"),
        ("cpmant", "puts its own tokens before"),
    ],
)
def test_a_family_that_cannot_be_trained_is_refused_by_name(family, reason, tmp_path, capsys):
    folder = tmp_path / "model"
    if family == "blt":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(AutoConfig.for_model("blt").to_dict()))
        make_tokenizer(folder)
    else:
        make_model(folder, family, dim_head=16, dim_ff=128, prompt_types=4, prompt_length=4)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    assert (
        main(
            [
                "train",
                *flags(
                    model_name=folder,
                    dataset=rows,
                    dry_run=True,
                    nproc_per_node=1,
                    train_type="lora",
                ),
            ]
        )
        == 2
    )
    assert reason in capsys.readouterr().err
