"""Rotary embeddings by a kernel: its bits, and the attention modules that may take it."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from fsdp_qlora.model.architecture.fused import fuse_modules
from fsdp_qlora.model.architecture.rotary_binding import bind_rotary, describe_rotary
from fsdp_qlora.model.kernels import rotary
from fsdp_qlora.model.kernels.in_use import Ways, using_ways

pytestmark = pytest.mark.quick

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
TOKENS = torch.arange(24).view(2, 12)

Tensors = tuple[torch.Tensor, ...]

# --- the kernel ---

# (rows, heads, groups, tokens, size of a head, rows of the tables)
SHAPES = [(2, 6, 2, 13, 16, 1), (1, 4, 4, 5, 80, 1), (2, 9, 1, 3, 128, 2), (0, 2, 1, 3, 8, 1)]


def heads(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensors, Tensors, Tensors]:
    """Queries and keys, their tables, and gradients of what they become."""
    rows, num_heads, groups, tokens, size, table_rows = shape
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    q = drawn(rows, tokens, num_heads, size).transpose(1, 2)
    # Keys that lie beside something else, as the rotary part of a head does.
    k = drawn(rows, tokens, groups, 2 * size).transpose(1, 2)[..., size:]
    tables = (drawn(table_rows, tokens, size), drawn(table_rows, tokens, size))
    return (q, k), tables, (drawn(*q.shape), drawn(*k.shape))


def has_bits_of_transformers(shape: tuple[int, ...], dtype: torch.dtype, way: str) -> bool:
    inputs, tables, grads = heads(shape, dtype)
    inputs = tuple(each.requires_grad_() for each in inputs)
    expected = apply_rotary_pos_emb(*inputs, *tables)
    expected_grads = torch.autograd.grad(expected, inputs, grads)
    with using_ways(Ways(rotary=way)):
        assert rotary.rotary_fits(*inputs, *tables) == (way == "triton")
        with torch.no_grad():
            turned = rotary.rotate(*inputs, *tables, backward=False)
            back = rotary.rotate(*grads, *tables, backward=True)
    pairs = zip((*turned, *back), (*expected, *expected_grads), strict=True)
    assert all(each.transpose(1, 2).is_contiguous() for each in (*turned, *back))
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_have_the_bits_of_transformers(shape, interpreted) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert has_bits_of_transformers(shape, dtype, "plain")
        assert interpreted(has_bits_of_transformers, shape, dtype, "triton")


# --- models ---


def model_of(model_type: str, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False).train()


def logits_and_gradients(model: PreTrainedModel, ways: Ways) -> list[torch.Tensor]:
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    grad = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with using_ways(ways):
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        return [logits.detach(), *torch.autograd.grad(logits, [embedded, *trained], grad)]


def calls_by_triton(model_type: str, sizes: dict[str, Any]) -> tuple[int, str, float]:
    """Compare a model by kernels with the same one by torch and with transformers' own.

    Returns:
        how often the rotary kernel was called, the description, and the largest relative
        difference of a model whose norms are by a kernel, too.
    """
    own = model_of(model_type, **sizes)
    own.model.layers[0].self_attn.q_proj.requires_grad_(True)
    model = copy.deepcopy(own)
    fuse_modules(model)
    bind_rotary(model)
    model = copy.deepcopy(model)
    calls: Counter[str] = Counter()
    by_triton = rotary.WAYS["triton"]

    def counted(*args: Any) -> rotary.Pair:
        calls["rotary"] += 1
        return by_triton(*args)

    rotary.WAYS["triton"] = counted
    plain = logits_and_gradients(model, Ways())
    exact = logits_and_gradients(model, Ways(rotary="triton", gate="triton"))
    assert all(map(torch.equal, plain, exact))
    number = calls["rotary"]
    near = logits_and_gradients(model, Ways(rotary="triton", gate="triton", norm="triton"))
    rotary.WAYS["triton"] = by_triton
    fused = copy.deepcopy(own)
    fuse_modules(fused)
    assert all(map(torch.equal, plain, logits_and_gradients(fused, Ways())))
    pairs = zip(near, plain, strict=True)
    distances = [float((one - other).float().norm() / other.float().norm()) for one, other in pairs]
    return number, describe_rotary(model), max(distances)


# A model -> what differs from SIZES, and how many of its two blocks the kernel takes.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 2),
    # norms of queries and keys
    "qwen3": ({}, 2),
    # 1 + weight, and another activation
    "gemma2": ({}, 2),
    # a part of a head turns: it is taken out before
    "stablelm": ({"partial_rotary_factor": 0.5}, 2),
    # and within the model's function, which turns neighbours
    "glm": ({"partial_rotary_factor": 0.5}, 0),
    # tables in float32
    "olmo2": ({}, 0),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_models_have_the_same_bits_by_kernels(model_type, interpreted) -> None:
    sizes, num_blocks = MODELS[model_type]
    calls, description, distance = interpreted(calls_by_triton, model_type, sizes)
    assert calls == 2 * num_blocks, description
    # Norms in another order of a sum: a few roundings to bfloat16.
    assert distance < 0.05


def test_an_attention_module_with_another_rotation_keeps_it() -> None:
    model = model_of("glm")
    bind_rotary(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert describe_rotary(model).endswith("others: 2 GlmAttention (apply_rotary_pos_emb)")
    llama = model_of("llama")
    bind_rotary(llama)
    assert describe_rotary(llama).startswith("2 attention modules") and LlamaAttention.forward


def test_a_bound_module_keeps_its_decorators_and_caches() -> None:
    """transformers renames old arguments by a decorator around the forward method."""
    model = model_of("llama").eval()
    expected = model(TOKENS).logits
    bind_rotary(model)
    cache = model(TOKENS[:, :7], use_cache=True).past_key_values
    rest = model(TOKENS[:, 7:], past_key_values=cache).logits
    assert torch.allclose(rest, expected[:, 7:], atol=0.1) and cache.get_seq_length() == 12
    attention = model.model.layers[0].self_attn
    assert attention.forward.__func__ is not LlamaAttention.forward
    names = [*attention.forward.__func__.__code__.co_freevars]
    assert names == [*LlamaAttention.forward.__code__.co_freevars]
