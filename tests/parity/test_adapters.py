"""Adapter kinds, their variants and first values, against PEFT's own."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.model.adapters.dora import DoraLinear, row_norms
from fsdp_qlora.model.adapters.insert import select_targets
from fsdp_qlora.model.adapters.lora import Dropout
from fsdp_qlora.run.train import run
from fsdp_qlora.utils.errors import UserError
from tests.helpers.models import PROBE
from tests.helpers.reference import load_adapter, load_base, load_decoded_base, peft_model
from tests.helpers.rows import make_rows
from tests.helpers.run import flags
from tests.parity.test_train_types import train_ours

LR = 1e-2


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=PROBE).logits
    return logits


# --- first values
# --------------------------------------------------------------------------------------


def test_loftq_starts_with_less_error_from_bitsandbytes_base(models, tmp_path):
    folder = models()
    logits = {}
    for train_type, init in [("lora", "true"), ("qlora", "true"), ("qlora", "loftq")]:
        options = {
            "train_type": train_type,
            "init_lora_weights": init,
            "lora_rank": 32,
            "lora_alpha": 64,
        }
        out = tmp_path / f"{train_type}_{init}"
        _, logits[train_type, init] = train_ours(
            folder, make_rows(4), out, max_steps=1, lr=1e-9, **options
        )
    exact = logits["lora", "true"]
    assert (logits["qlora", "loftq"] - exact).norm() < 0.7 * (
        logits["qlora", "true"] - exact
    ).norm()
    saved = load_file(tmp_path / "qlora_loftq" / "adapter_model.safetensors")
    base = load_decoded_base(folder)
    original = load_base(folder, four_bit=False)
    for name, lora_A in saved.items():
        if "lora_A" in name:
            lora_B = saved[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            lost = (
                original.get_submodule(weight).weight - base.get_submodule(weight).weight
            ).detach()
            left = torch.linalg.svdvals(lost)[32:].square().sum().sqrt()  # Eckart and Young's best
            assert (lost - 2 * lora_B @ lora_A).norm() == pytest.approx(
                left.item(), rel=1e-3, abs=1e-5
            )
    reloaded = load_adapter(base, tmp_path / "qlora_loftq")
    assert (logits_of(reloaded) - logits["qlora", "loftq"]).abs().max() < 1e-4


# --- variants
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "name", "message"),
    [
        ({"tie_word_embeddings": True}, "lm_head", r"modules_to_save lm_head: .* share one tensor"),
        (
            {},
            "norm",
            r"modules_to_save norm: .* embeddings and head .* model.embed_tokens, lm_head",
        ),
    ],
)
def test_modules_that_cannot_be_saved_in_full_are_refused(
    overrides, name, message, models, tmp_path
):
    argv = flags(
        model_name=models("llama", **overrides),
        dry_run=True,
        output_dir=tmp_path / "out",
        dataset="dummy",
        modules_to_save=name,
    )
    with pytest.raises(UserError, match=message):
        run(parse_train_config(argv))


def peft_layer_and_ours(*, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """One adapted linear layer with a bias, by PEFT and by us, with equal weights."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 16, dtype=dtype).requires_grad_(False)
    peft_layer = peft_model(
        nn.Sequential(linear),
        target_modules=["0"],
        task_type=None,
        r=4,
        lora_alpha=6,
        lora_dropout=dropout,
        use_dora=True,
    ).base_model.model[0]
    nn.init.normal_(peft_layer.lora_B["default"].weight)
    ours = DoraLinear(linear, rank=4, scaling=6 / 4, dropout=dropout)
    ours.lora.to_empty(device="cpu")
    with torch.no_grad():
        ours.lora.lora_A.weight.copy_(peft_layer.lora_A["default"].weight)
        ours.lora.lora_B.weight.copy_(peft_layer.lora_B["default"].weight)
        ours.lora.magnitude.weight.copy_(peft_layer.lora_magnitude_vector["default"].weight * 1.3)
        peft_layer.lora_magnitude_vector["default"].weight.mul_(1.3)
        ours.lora.magnitude.row_squares.copy_(ours.base_row_squares())
    return peft_layer, ours


class OurDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Dropout.draw(0.5)(x)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_dora_layer_has_the_output_and_the_gradients_of_pefts(dropout, checkpointed):
    peft_layer, ours = peft_layer_and_ours(dropout=dropout, dtype=torch.float32)
    if dropout:
        peft_layer.lora_dropout["default"] = OurDropout()
    x = torch.randn(2, 50, 24)
    grad = torch.randn(2, 50, 16)
    results = []
    for layer in (peft_layer, ours):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(7)  # the same elements are dropped
        output = checkpoint(layer, inputs, use_reentrant=False) if checkpointed else layer(inputs)
        output.backward(grad)
        results.append([output, inputs.grad])
    for name in ("lora_A", "lora_B", "lora_magnitude_vector"):
        results[0].append(getattr(peft_layer, name)["default"].weight.grad)
    for part in (ours.lora.lora_A, ours.lora.lora_B, ours.lora.magnitude):
        results[1].append(part.weight.grad)
    for theirs, own in zip(*results, strict=True):
        assert torch.allclose(own, theirs, rtol=1e-5, atol=1e-5)


