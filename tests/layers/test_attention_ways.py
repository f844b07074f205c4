"""The ways of attention within documents: which kernel computes what, and values against float64.

The kernels themselves need a GPU. Here torch's own for any lengths is attention in float32 with a
mask, and cuDNN's is SDPA.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdp_qlora.data.batches.graph_lengths import with_bounds_alone
from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.data.batches.shared_tokens import SharedTokens
from fsdp_qlora.model.architecture import attention_kernels, attention_ways
from fsdp_qlora.model.architecture.attention import VARLEN
from fsdp_qlora.model.architecture.attention_kernels import CUDNN, FLASH4, TAKES_GROUPS
from fsdp_qlora.model.architecture.attention_ways import (
    AttentionInputs,
    attention_inputs,
    exact_attention,
)
from fsdp_qlora.model.architecture.shapes import BlockShape
from fsdp_qlora.model.kernels.in_use import Ways, using_ways

HEADS, GROUPS, SIZE = 4, 2, 16
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.fixture
def kernels(monkeypatch) -> list[str]:
    """Computes on a CPU what needs a GPU, and returns the names of the kernels that were called."""
    called: list[str] = []

    def any_lengths(query, key, value, query_ends, ends, *_, scale, window_size, **options):
        called.append("varlen")
        documents, left = _places(query_ends)
        documents_of_keys, left_of_keys = _places(ends)
        # The last query of a document is at the place of its last key.
        before = left_of_keys - left[:, None]
        visible = (documents[:, None] == documents_of_keys) & (before >= 0)
        visible &= (before <= window_size[0]) | (window_size[0] < 0)
        heads = [each.transpose(0, 1)[None] for each in (query, key, value)]
        is_grouped = options.get("enable_gqa", False)
        return F.scaled_dot_product_attention(*heads, visible, scale=scale, enable_gqa=is_grouped)[
            0
        ].transpose(0, 1)

    def cudnn(query, key, value, *, scaling):
        called.append("cudnn")
        assert query.shape[2] == key.shape[2] and query.stride(-1) == 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )

    monkeypatch.setattr(attention_kernels, "varlen_attn", any_lengths)
    monkeypatch.setattr(attention_kernels, "_cudnn", cudnn)
    return called


def _places(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each token, and the tokens from it to the document's end."""
    tokens = torch.arange(int(ends[-1]))
    documents = torch.bucketize(tokens, ends[1:], right=True)
    return documents, ends[documents + 1] - tokens


def make_inputs(lengths, dtype=torch.float32, window=None) -> AttentionInputs:
    block = BlockShape(hidden=64, heads=HEADS, groups=GROUPS, head_dim=SIZE, window=window)
    (inputs,) = attention_inputs([block, block], lengths, dtype, torch.device("cpu"))
    return inputs


def attend(way, inputs, lengths, **arguments) -> torch.Tensor:
    """The output [T, H, D] of the attention that transformers calls by name."""
    function = ALL_ATTENTION_FUNCTIONS[VARLEN]
    given = arguments if "places" in arguments else describe_documents(lengths) | arguments
    with using_ways(Ways(attention=way)):
        return function(torch.nn.Module(), *inputs[:3], None, **given)[0][0]


@pytest.mark.parametrize(
    ("lengths", "arguments", "kernel"),
    [
        ([128, 128], {}, "cudnn"),
        ([256], {}, "cudnn"),
        ([128, 128], {"sliding_window": 128}, "cudnn"),  # hides nothing
        ([128, 128], {"sliding_window": 40}, "varlen"),
        ([128, 256], {}, "varlen"),
        ([120, 120], {}, "varlen"),  # one of hundreds of lengths
        ([128, 128], {"softcap": 30.0}, "varlen"),
        ([128, 128], {"s_aux": torch.zeros(HEADS)}, "varlen"),
    ],
)
def test_cudnn_computes_only_documents_of_one_length(lengths, arguments, kernel, kernels):
    inputs = make_inputs(lengths)
    plain = attend("plain", inputs, lengths, **arguments)
    found = attend(CUDNN, inputs, lengths, **arguments)
    assert kernels == ["varlen", kernel]
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [12, 136])
def test_heads_that_cudnn_does_not_take_go_to_the_plain_kernel(size, kernels):
    query, key, value = (torch.randn(1, heads, 128, size) for heads in (HEADS, GROUPS, GROUPS))
    attend(CUDNN, (query, key, value), [128])
    attend(CUDNN, (query[..., :8], key[..., :8], value[..., :4]), [128])  # narrower values
    assert kernels == ["varlen", "varlen"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["plain", CUDNN])
