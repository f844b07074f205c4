"""`--merge_aware` on bases that have their layers in several formats, and some in 16 bits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import read_metrics
from tests.helpers.models import Models, edit_weights
from tests.helpers.reference import batch_loss, encode, load_base, step_plainly
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, train_ok
from tests.loading.test_published import save_groups
from tests.parity.test_merge_aware import RUN, STEPS, Rounded, Tensors, evaluated, opened

# Gate and up, which have one input, are in two formats.
GROUPS = {
    "nvfp4": ["re:.*(gate|down)_proj$"],
    "fp8 rows": ["re:.*self_attn.[ko]_proj$"],
    "fp8 whole": ["re:.*self_attn.v_proj$"],
    "mxfp4": ["model.layers.1.mlp.up_proj"],
}
IN_16_BITS = ("layers.0.mlp.up_proj", "layers.1.mlp.down_proj", "self_attn.q_proj")


def save_mixed(models: Models, folder: Path) -> Path:
    """A tiny model in these formats, and with layers in bf16."""
    ignore = ["lm_head", *(f"re:.*{name}" for name in IN_16_BITS)]
    save_groups(models("llama"), folder, GROUPS, ignore)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.removesuffix(".weight").endswith(IN_16_BITS):
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def form_of(stored: Tensors, name: str) -> str:
    if name in stored and stored[name].dtype == torch.bfloat16:
        return "bf16"
    if name in stored:
        return "fp8 whole" if stored[f"{name}_scale"].numel() == 1 else "fp8 rows"
    return "nvfp4" if f"{name}_global_scale" in stored else "mxfp4"


def in_its_format(stored: Tensors, name: str) -> tuple[torch.Tensor, Callable]:
    form = form_of(stored, name)
    if form == "bf16":
        return stored[name].float(), lambda changed: changed.bfloat16().float()
    return opened(form, stored, name)


def test_each_layer_is_rounded_to_its_own_format(models, tmp_path):
    folder = save_mixed(models, tmp_path / "base")
    rows = make_rows(8)
    model = load_base(models("llama"), four_bit=False).requires_grad_(False)
    stored = load_file(folder / "model.safetensors")
    layers: dict[str, Rounded] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in path:
            layers[path] = Rounded(path, *in_its_format(stored, f"{path}.weight"))
            model.set_submodule(path, layers[path])
    assert {form_of(stored, f"{path}.weight") for path in layers} == {*GROUPS, "bf16"}
    trained = [parameter for layer in layers.values() for parameter in (layer.A, layer.B)]
    optimizer = torch.optim.SGD(trained, lr=RUN["lr"])
    losses = []
    norms = []
    for _ in range(STEPS):
        loss = batch_loss(model, encode(models("llama"), rows))
        losses.append(loss.item())
        norms.append(step_plainly(optimizer, loss))
    out = tmp_path / "out"
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = {"model_name": folder, "batch_size": 4, "allow_unquantized": True}
    train_ok(2, out, dataset=data, **RUN | options)
    # Of some ten thousand weights with fine steps, one is rounded to the other neighbour in step 5,
    # since A and B differ by 1e-7 from the loop's.
    assert read_metrics(out)[:-1] == pytest.approx(losses[:-1], rel=1e-6)
    assert read_metrics(out) == pytest.approx(losses, rel=1e-5)
    assert read_metrics(out, "grad_norm") == pytest.approx(norms, rel=1e-4)
    saved = load_file(out / "adapter_model.safetensors")
    for path, layer in layers.items():
        for letter, parameter in (("A", layer.A), ("B", layer.B)):
            value = saved[f"base_model.model.{path}.lora_{letter}.weight"]
            torch.testing.assert_close(value, parameter.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_mixed_model_is_merged_as_it_was_evaluated(precision, models, tmp_path):
    base = save_mixed(models, tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    held_out = write_rows(tmp_path / "held_out.jsonl", make_rows(6, seed=1))
    out = tmp_path / "out"
    options = RUN | {"precision": precision, "batch_size": 2, "allow_unquantized": True}
    train_ok(2, out, model_name=base, dataset=rows, eval_dataset=held_out, **options)
    merged = tmp_path / "merged"
    assert main(["merge", str(out), "--out", str(merged)]) == 0
    batch = {"batch_size": 2, "precision": precision, "allow_unquantized": True}
    measure = partial(evaluated, 2, dataset=held_out, context_length=512, **batch)
    first, *_, last = read_metrics(out, "eval_loss")
    assert measure(merged, train_type="qlora") == measure(out) == last != first
    before, after = (load_file(path / "model.safetensors") for path in (base, merged))
    unlike = set()
    for name, value in before.items():
        assert (after[name].shape, after[name].dtype) == (value.shape, value.dtype)
        if not torch.equal(after[name], value):
            unlike.add(name)
    in_16_bits = {name for name in before if before[name].dtype == torch.bfloat16}
    assert unlike >= in_16_bits and all("_proj" in name for name in unlike)
    adapted = load_file(out / "adapter_model.safetensors")
    for name in in_16_bits:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        lora_A, lora_B = (adapted[f"{path}.lora_{letter}.weight"].double() for letter in "AB")
        expected = (before[name].double() + 2 * lora_B @ lora_A).float().bfloat16()
        assert torch.equal(after[name], expected)


@pytest.mark.parametrize("option", ["precision", "lora_target_modules"])
def test_16_bits_that_a_run_does_not_keep_are_refused(option, models, tmp_path, capsys):
    """And the message's two ways out are ones."""
    base = save_mixed(models, tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = {"model_name": base, "dataset": rows, "allow_unquantized": True}
    options |= {"precision": "fp16", "lora_target_modules": "all", "batch_size": 8, "max_steps": 1}
    argv = flags(**RUN | options, output_dir=tmp_path / "out", quant_cache="off")
    assert main(["train", *argv]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "q_proj.weight is bfloat16 in the base's files, and this run keeps it in float16" in said
    better = {"precision": "fp32", "lora_target_modules": "k_proj,v_proj,o_proj"}
    train_ok(1, tmp_path / "better", **RUN | options | {option: better[option]})


def test_the_settings_of_a_servers_cache_stay_in_a_merged_model(models, tmp_path):
    base = save_mixed(models, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme | {"dynamic": False}
    (base / "config.json").write_text(json.dumps(config))
    scales = {
        f"model.layers.{block}.self_attn.{name}_scale": torch.tensor([0.5 + block])
        for block in range(2)
        for name in "kv"
    }
    edit_weights(base, lambda stored: stored.update(scales))
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    out = tmp_path / "out"
    options = {"batch_size": 8, "max_steps": 1, "allow_unquantized": True}
    train_ok(1, out, model_name=base, dataset=rows, **RUN | options)
    # `--format same` is what an adapter of such a run gets anyway.
    for name, words in (("merged", []), ("same", ["--format", "same"])):
        assert main(["merge", str(out), "--out", str(tmp_path / name), *words]) == 0
        merged = json.loads((tmp_path / name / "config.json").read_text())
        assert merged["quantization_config"] == config["quantization_config"]
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(tensors[path], value) for path, value in scales.items())
