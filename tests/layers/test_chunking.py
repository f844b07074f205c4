"""Long rows' MLPs in pieces of their tokens: the same values, as many products, and less memory."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fsdp_qlora.model.adapters.lora import LoraLinear
from fsdp_qlora.model.architecture import chunking
from fsdp_qlora.model.architecture.chunking import count_pieces
from fsdp_qlora.model.architecture.fused import fuse_modules, set_save_inputs_only
from fsdp_qlora.model.architecture.gated_mlp import GatedMlp, Mlp, as_own_mlp
from fsdp_qlora.model.architecture.kept import Kept
from fsdp_qlora.model.architecture.rms_norm import FORMS, RmsNorm
from tests.layers.test_lora_product import IN, adapted, assert_near

pytestmark = pytest.mark.quick

# the last of six pieces is shorter
TOKENS = 45
PIECE = 8


@pytest.fixture
def set_piece(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the tokens of a piece."""
    return partial(monkeypatch.setattr, chunking, "PIECE_TOKENS")


class Block(nn.Module):
    """A norm and a gated MLP of adapted 4-bit layers, beside which the input passes."""

    def __init__(self, kind: str = "nf4", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = RmsNorm(
            nn.Parameter(torch.rand(IN) + 0.5, requires_grad=False), next(iter(FORMS)), 1e-6
        )
        names = ("gate", "up", "down")
        layers: dict[str, nn.Module] = {
            name: adapted(kind, dropout=dropout, size=IN) for name in names
        }
        self.mlp = GatedMlp(layers, names, nn.SiLU())
        self.mlp.inner = IN + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


def step(block: nn.Module, x: torch.Tensor, *, checkpointed: bool) -> list[torch.Tensor]:
    """The output and the gradients of the input and the adapters, by backward(), which adds them
    up.
    """
    torch.manual_seed(3)
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    drawn = torch.rand(1)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
    trained = [parameter.grad for parameter in block.parameters() if parameter.requires_grad]
    assert x.grad is not None and all(grad is not None for grad in trained)
    return [y.detach(), drawn, x.grad, *trained]  # type: ignore[list-item]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("autocast", [False, True])
def test_chunking_changes_no_value_gradient_or_dropout_mask(
    checkpointed, dropout, autocast, set_piece
):
    block = Block("16 or 32 bits" if autocast else "nf4", dropout)
    x = torch.randn(3, TOKENS // 3, IN, generator=torch.Generator().manual_seed(2))
    set_piece(PIECE)
    found = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for in_pieces in (False, True):
            block.mlp.inner = IN + in_pieces
            found[in_pieces] = step(block, x, checkpointed=checkpointed)
            with torch.no_grad():
                torch.manual_seed(3)
                assert torch.equal(block(x), found[in_pieces][0])
    assert_near(found[True], found[False], 5e-3 if autocast else 1e-6)


def test_chunking_supports_inputs_without_gradient(set_piece):
    block = Block()
    x = torch.randn(TOKENS, IN)
    y = block(x)
    expected = torch.autograd.grad(y.sum(), block.mlp.up.lora.lora_A.weight)
    set_piece(PIECE)
    y = checkpoint(block, x, use_reentrant=False)
    assert_near([*torch.autograd.grad(y.sum(), block.mlp.up.lora.lora_A.weight)], [*expected])


class Counts(TorchDispatchMode):
    """Counts the multiplications of products, and how often a matrix is decoded, by itself or in a
    product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.decoded = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.decoded += name in ("bitsandbytes::dequantize_4bit", "bitsandbytes::gemm_4bit")
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = args[-2:]
            self.products += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_a_recomputed_block_decodes_weights_for_each_chunk(set_piece):
    x = torch.randn(TOKENS, IN)
    found = []
    for size in (TOKENS, PIECE):
        set_piece(size)
        with Counts() as plain:
            step(Block("16 or 32 bits"), x, checkpointed=True)
        with Counts() as quantized:
            step(Block(), x, checkpointed=True)
        found.append((plain.products, quantized.decoded))
    # Gate, up and down forward; gate and up again; three gradients: for each of six pieces.
    assert found[1][0] == found[0][0] and [count for _, count in found] == [8, 6 * 8]


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", GatedMlp), ("phi3", Mlp), ("starcoder2", Mlp)]
)
def test_mlps_of_all_layouts_are_chunked_and_keep_their_names(model_type, kind, set_piece):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = CONFIG_MAPPING[model_type](
        **sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    names = [name for name, _ in model.named_parameters()]
    ids = torch.arange(24)[None]
    expected = model(ids).logits
    fuse_modules(model)
    [mlp] = [module for module in model.modules() if isinstance(module, Mlp)]
    assert (
        type(mlp) is kind
        and mlp.inner >= 48
        and [name for name, _ in model.named_parameters()] == names
    )
    set_piece(PIECE)
    assert_near([model(ids).logits], [expected], 2e-6)


class Other(nn.Module):
    """An MLP that may look at the token before."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x) + self.up(x.roll(self.shift, dims=1))))
        return y


def test_modules_that_mix_tokens_or_have_other_weights_are_no_mlps():
    assert (
        as_own_mlp(Other(0))
        and not as_own_mlp(Other(1))
        and not as_own_mlp(nn.TransformerEncoderLayer(8, 2, 24))
    )
    normed = Other(0)
    normed.norm = nn.LayerNorm(8)
    assert not as_own_mlp(normed)


def test_chunking_is_used_for_long_rows_and_wide_mlps():
    sizes = {"hidden": 4096, "inner": 12288}
    assert [count_pieces(tokens, **sizes) for tokens in (2048, 16383, 16384, 78475)] == [
        1,
        1,
        2,
        10,
    ]
    assert count_pieces(78475, hidden=2048, inner=768) == 1


def test_blocks_that_keep_activations_are_not_chunked(set_piece):
    set_piece(PIECE)
    block = Block()
    calls = Counter[str]()
    assert isinstance(block.mlp.down, LoraLinear)
    block.mlp.down.register_forward_hook(lambda *_: calls.update(["down"]))
    for keeps, number in ((True, 1), (False, 6)):
        set_save_inputs_only(block, keeps)
        calls.clear()
        block(torch.randn(TOKENS, IN))
        assert calls["down"] == number


def test_what_hooks_refer_to_is_freed_with_the_tensors_that_are_taken():
    class Held:
        """Stands for the frame of a checkpoint, which refers to what it computes with."""

    held = Held()
    alive = weakref.ref(held)

    def unpack(packed: torch.Tensor, held: Held = held) -> torch.Tensor:
        return packed

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        kept = Kept(torch.ones(3))
    del held, unpack
    assert alive() is not None and kept.take()[0].tolist() == [1, 1, 1]
    assert alive() is None
