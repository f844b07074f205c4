"""Experts that run one at a time, against transformers' own loop over decoded ones, and how often
the host waits.
"""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.adapters.lora import LoraExperts
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.model.architecture.structure import canonical_name
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.model.quantizers import routed
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.model.quantizers.expert_groups import Choices
from tests.helpers.models import PROBE, SIZES
from tests.layers.shards import relative_error
from tests.layers.test_lora_product import ONE_RANK
from tests.parity.test_experts import FAMILIES

pytestmark = pytest.mark.quick

QUANTIZERS: dict[str, dict[str, Any]] = {
    "qlora": {"quant_type": "nf4", "double_quant": False},
    "hqq_lora": {"n_bits": 4, "group_size": 64},
    "int8_lora": {"int8_threshold": 0.0},
    "bnb_llama_pro": {"quant_type": "nf4", "double_quant": False},
    "lora": {},
}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GROUPS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
CASES: dict[str, dict[str, object]] = {
    **FAMILIES,
    "deepseek_v2": {**GROUPS, **MLA, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": {**GROUPS, "first_k_dense_replace": 1},
}


class Reads(TorchDispatchMode):
    """Counts the operators that bring a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(
            self.counts[name]
            for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "bincount")
        )


def build(
    family: str, train_type: str, *, adapted: bool
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Our model of random weights, and transformers' with those that it decodes and its loop over
    experts.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, "initializer_range": 0.1, **CASES[family]})
    options = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    lora = LoraOptions(
        rank=4, target_parameters=("experts.gate_up_proj", "experts.down_proj") if adapted else ()
    )
    layers = LayerOptions(lora, QUANTIZERS[train_type], new_blocks=(1,))
    kind = TRAIN_TYPES[train_type], PRECISIONS["fp32"], torch.device("cpu")
    model = build_model(config, *kind, layers, attn_implementation="eager").model
    state = dict(plain.named_parameters())
    with torch.no_grad():
        for path, module in list(model.named_modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                values = state.get(canonical_name(f"{path}.{name}"))
                values = 0.1 * torch.randn(parameter.shape) if values is None else values.clone()
                if isinstance(module, QuantizedWeight) and name != "bias":
                    values = torch.empty_like(parameter, device="cpu")
                setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
            if isinstance(module, QuantizedWeight):
                weight = state[".".join(filter(None, (canonical_name(path), module.weight_name)))]
                module.load_shard(weight.flatten(), ONE_RANK)
                weight.copy_(module.dequantize())
    return model.eval(), plain.eval()


def with_updates(model: PreTrainedModel, plain: PreTrainedModel) -> dict[str, torch.Tensor]:
    """transformers' weights with PEFT's formula for each adapter of `model` added, differentiable
    in its A and B.
    """
    weights = {name: parameter.detach().double() for name, parameter in plain.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, LoraExperts):
            for name, lora in module.lora.items():
                key = f"{canonical_name(path)}.{name}"
                num_experts = lora.num_experts
                lora_A = lora.lora_A.weight.reshape(num_experts, -1, lora.lora_A.weight.shape[1])
                lora_B = lora.lora_B.weight.reshape(lora.lora_B.weight.shape[0], -1, num_experts)
                swapped = getattr(plain.get_submodule(canonical_name(path)), "is_transposed", False)
                update = torch.einsum("ore,eri->" + ("eio" if swapped else "eoi"), lora_B, lora_A)
                weights[key] = weights[key] + module.scaling * update
        elif hasattr(module, "lora"):
            update = module.lora.lora_B.weight @ module.lora.lora_A.weight
            key = f"{canonical_name(path)}.weight"
            weights[key] = weights[key] + module.lora.scaling * update
    return weights


@pytest.mark.parametrize(
    ("family", "train_type"),
    [
        *((family, "qlora") for family in CASES),
        ("gpt_oss", "hqq_lora"),
        ("mixtral", "hqq_lora"),
        ("qwen3_moe", "lora"),
        ("llama4_text", "lora"),
    ],
)
def test_experts_and_their_adapters_compute_what_transformers_and_peft_do(family, train_type):
    model, plain = build(family, train_type, adapted=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = functional_call(
        plain.double(), with_updates(model, plain), kwargs={"input_ids": PROBE}
    ).logits
    found = model(input_ids=PROBE).logits
    assert relative_error(found, expected) < 2e-6
    grad = torch.randn(expected.shape)
    own, theirs = (
        torch.autograd.grad((logits * grad).sum(), trained) for logits in (found, expected)
    )
    assert max(relative_error(*pair) for pair in zip(own, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("group_bytes", [2**30, 200_000])  # all experts, and some at a time
@pytest.mark.parametrize(
    ("family", "train_type"),
    [
        ("qwen3_moe", "qlora"),
        ("gpt_oss", "hqq_lora"),
        ("mixtral", "int8_lora"),
        ("llama4_text", "lora"),
    ],
)
def test_groups_of_experts_compute_what_one_at_a_time_does(family, train_type, group_bytes):
    model, _ = build(family, train_type, adapted=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modules = [module for module in model.modules() if state_of(module).group_bytes is not None]
    found = []
    launched = []
    for size in (0, group_bytes):
        for module in modules:
            set_state(module, replace(state_of(module), group_bytes=size))
        with Reads() as counted:
            # with 2 tokens, experts are idle
            logits = [model(input_ids=rows).logits for rows in (PROBE, PROBE[:, :1])]
            grads = torch.autograd.grad(
                sum((each * each.detach().cos()).sum() for each in logits), trained
            )
        found.append([*logits, *grads])
        launched.append(counted.counts["_grouped_mm"])
    assert modules and launched[0] == 0 < launched[1]
    assert max(relative_error(*pair) for pair in zip(*found, strict=True)) < 1e-6


@pytest.mark.parametrize("train_type", ["qlora", "hqq_lora", "lora"])
def test_a_group_takes_as_many_operators_whatever_its_experts(train_type, monkeypatch):
    rows = torch.randint(SIZES["vocab_size"], (16, 64), generator=torch.Generator().manual_seed(0))
    counts = []
    for experts in (4, 16):
        monkeypatch.setitem(CASES["qwen3_moe"], "num_experts", experts)
        model, _ = build("qwen3_moe", train_type, adapted=True)
        for module in model.modules():
            set_state(module, replace(state_of(module), group_bytes=2**30))
        with Reads() as counted:
            model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits.sum().backward()
        counts.append(counted.counts)
    assert not counts[0] - counts[1] and not counts[1] - counts[0]


def test_outputs_of_a_tokens_experts_are_added_in_float32():
    experts = 8
    tokens = 64
    size = 32
    own = torch.randn(experts, tokens, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    ends = [tokens * (n + 1) for n in range(experts)]
    choices = Choices(
        torch.arange(tokens).repeat(experts), ends, torch.tensor(ends, dtype=torch.int32)
    )
    module = nn.Module()
    module.down_proj = nn.Parameter(
        torch.eye(size).expand(experts, size, size).bfloat16(), requires_grad=False
    )
    shares = torch.full((experts * tokens,), 1 / 8).bfloat16()
    sums = torch.empty(tokens, size).bfloat16()
    found = routed._multiply(
        module, "down_proj", own.flatten(0, 1), choices, shares=shares, sums=sums
    )
    assert torch.equal(found, own.double().mean(dim=0).bfloat16())  # rounded once


def test_new_blocks_experts_train_in_full_as_transformers_do():
    model, plain = build("gpt_oss", "bnb_llama_pro", adapted=False)
    trained = [
        canonical_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    assert {"experts.down_proj", "experts.gate_up_proj_bias"} <= {
        name.split(".mlp.")[-1] for name in trained
    }
    own, theirs = (
        torch.autograd.grad(
            each(input_ids=PROBE, labels=PROBE).loss, [each.get_parameter(name) for name in trained]
        )
        for each in (model, plain.double())
    )
    assert max(relative_error(*pair) for pair in zip(own, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("train_type", ["qlora", "hqq_lora", "int8_lora"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_a_layer_of_experts_synchronizes_the_host_once(family, train_type, monkeypatch):
    model, _ = build(family, train_type, adapted=train_type != "int8_lora")
    ends: list[int] = []
    read = routed.read_ends
    monkeypatch.setattr(routed, "read_ends", lambda *args: ends.append(1) or read(*args))
    mask = torch.ones_like(PROBE)  # without one transformers reads whether rows are packed
    with Reads() as counted:
        model(input_ids=PROBE, attention_mask=mask, labels=PROBE).loss.backward()
    assert counted.waits == 0 and len(ends) == model.config.num_hidden_layers
    assert counted.counts["sort"] == len(ends)
    ends.clear()
    with Reads() as counted, torch.no_grad():
        # a generated token of each of two rows
        model(input_ids=PROBE[:, :1], attention_mask=mask[:, :1])
    assert counted.waits == 0 and len(ends) == model.config.num_hidden_layers
