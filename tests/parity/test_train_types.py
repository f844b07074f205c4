"""Whole runs with every quantizer and kind of adapter, against PEFT on the library's own layers;
and what is saved.
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes as bnb
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE
from tests.helpers.reference import encode, load_adapter, load_base, load_decoded_base, train_peft
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok


class _TokenByToken(bnb.nn.Linear8bitLt):
    """bitsandbytes' own layer, given each token alone: what a token gets there depends on its
    neighbours.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        return torch.cat(
            [super(_TokenByToken, self).forward(token) for token in tokens.split(1)]
        ).view(*x.shape[:-1], -1)


def _int8(linear: nn.Linear, threshold: float) -> nn.Module:
    layer = (_TokenByToken if threshold else bnb.nn.Linear8bitLt)(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        has_fp16_weights=False,
        threshold=threshold,
    )
    layer.weight = bnb.nn.Int8Params(
        linear.weight.data, requires_grad=False, has_fp16_weights=False
    )
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return layer.to("cpu")


def _hqq(linear: nn.Linear, n_bits: int, group_size: int) -> nn.Module:
    """HQQLinear whose solver takes all its iterations and whose statistics are fp16, as its default
    is.
    """
    hqq = importlib.import_module("hqq.core.quantize")
    settings = hqq.BaseQuantizeConfig(nbits=n_bits, group_size=group_size, axis=1)
    layer = hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
    for name in ("scale", "zero"):
        layer.meta[name] = layer.meta[name].half().float()
    return layer


