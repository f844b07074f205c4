"""`--merge_aware` with adapters on experts: training with the weights that `merge` writes, against
a plain loop that decodes, adds, rounds and multiplies in the layout of the files.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Mxfp4Config

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, Models
from tests.helpers.reference import batch_loss, encode, load_base, step_plainly
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import all_slow_but, flags, on_ranks, train_ok
from tests.loading.test_prequantized import FP8_FORMS, save_fp8, save_mxfp4, set_config
from tests.loading.test_published import save_compressed, save_experts_in_nvfp4
from tests.parity.test_experts import FAMILIES, train_padded
from tests.parity.test_merge_aware import (
    RUN,
    STEPS,
    Rounded,
    Tensors,
    _of_fp8,
    _of_groups,
    _of_nf4,
    evaluated,
)

NAMES = ("gate_up_proj", "down_proj")
EXPERTS = {"lora_target_parameters": "experts.gate_up_proj,experts.down_proj"}
FORMS = ("gpt_oss", "nvfp4", "fp8 blocks", "fp8 rows", "fp8 whole", "nf4", "nf4 gpt_oss")


def family_of(form: str) -> str:
    return "gpt_oss" if "gpt_oss" in form else "qwen3_moe"


def save_base(models: Models, folder: Path, form: str) -> Path:
    """A tiny mixture in a format, published or, in NF4, quantized by this program."""
    family = family_of(form)
    source = models(family, **FAMILIES[family])
    if form == "gpt_oss":
        save_mxfp4(source, folder)
    elif form == "nvfp4":
        save_experts_in_nvfp4(source, folder)
    elif form.startswith("fp8"):
        (_, scales) = form.split()
        save_fp8(source, folder, scales)
        if scales != "blocks":
            schemes = {"rows": "fbgemm_fp8", "whole": "fp8"}
            about = {"quant_method": schemes[scales], "activation_scheme": "static"}
            set_config(folder, quantization_config=about)
    else:
        assert main(["quantize", str(source), "--out", str(folder)]) == 0
    return folder


def options_of(form: str) -> dict[str, Any]:
    """gpt_oss's files have experts alone in MXFP4."""
    if form != "gpt_oss":
        return EXPERTS
    return EXPERTS | {"lora_target_modules": "none", "allow_unquantized": True}


def opened(form: str, stored: Tensors, name: str) -> tuple[torch.Tensor, Callable]:
    """A matrix of the files, or several in one tensor: (decoded W, round)."""
    if form == "gpt_oss":
        of_name = {f"{name}_packed": stored[f"{name}_blocks"].flatten(-2)}
        of_name[f"{name}_scale"] = stored[f"{name}_scales"]
        return _of_groups(of_name, name, 32)
    if form == "nvfp4":
        return _of_groups(stored, name, 16)
    if form.startswith("nf4"):
        return _of_nf4(stored, name)
    block = FP8_FORMS[form.split()[1]]
    scale = stored[f"{name}_scale_inv" if block else f"{name}_scale"]
    return _of_fp8({name: stored[name], f"{name}_scale": scale}, name, block)


def opened_experts(form: str, stored: Tensors, path: str) -> tuple[torch.Tensor, Callable]:
    """All experts' matrices of a parameter [E, ..], in the layout of the files."""
    if form == "gpt_oss" or form.startswith("nf4"):
        return opened(form, stored, path)
    (module, _, name) = path.rpartition(".")
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    matrices = [
        [opened(form, stored, f"{module}.{expert}.{part}.weight") for part in parts]
        for expert in range(4)
    ]

    def round_again(changed: torch.Tensor) -> torch.Tensor:
        rounded = []
        for values, opened_parts in zip(changed, matrices, strict=True):
            pieces = values.chunk(len(parts))
            pairs = zip(pieces, opened_parts, strict=True)
            rounded.append(torch.cat([part[1](piece) for piece, part in pairs]))
        return torch.stack(rounded)

    weights = [torch.cat([weight for weight, _ in parts_of]) for parts_of in matrices]
    return torch.stack(weights), round_again


# --- the plain loop ---


