"""Expanded models: the same logits before training, only new blocks change by it, and what is
saved.
"""

import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.export.expand import block_origins, expand_model
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.utils.errors import UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, Models
from tests.helpers.reference import batch_loss, encode
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags, train_ok

MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
FAMILIES = {
    "llama": {"num_hidden_layers": 4},
    "qwen2": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 7},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"num_hidden_layers": 4},
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "gpt_oss": MOE,
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expanded_model_gives_the_same_logits(family, models, tmp_path):
    folder = models(family, **FAMILIES[family])
    expand_model(str(folder), tmp_path / "out", expansion_rate=0.5)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    added = model.config.new_blocks
    count = base.config.num_hidden_layers
    assert model.config.num_hidden_layers == count + len(added) and len(added) == count // 2
    with torch.no_grad():
        assert torch.equal(model(input_ids=PROBE).logits, base(input_ids=PROBE).logits)
        # The identity comes from the zeros: without them the new blocks are the copies that they
        # should be.
        for name, parameter in model.named_parameters():
            if not parameter.any() and ".bias" not in name:
                parameter.normal_(std=0.1)
        assert (model(input_ids=PROBE).logits - base(input_ids=PROBE).logits).abs().max() > 1e-3


def test_new_blocks_are_spread_evenly_and_as_many_as_asked_for():
    assert block_origins(4, 0.5) == [0, 1, 1, 2, 3, 3]
    assert block_origins(3, 1) == [0, 0, 1, 1, 2, 2]
    origins = block_origins(32, 0.1)
    assert [origin for origin, after in itertools.pairwise(origins) if origin == after] == [
        9,
        20,
        31,
    ]
    for rate in (0, 0.02, 1.1):
        with pytest.raises(UserError, match="--expansion_rate"):
            block_origins(32, rate)


def test_the_script_takes_the_names_of_2024_and_refuses_with_status_2(
    models, tmp_path, monkeypatch, capsys
):
    options = flags(model_name=models(), output_dir=tmp_path / "new")
    monkeypatch.setattr(sys, "argv", ["block_expansion.py", *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "scripts" / "block_expansion.py"), run_name="__main__")
    assert "--expansion_rate 0.1 would add 0 blocks to the model's 2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def expanded(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(model_type: str = "llama", **overrides: object) -> Path:
        out = tmp_path_factory.mktemp("expanded") / model_type
        expand_model(str(models(model_type, **overrides)), out, expansion_rate=0.5)
        return out

    return make


OPTIONS = {
    "batch_size": 2,
    "lr": 1e-3,
    "lr_scheduler": "constant",
    "warmup": 0,
    "precision": "fp32",
}


def _quantize(model: nn.Module, train_type: str, old: list[int]) -> None:
    """Replace the weights of old blocks by what they are in 4 bits."""
    for index in old:
        for module in model.model.layers[index].modules():
            if isinstance(module, nn.Linear) and train_type == "bnb_llama_pro":
                blocks = module.weight.data.reshape(-1, 64)
                codes, state = bnb.quantize_4bit(
                    blocks, blocksize=64, compress_statistics=True, quant_type="nf4"
                )
                module.weight.data = bnb.dequantize_4bit(codes, state).view(module.weight.shape)
            elif isinstance(module, nn.Linear):
                layer = QUANTIZERS["hqq"].linear(
                    module, n_bits=4, group_size=64, compute_dtype=torch.float32
                )
                module.weight.data = layer.quantize_whole(module.weight.data)


@pytest.mark.parametrize("train_type", ["bnb_llama_pro", "hqq_llama_pro"])
def test_new_blocks_train_as_in_plain_torch(train_type, expanded, tmp_path):
    folder = expanded("qwen2", num_hidden_layers=4)
    rows = make_rows(4, seed=3)
    held_out = make_rows(3, seed=2)
    output = train_ok(
        2,
        tmp_path / "out",
        train_type=train_type,
        llama_pro_path=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", rows),
        eval_dataset=write_rows(tmp_path / "held_out.jsonl", held_out),
        num_epochs=10,
        **OPTIONS,
    )
    assert "bit-identical to its weight quantized whole" in output
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    added = model.config.new_blocks
    assert added == [2, 5]
    old = [index for index in range(6) if index not in added]
    _quantize(model, train_type, old)
    model.requires_grad_(False)
    for index in added:
        model.model.layers[index].requires_grad_(True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.0)
    expected = []
    for _ in range(10):
        loss = batch_loss(model, encode(folder, rows))
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert read_metrics(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.05

    # The base is as it was, to the bit; the new blocks are the trained ones, as their losses on it
    # say.
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    new = {
        name
        for name in before
        if name.startswith(tuple(f"model.layers.{index}." for index in added))
    }
    assert changed <= new and len(changed) > 0.9 * len(new)
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    assert saved.config.new_blocks == added
    AutoTokenizer.from_pretrained(tmp_path / "out")
    _quantize(saved, train_type, old)
    with torch.no_grad():
        loss = batch_loss(saved, encode(folder, held_out)).item()
    assert loss == pytest.approx(read_metrics(tmp_path / "out", "eval_loss")[-1], rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in new:
            assert torch.allclose(after[name], parameter, atol=1e-4)


def test_new_blocks_with_experts_keep_their_published_names(expanded, tmp_path):
    folder = expanded("qwen3_moe", **{**MOE, "moe_intermediate_size": 64})
    train_ok(
        2,
        tmp_path / "out",
        train_type="hqq_llama_pro",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        use_cpu_offload=True,
        **OPTIONS,
    )
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".experts.0.down_proj" in name for name in changed)
    assert all(name.startswith("model.layers.2.") for name in changed)
