"""Norms and gated MLPs by our functions: found by what they compute, same values, less kept."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.model.architecture import gated_mlp as functions
from fsdp_qlora.model.architecture.fused import describe_fused, fuse_modules, set_save_inputs_only
from fsdp_qlora.model.architecture.gated_mlp import GatedMlp, as_gated_mlp
from fsdp_qlora.model.architecture.rms_norm import FORMS, RmsNorm, as_rms_norm
from tests.layers.test_lora_product import IN, adapted, assert_near, results

pytestmark = pytest.mark.quick

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
# model -> how its norms compute. gemma's MLP has a GELU, the others' a SiLU.
MODELS = dict(zip(("qwen3", "olmo2", "gemma2"), FORMS, strict=True))
TOKENS = torch.arange(24).view(2, 12)


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**SIZES), attn_implementation="eager"
    ).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False).train()


def of_kind(model: nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def logits_and_gradient(model: PreTrainedModel) -> list[torch.Tensor]:
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [logits.detach(), *torch.autograd.grad(logits, [embedded, *trained], grad)]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_fused_modules_give_the_same_bits(model_type, recomputes):
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        model = model_of(model_type, dtype)
        model.model.layers[0].post_attention_layernorm.requires_grad_(True)
        lean = copy.deepcopy(model)
        fuse_modules(lean)
        set_save_inputs_only(lean, recomputes)
        norms = of_kind(lean, RmsNorm)
        assert len(norms) >= 5 and {norm.form for norm in norms} == {MODELS[model_type]}
        assert len(of_kind(lean, GatedMlp)) == 1
        assert "1 gated MLPs by one function" in describe_fused(lean)
        assert [name for name, _ in lean.named_parameters()] == [
            name for name, _ in model.named_parameters()
        ]
        assert_near(logits_and_gradient(lean), logits_and_gradient(model), tolerance)


class OtherNorm(nn.Module):
    """An RMS norm but for one number."""

    def __init__(self, power: float, weight_power: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.power = power
        self.weight_power = weight_power
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.float().abs().pow(self.power).mean(-1, keepdim=True)
        return self.weight**self.weight_power * (x.float() * torch.rsqrt(mean + self.eps)).to(
            x.dtype
        )


class OtherMlp(nn.Module):
    """A gated MLP but for one number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a = nn.Linear(8, 24)
        self.b = nn.Linear(8, 24)
        self.c = nn.Linear(24, 8)
        self.act = nn.SiLU()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.a(x) * self.act(self.b(x)) * self.factor)


class NormOfImages(OtherNorm):
    """A norm of other shapes, as one for sound in Gemma 3n."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 4:
            raise ValueError("no rows, columns and channels")
        return super().forward(x)


def test_modules_that_compute_something_else_are_not_fused():
    assert not as_rms_norm(NormOfImages(2, 1))
    assert (
        as_rms_norm(OtherNorm(2, 1))
        and not as_rms_norm(OtherNorm(1.99, 1))
        and not as_rms_norm(OtherNorm(2, 2))
    )
    assert not as_rms_norm(nn.LayerNorm(16))
    mlp = as_gated_mlp(OtherMlp(1.0))
    assert mlp and mlp.roles == ("b", "a", "c") and not as_gated_mlp(OtherMlp(1.001))
    assert not as_gated_mlp(nn.TransformerEncoderLayer(8, 2, 24))


def kept_by(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and what is kept of it in memory of its own, weights apart."""
    kept: dict[int, torch.Tensor] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    return y, [tensor for address, tensor in kept.items() if address not in weights]


@pytest.mark.parametrize("kind", ["nf4", "16 or 32 bits"])
def test_fused_blocks_save_neither_norm_outputs_nor_gated_activations(kind):
    norm = RmsNorm(nn.Parameter(torch.rand(IN) + 0.5, requires_grad=False), next(iter(FORMS)), 1e-6)
    gate, up, down = (adapted(kind, size=IN) for _ in range(3))
    model = nn.Sequential(
        norm, GatedMlp({"gate": gate, "up": up, "down": down}, ("gate", "up", "down"), nn.SiLU())
    )
    x = torch.randn(18, IN).requires_grad_()
    expected = results(model(x), x, down)
    set_save_inputs_only(model, True)
    y, kept = kept_by(model, x)
    # The norm's input, the outputs of gate and up, and three products of rank 4.
    assert sum(tensor.numel() for tensor in kept) == 18 * (3 * IN + 3 * 4)
    assert_near(results(y, x, down), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes", [False, True])
def test_chunked_mlps_give_the_same_bits_for_long_rows(recomputes, dtype, monkeypatch):
    model = model_of("gemma2", dtype)
    fuse_modules(model)
    set_save_inputs_only(model, recomputes)
    expected = logits_and_gradient(model)
    monkeypatch.setattr(functions, "PIECE", 5 * SIZES["intermediate_size"] + 7)  # five of 24 tokens
    assert_near(logits_and_gradient(model), expected, 1e-6)