class RoundedParameter(nn.Module):
    """Experts whose weights are rounded with the adapter's update, straight through.

    is_in_out: whether the parameter and its update are [E, in, out]. swaps: whether the files have
    the transposes of the parameter's matrices.
    """

    def __init__(self, form: str, stored: Tensors, path: str, peft_path: str) -> None:
        super().__init__()
        self.weight, self.round_again = opened_experts(form, stored, path)
        self.is_in_out = family_of(form) == "gpt_oss"
        self.swaps = form == "gpt_oss"
        weight = self.weight.mT if self.swaps else self.weight
        (num_experts, rows, columns) = weight.shape
        (out_features, in_features) = (columns, rows) if self.is_in_out else (rows, columns)
        start = partial(first_adapter_value, seed=RUN["seed"])
        shape_of_A = torch.Size([4 * num_experts, in_features])
        shape_of_B = torch.Size([out_features, 4 * num_experts])
        self.A = nn.Parameter(start(f"{peft_path}.lora_A.weight", shape_of_A))
        self.B = nn.Parameter(start(f"{peft_path}.lora_B.weight", shape_of_B))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        num_experts = len(self.weight)
        lora_A = self.A.view(num_experts, 4, -1)
        lora_B = self.B.view(-1, 4, num_experts)
        update = 2 * torch.einsum("ore,eri->eoi", lora_B, lora_A)
        # in the layout of the files for the rounding
        upright = self.is_in_out == self.swaps
        stored_update = update if upright else update.mT
        with torch.no_grad():
            rounded = self.round_again((self.weight + stored_update).contiguous())
        result = stored_update + (rounded - stored_update.detach())
        return result.mT if self.swaps else result


def plain_model(source: Path, stored: Tensors, form: str) -> tuple[nn.Module, dict[str, Any]]:
    """transformers' model with rounded layers, and these layers by their names in PEFT's file."""
    model = load_base(source, four_bit=False)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name in stored and stored[name].dtype in (torch.bfloat16, torch.float32):
            parameter.copy_(stored[name])
    layers: dict[str, Any] = {}
    for path, module in list(model.named_modules()):
        if path.endswith(".experts"):
            for name, inside in zip(NAMES, (".base_layer", ""), strict=True):
                peft_path = f"base_model.model.{path}{inside}"
                rounded = RoundedParameter(form, stored, f"{path}.{name}", peft_path)
                layers[peft_path] = rounded
                parametrize.register_parametrization(module, name, rounded)
        elif isinstance(module, nn.Linear) and path.endswith("_proj") and form != "gpt_oss":
            layer = Rounded(path, *opened(form, stored, f"{path}.weight"), module.bias)
            layers[f"base_model.model.{path}"] = layer
            model.set_submodule(path, layer)
    return model, layers


def train_plainly(
    source: Path, folder: Path, form: str, rows: list[dict[str, str]]
) -> tuple[list[float], list[float], Tensors]:
    """Losses, norms, and the adapter by its names in PEFT's file."""
    with torch.no_grad():
        (model, layers) = plain_model(source, load_file(folder / "model.safetensors"), form)
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
        adapter[f"{path}.lora_A.weight"] = layer.A.detach()
        adapter[f"{path}.lora_B.weight"] = layer.B.detach()
    return losses, norms, adapter


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "1 rank": (1, {"recompute": "none"}),
    "2 ranks, offloaded": (2, {"use_cpu_offload": True, "recompute": "all"}),
    "2 ranks, padded": (2, {"verbose": True}),
}
CASES = [f"{form}, 2 ranks" for form in FORMS] + [
    f"gpt_oss, {way}" for way in WAYS if way != "2 ranks"
]


