"""Whole runs with every quantizer: against the library's own layers, PEFT and plain torch; and what is saved."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fsdp_qlora.adapters.first_values import first_adapter_value
from tests.reference import encode, load_adapter, load_base, train_lora
from tests.tiny import PROBE, make_rows, read_metrics, train_ok, write_rows

Models = Callable[..., Path]
TYPES: dict[str, dict[str, Any]] = {
    "qlora, llama": {"train_type": "qlora"},
    "qlora": {"train_type": "qlora"},
    "hqq 8": {"train_type": "hqq_lora", "n_bits": 8},
    "hqq 4": {"train_type": "hqq_lora"},
    "hqq 3": {"train_type": "hqq_lora", "n_bits": 3, "group_size": 32},
    "hqq 2": {"train_type": "hqq_lora", "n_bits": 2},
    "int8": {"train_type": "int8_lora", "int8_threshold": 0},
    "int8 with outliers": {"train_type": "int8_lora", "int8_threshold": 2.5},
}


class _TokenByToken(bnb.nn.Linear8bitLt):
    """bitsandbytes' own layer, given each token alone: what a token gets there depends on its neighbours."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        return torch.cat([super(_TokenByToken, self).forward(token) for token in tokens.split(1)]).view(
            *x.shape[:-1], -1
        )


def _int8(linear: nn.Linear, threshold: float) -> nn.Module:
    layer = (_TokenByToken if threshold else bnb.nn.Linear8bitLt)(
        linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, threshold=threshold
    )
    layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return layer.to("cpu")


def _hqq(linear: nn.Linear, n_bits: int, group_size: int) -> nn.Module:
    """HQQLinear whose solver takes all its iterations and whose statistics are fp16, as its default is."""
    hqq = importlib.import_module("hqq.core.quantize")
    settings = hqq.BaseQuantizeConfig(nbits=n_bits, group_size=group_size, axis=1)
    layer = hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
    for name in ("scale", "zero"):
        layer.meta[name] = layer.meta[name].half().float()
    return layer


def library_base(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model in fp32 with the library's own quantized layers in its blocks."""
    model = load_base(folder, four_bit=options["train_type"] == "qlora")
    if options["train_type"] == "qlora":
        return model
    if options["train_type"] == "hqq_lora":
        solver = importlib.import_module("hqq.core.optimize").optimize_weights_proximal_v2
        settings = {"lp_norm": 0.7, "beta": 10.0, "kappa": 1.01, "iters": 20, "tol": 0.0}
        settings |= {"early_stop": False, "scale_gridsearch": False}
        quantizer = importlib.import_module("hqq.core.quantize").Quantizer
        monkeypatch.setattr(quantizer, "optimize_weights", functools.partial(solver, opt_params=settings))
        replace = functools.partial(_hqq, n_bits=options.get("n_bits", 4), group_size=options.get("group_size", 64))
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
    """A run on two ranks in fp32, with four rows a batch: its losses, and its model's logits of PROBE."""
    common = {"model_name": folder, "dataset": write_rows(out.with_name("rows.jsonl"), rows), "batch_size": 2}
    common |= {"lr_scheduler": "constant", "warmup_steps": 0, "precision": "fp32", "seed": 5, "num_epochs": 10}
    output = train_ok(2, out, logits_file=out.with_suffix(".logits"), **{**common, "lora_rank": 4, **options})
    assert "Self-test" in output
    return read_metrics(out), load_file(out.with_suffix(".logits"))["logits"]


@pytest.mark.parametrize("kind", TYPES)
def test_losses_are_those_of_peft_on_the_librarys_own_layers(
    kind: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TYPES[kind]
    # Token by token is slow.
    num_rows, steps = (2, 3) if options.get("int8_threshold") else (4, 10)
    folder = models("llama" if "llama" in kind else "qwen2")
    rows, size = make_rows(num_rows, seed=3), {"batch_size": num_rows // 2, "num_epochs": steps}
    losses, trained = train_ours(folder, rows, tmp_path / "out", lora_alpha=8, lr=1e-3, **size, **options)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    first_values = {name: first_adapter_value(name, shape, seed=5) for name, shape in shapes.items()}
    base = library_base(folder, options, monkeypatch)
    expected = train_lora(base, first_values, encode(folder, rows), steps=steps, lr=1e-3, rank=4, alpha=8)
    # The same numbers up to the order of fp32 sums. int8 rounds activations, so a last bit may move one by 1/127 of
    # its token's largest: first values that differ by 1e-7 alone move the tenth loss of the reference by 4e-4.
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-3 if kind == "int8" else 1e-4)
    assert expected[-1] < expected[0] - 0.05

    # What was saved gives, loaded by PEFT on the library's own layers, the trained model's logits.
    base = library_base(folder, options, monkeypatch)
    with torch.no_grad():
        before = base(input_ids=PROBE).logits
        difference = (load_adapter(base, tmp_path / "out")(input_ids=PROBE).logits - trained).abs()
    assert difference.max() < 1e-4
    assert (before - trained).abs().max() > 1e-2