def test_a_small_change_of_the_magnitude_is_seen_in_bf16():
    _, layer = peft_layer_and_ours(dropout=0.0, dtype=torch.bfloat16)
    layer.lora.lora_A.bfloat16(), layer.lora.lora_B.bfloat16()
    x = torch.randn(512, 24, dtype=torch.bfloat16)
    before = layer(x)
    with torch.no_grad():
        layer.lora.magnitude.weight.mul_(1 + 2**-10)  # a quarter of what bf16 tells from 1
    assert before.dtype == torch.bfloat16 and (layer(x) != before).float().mean() > 0.1


def test_the_norm_of_a_dora_layer_is_taken_in_float32_under_autocast():
    _, layer = peft_layer_and_ours(dropout=0.0, dtype=torch.float32)
    product = layer.lora.lora_A.weight @ layer.base_layer.weight.T
    lora = layer.lora
    operands = (
        product,
        lora.lora_A.weight,
        lora.lora_B.weight,
        lora.magnitude.row_squares,
        lora.scaling,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = row_norms(*operands)
    assert torch.equal(under_autocast, row_norms(*operands))
    changed = (
        layer.base_layer.weight
        + layer.lora.scaling * layer.lora.lora_B.weight @ layer.lora.lora_A.weight
    )
    norm = torch.linalg.vector_norm(changed, dim=1)
    assert torch.allclose(under_autocast, norm, rtol=1e-5)


# --- bad input
# -----------------------------------------------------------------------------------------


# A word of the refusal -> options.
EXCLUSIVE: dict[str, dict[str, object]] = {
    "leave --init_lora_weights at true": {"train_type": "bnb_dora", "init_lora_weights": "loftq"},
    "for linear layers only": {
        "train_type": "bnb_dora",
        "lora_target_parameters": ("mlp.experts.down_proj",),
    },
    "--train_type lora does not quantize": {"init_lora_weights": "loftq", "train_type": "lora"},
    "is for linear layers": {
        "init_lora_weights": "loftq",
        "lora_target_parameters": ("experts.down_proj",),
    },
    "--use_rslora, --rank_pattern": {
        "use_rslora": True,
        "rank_pattern": ("q_proj=2",),
        "train_type": "full",
    },
    "--rank_pattern needs name=number with a whole number": {"rank_pattern": ("q_proj",)},
    "but has 'q_proj=0'": {"rank_pattern": ("q_proj=0",)},
    "--alpha_pattern needs name=number": {"alpha_pattern": ("q_proj=nan",)},
    "is not a valid regular expression": {"alpha_pattern": ("q_(proj=2",)},
    "all-linear cannot be combined": {"lora_target_modules": ("all-linear", "q_proj")},
    "give one regular expression and nothing else": {"lora_target_modules": (".*q_proj", "v_proj")},
    "nor a valid regular expression": {"lora_target_modules": ("q_(proj",)},
}


@pytest.mark.parametrize("message", EXCLUSIVE)
def test_combinations_that_exclude_each_other_are_refused(message):
    (error,) = check(TrainConfig(**EXCLUSIVE[message]))
    assert message in error


# What the refusal says of a model -> options.
WITHOUT_EFFECT: dict[str, dict[str, object]] = {
    r"the regular expression .* matches no linear layer": {"lora_target_modules": r".*\.x_proj"},
    r"rank_pattern: x_proj has no effect: it matches no layer with an adapter": {
        "rank_pattern": "x_proj=3"
    },
    r"alpha_pattern: q_proj has no effect: .* that an earlier pattern matches": {
        "alpha_pattern": ".*=3,q_proj=4"
    },
    r"rank for .*k_proj.* is 40, and its shape allows at most 32": {
        "lora_rank": 40,
        "init_lora_weights": "loftq",
    },
}


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_names_that_match_nothing_are_refused_before_loading(message, models, tmp_path):
    common = {"model_name": models(), "dataset": "dummy", "output_dir": tmp_path / "out"}
    argv = flags(dry_run=True, **common, **WITHOUT_EFFECT[message])
    with pytest.raises(UserError, match=message):
        run(parse_train_config(argv))


def test_target_names_are_matched_as_peft_does_and_unknown_ones_are_named():
    linears = [
        "model.layers.0.attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.attn.q_proj",
    ]
    assert select_targets(linears, ["all"], "llama") == linears
    assert select_targets(linears, ["q_proj"], "llama") == [linears[0], linears[2]]
    assert select_targets(linears, ["layers.1.attn.q_proj"], "llama") == [linears[2]]
    with pytest.raises(UserError, match=r"named qproj.*q_proj, up_proj"):
        select_targets(linears, ["q_proj", "qproj"], "llama")