@pytest.mark.parametrize("case", all_slow_but("gpt_oss, 2 ranks", CASES))
def test_merge_aware_training_of_experts_equals_a_plain_loop(case, models, tmp_path):
    form, _, way = case.partition(", ")
    family = family_of(form)
    folder = save_base(models, tmp_path / "base", form)
    rows = make_rows(8)
    source = models(family, **FAMILIES[family])
    losses, norms, adapter = train_plainly(source, folder, form, rows)
    ranks, options = WAYS[way]
    options = RUN | options_of(form) | {"batch_size": 8 // ranks} | options
    options |= {"model_name": folder, "dataset": write_rows(tmp_path / "rows.jsonl", rows)}
    out = tmp_path / "out"
    if "padded" in way:
        usual = {"output_dir": out, "log_to": "stdout", "context_length": 512, "quant_cache": "off"}
        argv = flags(**usual, **options)
        statuses, output = on_ranks(ranks, train_padded, (argv,), tmp_path / "logs")
        assert statuses == [0] * ranks and "rows of padding for" in output, output[-4000:]
    else:
        train_ok(ranks, out, **options)
    assert read_metrics(out) == pytest.approx(losses, rel=1e-6)
    assert read_metrics(out, "grad_norm") == pytest.approx(norms, rel=1e-5)
    saved = load_file(out / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, adapter[name], rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


BF16 = {"precision": "bf16", "use_rslora": True}
MERGED = [f"{form}, 2 ranks" for form in FORMS] + ["gpt_oss, 1 rank", "nf4, 1 rank"]
MERGED += ["nf4 gpt_oss, 1 rank, bf16", "nvfp4, 2 ranks, bf16"]


@pytest.mark.parametrize("case", all_slow_but("gpt_oss, 2 ranks", MERGED))
def test_merge_writes_the_very_experts_that_a_run_evaluated(case, models, tmp_path, capsys):
    form, way, *others = case.split(", ")
    ranks = int(way[0])
    base = save_base(models, tmp_path / "base", form)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    held_out = write_rows(tmp_path / "held_out.jsonl", make_rows(6, seed=1))
    out = tmp_path / "out"
    logits_file = tmp_path / "logits.safetensors"
    options = RUN | {"batch_size": 2} | options_of(form) | (BF16 if others else {})
    common = {"model_name": base, "dataset": rows, "eval_dataset": held_out}
    train_ok(ranks, out, logits_file=logits_file, **common, **options)
    first, *_, last = read_metrics(out, "eval_loss")
    assert last != first
    merged = tmp_path / "merged"
    assert main(["merge", str(out), "--out", str(merged)]) == 0
    batch = {"batch_size": 2, "precision": options["precision"], "allow_unquantized": True}
    measure = partial(evaluated, ranks, dataset=held_out, context_length=512, **batch)
    assert measure(merged, train_type="qlora") == last
    assert measure(out) == last
    before, after = (load_file(path / "model.safetensors") for path in (base, merged))
    forms = [
        {name: (value.shape, value.dtype) for name, value in of.items()} for of in (before, after)
    ]
    assert forms[0] == forms[1]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("_proj" in name for name in changed)
    assert {name.split(".")[2] for name in changed if ".experts." in name} == {"0", "1"}
    capsys.readouterr()
    answers = []
    for folder, kind in ((out, {}), (merged, {"train_type": "qlora"})):
        argv = flags(max_new_tokens=8, precision=options["precision"], allow_unquantized=True)
        argv += flags(**kind)
        assert main(["generate", str(folder), "--prompt", "Name a colour.", *argv]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    if form == "gpt_oss":
        kind = Mxfp4Config(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            merged, dtype=torch.float32, quantization_config=kind
        )
        with torch.no_grad():
            logits = model(input_ids=PROBE).logits
        assert (logits - load_file(logits_file)["logits"]).abs().max() < 1e-5


def test_experts_outside_the_format_are_refused_before_training(models, tmp_path, capsys):
    source = models("qwen3_moe", **FAMILIES["qwen3_moe"])
    save_compressed(source, tmp_path / "base", "nvfp4", ignore=("lm_head", "re:.*mlp.gate$"))
    argv = flags(model_name=tmp_path / "base", merge_aware=True, allow_unquantized=True, **EXPERTS)
    assert main(["train", *argv, "--dataset", "alpaca_demo", "--dry_run", "true"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "experts.gate_up_proj is not" in said and "--lora_target_parameters" in said
