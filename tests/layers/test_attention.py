"""Attention with repeated keys and values against transformers' own, on the CPU."""

import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.model.architecture import attention
from tests.helpers.models import PROBE


def test_repeating_keys_and_values_gives_the_same_attention(models, monkeypatch):
    folder = models("llama")  # two heads share each key
    # As on a card of the Turing generation.
    monkeypatch.setattr(
        attention, "find_kernel", lambda *args, repeated: "memory-efficient" if repeated else "math"
    )
    config = AutoModelForCausalLM.from_pretrained(folder).config
    name = attention.choose_sdpa(config, torch.float16, torch.device("cuda"))
    assert name == attention.REPEATED
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)(
            PROBE
        ).logits
        for implementation in ("sdpa", name)
    ]
    assert torch.equal(*logits)
