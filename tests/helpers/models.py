"""Tiny models of every family, made in code."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tokenizers import make_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 319,  # many models have one, and a number that few rows do not reach
}
PROBE = torch.arange(2, 50).view(2, 24)  # token ids on which logits are compared


def make_model(folder: Path, model_type: str = "llama", **overrides: object) -> Path:
    """A random model of the given family in fp32 with its tokenizer, as a user would have it on
    disk.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, "initializer_range": 0.1, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first, which would hide a forgotten bias
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a model folder: `edit` adds, replaces or removes some."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Models = Callable[..., Path]
"""The fixture `models`: a family and what differs from `SIZES` -> the folder of a tiny model."""
