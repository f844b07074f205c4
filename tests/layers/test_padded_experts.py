"""Experts padded to the longest of their group: values and gradients beside float64, groups, and
waits of the host.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdp_qlora.config.train_types import TRAIN_TYPES, TrainType
from fsdp_qlora.model.kernels.in_use import Ways, using_ways
from fsdp_qlora.model.module_state import set_state, state_of
from fsdp_qlora.model.quantizers import padded_groups, routed
from fsdp_qlora.model.quantizers.padded_groups import PaddedGroup, experts_way, sort_by_rows
from tests.helpers.models import PROBE
from tests.layers.shards import relative_error
from tests.layers.test_routed import QUANTIZERS, Reads, build

pytestmark = pytest.mark.quick

HIDDEN = 32
INNER = 16
RANK = 4
# Choices of each of six experts by 24 tokens
COUNTS = {
    "uneven": [5, 24, 1, 9, 3, 11],
    "some without tokens": [0, 16, 0, 12, 7, 0],
    "all tokens to one": [0, 0, 0, 24, 0, 0],
}
TOKENS = 24


class Experts(nn.Module):
    """Experts with biases and adapters, [E, O, I] or transposed, with a routing of given counts."""

    def __init__(self, counts: list[int], *, transposed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        num_experts = len(counts)
        self.is_transposed = transposed
        self.counts = counts
        self.tokens = torch.cat([torch.randperm(TOKENS)[:count] for count in counts])
        shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        for name, (rows, columns) in shapes.items():
            size = (columns, rows) if transposed else (rows, columns)
            self.add(name, torch.randn(num_experts, *size) / columns**0.5, dtype)
            self.add(f"{name}_bias", torch.randn(num_experts, rows), dtype)
            self.add(f"{name}_A", torch.randn(num_experts, RANK, columns) / columns**0.5, dtype)
            self.add(f"{name}_B", torch.randn(num_experts, rows, RANK) / 2, dtype)
        self.add("x", torch.randn(TOKENS, HIDDEN), dtype)
        self.add("shares", torch.rand(len(self.tokens)), dtype)
        self.target = torch.randn(TOKENS, HIDDEN).to(dtype)
        set_state(self, replace(state_of(self), group_bytes=2**30))

    def add(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
        # The same rounded values in all dtypes.
        setattr(self, name, nn.Parameter(values.bfloat16().to(dtype)))

    def outputs(self) -> list[torch.Tensor]:
        """Sums by token, and the gradients of all parameters, by the way in use."""
        ends = torch.tensor(self.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        order = routed._sorted_choices(torch.arange(len(self.tokens)), ends.tolist(), ends)
        choices = order._replace(tokens=self.tokens[order.tokens])
        adapted = nn.Module()
        adapted.is_transposed = self.is_transposed
        set_state(adapted, state_of(self))
        for name in ("gate_up_proj", "down_proj"):
            parts = [getattr(self, f"{name}{end}") for end in ("", "_A", "_B")]
            setattr(adapted, f"{name}_bias", getattr(self, f"{name}_bias"))
            vars(adapted)[name] = routed.AdaptedExperts(*parts)
        inner = routed._multiply(adapted, "gate_up_proj", self.x, choices, gathers=True)
        shares = self.shares[order.tokens]
        inner = self.gated(inner)
        y = routed._multiply(adapted, "down_proj", inner, choices, shares=shares, sums=self.x)
        return self.with_gradients(y)

    def expected(self) -> list[torch.Tensor]:
        """The same by the formula, one choice after the other."""
        experts = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        rows = self.gated(self.product("gate_up_proj", self.x[self.tokens], experts))
        rows = self.product("down_proj", rows, experts) * self.shares[:, None]
        return self.with_gradients(torch.zeros_like(self.x).index_add(0, self.tokens, rows))

    def product(self, name: str, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        weight, bias, A, B = (getattr(self, f"{name}{end}") for end in ("", "_bias", "_A", "_B"))
        weight = weight.mT if self.is_transposed else weight
        return torch.einsum("noi,ni->no", (weight + B @ A)[experts], x) + bias[experts]

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def with_gradients(self, y: torch.Tensor) -> list[torch.Tensor]:
        return [y, *torch.autograd.grad((y * self.target).sum(), list(self.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_padded_experts_are_as_near_to_float64_as_single_ones(counts, transposed, dtype):
    expected = Experts(counts, transposed=transposed, dtype=torch.float64).expected()
    experts = Experts(counts, transposed=transposed, dtype=dtype)
    with using_ways(Ways(experts="padded")), Reads() as counted:
        found = experts.outputs()
    assert (counted.counts["bmm"] > 0) == (sum(map(bool, counts)) > 1)
    assert counted.counts["_grouped_mm"] == 0
    set_state(experts, replace(state_of(experts), group_bytes=0))
    single = experts.outputs()
    unit = torch.finfo(dtype).eps
    for ours, theirs, exact in zip(found, single, expected, strict=True):
        assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact) + unit / 10


@pytest.mark.parametrize(
    ("family", "train_type"),
    [
        ("qwen3_moe", "qlora"),
        ("gpt_oss", "mxfp4"),
        ("deepseek_v3", "fp8"),
        ("gpt_oss", "hqq_lora"),
        ("mixtral", "int8_lora"),
        ("llama4_text", "lora"),
    ],
)
def test_padded_models_compute_what_single_experts_do(family, train_type, monkeypatch):
    for quantizer in ("mxfp4", "fp8"):
        monkeypatch.setitem(TRAIN_TYPES, quantizer, TrainType("lora", quantizer, "adapter"))
        monkeypatch.setitem(QUANTIZERS, quantizer, {})
    model, _ = build(family, train_type, adapted=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modules = [module for module in model.modules() if state_of(module).group_bytes is not None]
    found = []
    for ways, size in ((Ways(), 0), (Ways(experts="padded"), 2**30)):
        for module in modules:
            set_state(module, replace(state_of(module), group_bytes=size))
        with using_ways(ways), Reads() as counted:
            # with 2 tokens, experts are idle
            logits = [model(input_ids=rows).logits for rows in (PROBE, PROBE[:, :1])]
            total = sum((each * each.detach().cos()).sum() for each in logits)
            found.append([*logits, *torch.autograd.grad(total, trained)])
    assert modules and counted.counts["_grouped_mm"] == 0 < counted.counts["baddbmm_"]
    assert max(relative_error(*pair) for pair in zip(*found, strict=True)) < 2e-6


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
def test_a_padded_layer_synchronizes_the_host_once(family, monkeypatch):
    model, _ = build(family, "qlora", adapted=True)
    ends: list[int] = []
    read = routed.read_ends
    monkeypatch.setattr(routed, "read_ends", lambda *args: ends.append(1) or read(*args))
    mask = torch.ones_like(PROBE)  # without one transformers reads whether rows are packed
    with using_ways(Ways(experts="padded")), Reads() as counted:
        model(input_ids=PROBE, attention_mask=mask, labels=PROBE).loss.backward()
    assert counted.waits == 0 and len(ends) == model.config.num_hidden_layers
    # The counts' order is one more.
    assert counted.counts["sort"] == 2 * len(ends)


def test_groups_have_similar_experts_little_padding_and_their_bytes():
    random = torch.Generator().manual_seed(0)
    spread = torch.randn(128, generator=random).exp() * 64
    counts = [*spread.int().tolist(), 0, 0, 5_000]
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    choices = sort_by_rows(torch.arange(sum(counts)), ends.tolist(), ends)
    most = 2_000_000
    groups = choices.groups(8_000, 100, most, most_rows=4_000)
    assert groups[0].experts == [130]  # more than most_rows
    assert sorted(number for group in groups for number in group.experts) == [
        number for number, count in enumerate(counts) if count
    ]
    padded = [group for group in groups if isinstance(group, PaddedGroup)]
    assert len(padded) < 12
    for group in padded:
        sizes = [counts[number] for number in group.experts]
        assert max(sizes) == group.length <= max(16, 2 * min(sizes))
        assert len(sizes) * (8_000 + 100 * group.length) <= most
        assert group.where.tolist() == group.experts
        # What is taken and given back is what was there.
        rows = group.take(choices.tokens)
        assert torch.equal(group.without_padding(rows), choices.tokens[group.rows])
        assert (~group.is_padding).sum() == sum(sizes)
    computed = sum(group.num_rows for group in groups)
    assert computed < 1.3 * sum(counts)


def test_gpus_without_a_grouped_kernel_pad_their_experts(monkeypatch):
    gpu = torch.device("cuda")
    for capability, dtype, way in (
        ((8, 6), torch.bfloat16, "padded"),
        ((12, 0), torch.bfloat16, "padded"),
        ((9, 0), torch.float16, "padded"),
        ((9, 0), torch.bfloat16, "plain"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        assert experts_way(gpu, dtype) == way
    assert experts_way(torch.device("cpu"), torch.bfloat16) == "plain"


def test_the_log_says_once_how_much_is_padding(caplog, monkeypatch):
    monkeypatch.setattr(padded_groups._Logged, "is_done", False)
    experts = Experts([4, 24, 16, 3], transposed=False, dtype=torch.float32)
    with using_ways(Ways(experts="padded")), caplog.at_level("INFO", "fsdp_qlora"):
        experts.outputs()
    [line] = [record.getMessage() for record in caplog.records if "padding" in record.getMessage()]
    assert "9 rows of padding for 47 rows" in line and "(19%)" in line