def library_base(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> nn.Module:
    """The model in fp32 with the library's own quantized layers in its blocks."""
    model = load_base(folder, four_bit=options["train_type"] == "qlora")
    if options["train_type"] == "qlora":
        return model
    if options["train_type"] == "hqq_lora":
        solver = importlib.import_module("hqq.core.optimize").optimize_weights_proximal_v2
        settings = {"lp_norm": 0.7, "beta": 10.0, "kappa": 1.01, "iters": 20, "tol": 0.0}
        settings |= {"early_stop": False, "scale_gridsearch": False}
        quantizer = importlib.import_module("hqq.core.quantize").Quantizer
        monkeypatch.setattr(
            quantizer, "optimize_weights", functools.partial(solver, opt_params=settings)
        )
        replace = functools.partial(
            _hqq, n_bits=options.get("n_bits", 4), group_size=options.get("group_size", 64)
        )
    else:
        replace = functools.partial(_int8, threshold=options.get("int8_threshold", 6.0))
    for path, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            model.model.layers.set_submodule(path, replace(module))
    # bitsandbytes rounds activations outside of its training mode only, on the CPU.
    return model.eval()


def train_ours(
    folder: Path, rows: list[dict[str, str]], out: Path, **options: object
) -> tuple[list[float], torch.Tensor]:
    """A run on two ranks in fp32, with four rows a batch: its losses, and its model's logits of
    PROBE.
    """
    common = {
        "model_name": folder,
        "dataset": write_rows(out.with_name("rows.jsonl"), rows),
        "batch_size": 2,
    }
    common |= {
        "lr_scheduler": "constant",
        "warmup": 0,
        "precision": "fp32",
        "seed": 5,
        "num_epochs": 10,
    }
    output = train_ok(
        2, out, logits_file=out.with_suffix(".logits"), **{**common, "lora_rank": 4, **options}
    )
    assert "Proof: rank 0 has" in output
    return read_metrics(out), load_file(out.with_suffix(".logits"))["logits"]


def plain_base(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return load_base(folder, four_bit=False)


def decoded_base(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> nn.Module:
    """The model in fp32, its linear layers rounded to what the library's quantized layers keep of
    them.
    """
    if not options["train_type"].startswith("hqq"):
        return load_decoded_base(folder)
    model = library_base(folder, {"train_type": "hqq_lora"}, monkeypatch)
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "HQQLinear":
            linear = nn.Linear(
                module.in_features, module.out_features, bias=module.bias is not None
            )
            linear.weight.data = module.dequantize().float()
            if module.bias is not None:
                linear.bias.data = module.bias.data
            model.set_submodule(path, linear)
    return model


class Row(NamedTuple):
    """Options of a run, and those of PEFT's LoraConfig that are not rank 4 and alpha 6."""

    options: dict[str, Any]
    peft: dict[str, Any] = {}  # noqa: RUF012
    base: Callable[..., nn.Module] = library_base
    model: str = "qwen2"
    lr: float = 1e-3
    tolerance: float = 1e-4  # of losses: the order of fp32 sums, which ten steps of Adam amplify


DORA = {"use_dora": True}
REGEX = r".*\.(self_attn\.[qkvo]_proj|mlp\.down_proj)"
VARIANTS = {
    "use_rslora": True,
    "lora_target_modules": REGEX,
    "loraplus_lr_ratio": 4,
    "alpha_pattern": "q_proj=3.5",
}
# int8 rounds activations, so a last bit may move one by 1/127 of its token's largest: first values
# that differ by 1e-7 alone move the tenth loss of the reference by 4e-4.
ROWS: dict[str, Row] = {
    "qlora, llama": Row({"train_type": "qlora"}, model="llama"),
    "qlora": Row({"train_type": "qlora"}),
    # Layers that are computed together have biases, other ranks, or no adapter.
    "qlora, ranks": Row(
        {"train_type": "qlora", "rank_pattern": "q_proj=2,v_proj=7,up_proj=6"},
        {"rank_pattern": {"q_proj": 2, "v_proj": 7, "up_proj": 6}},
    ),
    "qlora, some layers": Row(
        {"train_type": "qlora", "lora_target_modules": "q_proj,v_proj,down_proj"},
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    "hqq 8": Row({"train_type": "hqq_lora", "n_bits": 8}),
    "hqq 4": Row({"train_type": "hqq_lora"}),
    "hqq 3": Row({"train_type": "hqq_lora", "n_bits": 3, "group_size": 32}),
    "hqq 2": Row({"train_type": "hqq_lora", "n_bits": 2}),
    "int8": Row({"train_type": "int8_lora", "int8_threshold": 0}, tolerance=1e-3),
    # Token by token is slow.
    "int8 with outliers": Row(
        {"train_type": "int8_lora", "int8_threshold": 2.5, "num_epochs": 3, "batch_size": 1}
    ),
    "bnb_dora": Row({"train_type": "bnb_dora"}, DORA, decoded_base, lr=1e-2),
    "hqq_dora": Row({"train_type": "hqq_dora"}, DORA, decoded_base, lr=1e-2),
    "dora": Row({"train_type": "dora"}, DORA, plain_base, "llama", lr=1e-2),
    "rsLoRA, patterns, LoRA+": Row(
        {"train_type": "lora", "rank_pattern": "down_proj=6,layers.0.*_proj=2", **VARIANTS},
        {
            "target_modules": REGEX,
            "use_rslora": True,
            "rank_pattern": {"down_proj": 6, "layers.0.*_proj": 2},
            "alpha_pattern": {"q_proj": 3.5},
        },
        plain_base,
        "llama",
        lr=1e-2,
    ),
    "embeddings and head in full": Row(
        {
            "train_type": "qlora",
            "modules_to_save": "embed_tokens,lm_head",
            "batch_size": 1,
            "gradient_accumulation_steps": 2,
        },
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        decoded_base,
        "llama",
        lr=1e-2,
    ),
}
# Those whose quantizer and adapter are in others.
ALIKE = ("qlora, llama", "hqq 8", "hqq 2", "hqq_dora")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ALIKE)) for name in ROWS]
)
def test_losses_are_those_of_peft_and_what_is_saved_is_what_was_trained(
    name, models, tmp_path, monkeypatch
):
    row = ROWS[name]
    folder = models(row.model)
    steps = row.options.get("num_epochs", 10)
    rows = make_rows(2 if steps < 10 else 4, seed=3)
    losses, logits = train_ours(
        folder, rows, tmp_path / "out", lora_alpha=6, lr=row.lr, **row.options
    )
    base = row.base(folder, row.options, monkeypatch)
    with torch.no_grad():
        assert (base(input_ids=PROBE).logits - logits).abs().max() > 1e-2
    expected, trained = train_peft(
        base,
        encode(folder, rows),
        functools.partial(first_adapter_value, seed=5),
        steps=steps,
        lr=row.lr,
        lr_ratio=row.options.get("loraplus_lr_ratio", 1.0),
        **{"r": 4, "lora_alpha": 6, **row.peft},
    )
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=row.tolerance)
    assert expected[-1] < expected[0] - 0.05
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == get_peft_model_state_dict(trained).keys()
    # What was saved gives, loaded by PEFT on the library's own layers, the trained model's logits.
    base = row.base(folder, row.options, monkeypatch)
    with torch.no_grad():
        assert (
            load_adapter(base, tmp_path / "out")(input_ids=PROBE).logits - logits
        ).abs().max() < 1e-4