@pytest.mark.parametrize("window", [None, 40])
def test_ways_have_the_values_and_gradients_of_float64(way, dtype, window, kernels):
    inputs = make_inputs([128, 128], dtype, window)
    found = attention_ways.attend_and_back(way, inputs)
    assert kernels == ["cudnn" if way == CUDNN and window is None else "varlen"]
    for own, exact in zip(found, exact_attention(inputs), strict=True):
        assert own.shape == exact.shape and own.dtype == dtype
        assert (own - exact).norm() / exact.norm() < DTYPES[dtype]


@pytest.mark.parametrize("window", [None, 40])
def test_shared_prompts_are_computed_as_documents_of_their_own(window, kernels):
    # Four documents of 128: three begin with the same 28 tokens.
    lengths = [128] * 4
    shared = SharedTokens([0, 0, 28, 28], [0, 1, 1, 1])
    described = describe_documents(lengths, shared)
    places = described["places"]
    found = []
    filled = with_bounds_alone(described, len(described["own_tokens"]))
    for way, is_copied in [("plain", False), ("plain", None), (CUDNN, False), ("plain", True)]:
        inputs = [*make_inputs([sum(lengths) - 56])[:3]]
        leaves = [each.requires_grad_() for each in inputs]
        # None: as a graph has them
        given: dict[str, Any] = filled if is_copied is None else described
        if is_copied:
            inputs = [each.index_select(2, places) for each in inputs]
            given = describe_documents(lengths)
        output = attend(way, inputs, lengths, **given, sliding_window=window)
        output = output[described["own_tokens"]] if is_copied else output
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        found.append([output, *torch.autograd.grad((output * weights).sum(), leaves)])
    for each in found[:3]:
        torch.testing.assert_close(each, found[3], rtol=1e-4, atol=1e-4)
    assert kernels == ["varlen", "varlen", "varlen" if window else "cudnn", "varlen"]


def test_ranks_of_a_context_group_compute_their_own_heads(kernels):
    inputs = make_inputs([128, 128])
    whole = attend(CUDNN, inputs, [128, 128])
    for rank in range(2):
        # to_heads and to_tokens exchange between ranks; this one has a rank's heads already
        group = SimpleNamespace(
            to_heads=lambda *heads, rank=rank: tuple(each.chunk(2, 1)[rank] for each in heads),
            to_tokens=lambda attended: attended,
        )
        own = attend(CUDNN, inputs, [128, 128], context_group=group)
        torch.testing.assert_close(own, whole.chunk(2, 1)[rank])
    assert kernels == ["cudnn"] * 3


def test_missing_ways_have_a_reason(monkeypatch):
    inputs = [make_inputs([128, 128])]
    cpu = attention_ways.attention_ways(inputs, torch.device("cpu"))
    assert list(cpu.ways) == ["plain"]
    assert cpu.missing == {CUDNN: "not on a CPU", FLASH4: "not on a CPU"}

    card = torch.device("cuda")
    taken: list[bool] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(
        attention_ways,
        "can_use_cudnn_attention",
        lambda given: taken.append(given.enable_gqa) or True,
    )
    found = attention_ways.attention_ways(inputs, card)
    assert [*found.ways] == ["plain", CUDNN] and found.missing == {FLASH4: "capability 8.6"}
    assert taken == [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    uneven = attention_ways.attention_ways([make_inputs([128, 60])], card)
    assert uneven.missing[CUDNN] == "lengths or heads that it is not asked for"
    version = torch.__version__.partition("+")[0]
    assert uneven.missing[FLASH4] == ("not installed" if TAKES_GROUPS else f"torch {version}")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert attention_ways.attention_ways(inputs, card).missing[CUDNN] == "not deterministic"


def test_flash_4_takes_the_place_of_torchs_kernel_while_it_is_tried(kernels, monkeypatch):
    active: list[str | None] = [None]
    seen: list[str | None] = []
    plain = attention_kernels.varlen_attn

    def any_lengths(*arguments, **options):
        seen.append(active[-1])
        return plain(*arguments, **options)

    monkeypatch.setattr(attention_kernels, "varlen_attn", any_lengths)
    monkeypatch.setattr(attention_kernels, "activate_flash_attention_impl", active.append)
    for module in (attention_kernels, attention_ways):
        monkeypatch.setattr(module, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(attention_ways, "restore_flash_attention_impl", lambda: active.append(None))
    for way in ("plain", FLASH4, "plain"):
        attention_ways.attend_and_back(way, make_inputs([100, 28]))
    assert seen == [None, "FA4", None] and active == [None, "FA4", None]
