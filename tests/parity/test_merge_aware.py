"""`--merge_aware`: training with the weights that `merge` writes, against a plain loop that
decodes, adds, rounds and multiplies.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.formats.bitsandbytes import PACKED_STATE
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models
from tests.helpers.reference import batch_loss, encode, load_base, step_plainly
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, train_ok
from tests.loading.test_published import E2M1, SCHEMES, save_compressed

Tensors = dict[str, torch.Tensor]
FORMS = ("nvfp4", "mxfp4", "fp8 rows", "fp8 blocks", "fp8 whole", "nf4", "nf4 single")
STEPS = 5
RUN = {
    "merge_aware": True,
    "lora_rank": 4,
    "lora_alpha": 8,
    "optimizer": "sgd",
    "lr": 0.1,
    "lr_scheduler": "constant",
    "warmup": 0,
    "max_steps": STEPS,
    "num_epochs": STEPS,
    "precision": "fp32",
    "seed": 5,
}


def save_base(models: Models, folder: Path, form: str) -> Path:
    """A tiny model in a format, with all linear layers of its blocks."""
    if form.startswith("nf4"):
        double = str(form == "nf4").lower()
        argv = ["quantize", str(models("llama")), "--out", str(folder), "--double_quant", double]
        assert main(argv) == 0
    else:
        save_compressed(models("llama"), folder, form, ignore=("lm_head",))
    return folder


# --- the formats, each by its definition: (decoded W, round) ---


def _nearest(values: torch.Tensor) -> torch.Tensor:
    return E2M1[(values[..., None] - E2M1).abs().argmin(-1)]


def _of_groups(stored: Tensors, name: str, size: int) -> tuple[torch.Tensor, Callable]:
    """NVFP4 and MXFP4: a group's scale stays unless its values have grown beyond it."""
    codes = stored[f"{name}_packed"]
    values = E2M1[torch.stack([codes % 16, codes // 16], dim=-1).long()].flatten(-2)
    scale = stored[f"{name}_scale"]
    whole = stored.get(f"{name}_global_scale", torch.ones(()))
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    scale = scale.float().view(-1, 1)

    def round_again(changed: torch.Tensor) -> torch.Tensor:
        groups = changed.view(-1, size)
        largest = groups.abs().amax(1, keepdim=True)
        if size == 16:
            new = (whole * (largest / 6)).to(torch.float8_e4m3fn).float()
        else:
            # a largest magnitude from 1.75 * 2**n on counts as 2**(n + 1)
            new = torch.exp2((largest * 8 / 7).log2().floor() - 2)
        factor = torch.maximum(scale, new) / whole
        return (_nearest(groups / factor) * factor).view(changed.shape)

    return (values.view(-1, size) * (scale / whole)).view(values.shape), round_again


def _of_fp8(stored: Tensors, name: str, block: list[int] | None) -> tuple[torch.Tensor, Callable]:
    """FP8: that of a matrix stays, those of rows and blocks are doubled until they are enough."""
    codes = stored[name].float()
    scale = stored[f"{name}_scale"].float()
    rows, columns = block or (1, codes.shape[1])

    def spread(of_blocks: torch.Tensor) -> torch.Tensor:
        if of_blocks.numel() == 1:
            return of_blocks.view(1, 1)
        wide = of_blocks.view(-(-codes.shape[0] // rows), -1).repeat_interleave(rows, 0)
        return wide.repeat_interleave(columns, 1)[: codes.shape[0], : codes.shape[1]]

    def round_again(changed: torch.Tensor) -> torch.Tensor:
        factor = scale.clone().view(-(-codes.shape[0] // rows), -1) if scale.numel() > 1 else scale
        if scale.numel() > 1:
            for row, band in enumerate(changed.split(rows)):
                for column, part in enumerate(band.split(columns, 1)):
                    while part.abs().max() > 448 * (1 + 2**-5) * factor[row, column]:
                        factor[row, column] *= 2
        scaled = (changed / spread(factor)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return scaled.float() * spread(factor)

    return codes * spread(scale), round_again


def _of_nf4(stored: Tensors, name: str) -> tuple[torch.Tensor, Callable]:
    """NF4: every block gets a new absmax; the mean that double quantization subtracts stays."""
    state = json.loads(bytes(stored[f"{name}{PACKED_STATE}nf4"].tolist()))
    shape = state["shape"]
    is_nested = "nested_offset" in state

    def decode(codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
        options = {"blocksize": 64, "quant_type": "nf4"}
        # Rows of whole blocks: bitsandbytes' CPU kernel scales others wrongly.
        values = torch.ops.bitsandbytes.dequantize_4bit(
            codes.view(-1, 1), absmax, *options.values(), [len(absmax), 64], torch.float32
        )
        return values.view(shape)

    def in_bytes(absmax: torch.Tensor) -> torch.Tensor:
        if not is_nested:
            return absmax
        # bitsandbytes' own operator takes a neighbour for some, and other ones on a GPU.
        parts = (absmax - state["nested_offset"]).split(256)
        largest = [part.abs().max() for part in parts]
        near = [
            table[(part[:, None] / most - table).abs().argmin(1)] * most
            for part, most in zip(parts, largest, strict=True)
        ]
        return torch.cat(near) + state["nested_offset"]

    def round_again(changed: torch.Tensor) -> torch.Tensor:
        codes, kept = bnb.quantize_4bit(changed, blocksize=64, quant_type="nf4")
        return decode(codes, in_bytes(kept.absmax))

    absmax = stored[f"{name}.absmax"]
    table = bnb.create_dynamic_map()
    if is_nested:
        nested = stored[f"{name}.nested_absmax"]
        absmax = table[absmax.long()] * nested.repeat_interleave(256)[: len(absmax)]
        absmax = absmax + state["nested_offset"]
    return decode(stored[name], absmax), round_again


def opened(form: str, stored: Tensors, name: str) -> tuple[torch.Tensor, Callable]:
    if form.startswith("nf4"):
        return _of_nf4(stored, name)
    if form.startswith("fp8"):
        block: Any = SCHEMES[form].get("block_structure")
        return _of_fp8(stored, name, block)
    size: Any = SCHEMES[form]["group_size"]
    return _of_groups(stored, name, size)


# --- the plain loop ---


class Rounded(nn.Module):
    """A linear layer whose weight is rounded with the adapter's update, straight through."""

    def __init__(
        self, path: str, weight: torch.Tensor, round_again: Callable, bias: Any = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.round_again = round_again
        out_features, in_features = weight.shape
        start = partial(first_adapter_value, seed=RUN["seed"])
        prefix = f"base_model.model.{path}"
        self.A = nn.Parameter(start(f"{prefix}.lora_A.weight", torch.Size([4, in_features])))
        self.B = nn.Parameter(start(f"{prefix}.lora_B.weight", torch.Size([out_features, 4])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = 2 * self.B @ self.A
        with torch.no_grad():
            rounded = self.round_again(self.weight + update)
        return F.linear(x, update + (rounded - update.detach()), self.bias)


def train_plainly(
    source: Path, folder: Path, form: str, rows: list[dict[str, str]]
) -> tuple[list[float], list[float], Tensors]:
    """Losses, norms, and the adapter by its names in PEFT's file."""
    model = load_base(source, four_bit=False)
    model.requires_grad_(False)
    stored = load_file(folder / "model.safetensors")
    layers: dict[str, Rounded] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in path:
            layers[path] = Rounded(path, *opened(form, stored, f"{path}.weight"))
            model.set_submodule(path, layers[path])
    trained = [parameter for layer in layers.values() for parameter in (layer.A, layer.B)]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    norms = []
    for _ in range(STEPS):
        loss = batch_loss(model, encode(source, rows))
        losses.append(loss.item())
        norms.append(step_plainly(optimizer, loss))
    adapter = {}
    for path, layer in layers.items():
        adapter[f"base_model.model.{path}.lora_A.weight"] = layer.A.detach()
        adapter[f"base_model.model.{path}.lora_B.weight"] = layer.B.detach()
    return losses, norms, adapter


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 rank": (1, {"recompute": "none"}),
    "2 ranks, offloaded": (2, {"use_cpu_offload": True}),
    "2 ranks share rows": (2, {"batch_size": 8, "context_parallel_size": 2}),
}
CASES = [f"{form}, 2 ranks" for form in FORMS] + [
    f"nvfp4, {way}" for way in WAYS if way != "2 ranks"
]


@pytest.mark.parametrize("case", all_slow_but("nvfp4, 2 ranks", CASES))
def test_merge_aware_training_equals_a_plain_loop(case, models, tmp_path):
    form, _, way = case.partition(", ")
    folder = save_base(models, tmp_path / "base", form)
    rows = make_rows(8)
    losses, norms, adapter = train_plainly(models("llama"), folder, form, rows)
    ranks, options = WAYS[way]
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = RUN | {"batch_size": 8 // ranks} | options
    train_ok(ranks, out, model_name=folder, dataset=data, **options)
    assert read_metrics(out) == pytest.approx(losses, rel=1e-6)
    assert read_metrics(out, "grad_norm") == pytest.approx(norms, rel=1e-5)
    saved = load_file(out / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, adapter[name], rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


def evaluated(ranks: int, folder: Path, **options: object) -> float:
    """The loss that `evaluate` prints."""
    argv = ["evaluate", str(folder), "--json", *flags(**options)]
    logs = folder.with_name(f"{folder.name}_logs")
    statuses, output = on_ranks(ranks, main, (argv,), logs)
    assert statuses == [0] * ranks, output[-3000:]
    [loss] = re.findall(r'"loss": ([\d.]+)', output)
    return float(loss)


BF16 = {
    "precision": "bf16",
    "use_rslora": True,
    # The first match counts, and these are not in the order of the alphabet.
    "rank_pattern": "layers.0.*_proj=3,down_proj=6",
    "alpha_pattern": "up_proj=7,k_proj=5",
}
MERGED = [f"{form}, 2 ranks" for form in FORMS] + ["nvfp4, 1 rank", "nf4, 1 rank"]
MERGED += ["nf4, 1 rank, bf16", "fp8 blocks, 2 ranks, bf16"]


@pytest.mark.parametrize("case", all_slow_but("nvfp4, 2 ranks", MERGED))
def test_merge_writes_the_very_weights_that_a_run_evaluated(case, models, tmp_path):
    form, way, *others = case.split(", ")
    ranks = int(way[0])
    base = save_base(models, tmp_path / "base", form)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    held_out = write_rows(tmp_path / "held_out.jsonl", make_rows(6, seed=1))
    out = tmp_path / "out"
    options = RUN | {"batch_size": 2} | (BF16 if others else {})
    batch = {"batch_size": 2, "precision": options["precision"]}
    train_ok(ranks, out, model_name=base, dataset=rows, eval_dataset=held_out, **options)
    first, *_, last = read_metrics(out, "eval_loss")
    assert last != first
    merged = tmp_path / "merged"
    assert main(["merge", str(out), "--out", str(merged)]) == 0
    measure = partial(evaluated, ranks, dataset=held_out, context_length=512, **batch)
    assert measure(merged, train_type="qlora") == last
    assert measure(out) == last
    assert "fsdp-qlora merge" in (out / "README.md").read_text()
    assert "PeftModel" not in (out / "README.md").read_text()
    assert "before the merge" not in (merged / "README.md").read_text()
    before, after = (load_file(path / "model.safetensors") for path in (base, merged))
    forms = [
        {name: (value.shape, value.dtype) for name, value in of.items()} for of in (before, after)
    ]
    assert forms[0] == forms[1]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("_proj" in name for name in changed)


def test_a_base_in_16_bits_is_refused_before_training(models, capsys):
    argv = flags(model_name=models("llama"), merge_aware=True, dataset="alpaca_demo", dry_run=True)
    assert main(["train", *argv]) == 2
    assert "Quantize it first" in " ".join(capsys.readouterr().err.split())
