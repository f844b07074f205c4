"""`fsdp-qlora merge --format same`: an adapter merged into a published model, which stays in its
format.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

from fsdp_qlora.export import merge as merging
from tests.commands.test_merge import EXPERTS, make_adapter, merge
from tests.helpers.run import all_slow_but
from tests.loading.test_integers import save_awq, save_by_compressed_tensors
from tests.loading.test_prequantized import save_mxfp4
from tests.loading.test_published import E2M1, FORMS, decode, save_plain
from tests.parity.test_experts import FAMILIES


def scaled(adapter: Path, folder: Path, factor: float) -> Path:
    """The adapter with its update multiplied."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    changed = {name: value * (factor if "lora_B" in name else 1) for name, value in tensors.items()}
    save_file(changed, folder / "adapter_model.safetensors")
    return folder


def numbers(name: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a file as numbers: bytes of codes as E2M1."""
    if value.dtype != torch.uint8 or "scale" in name:
        return value.float()
    return E2M1[torch.stack([value % 16, value // 16], dim=-1).long()]


def check_effect(line: str, base: dict, merged: dict, written: dict) -> None:
    """Compare what was said with the definition, over the weights whose changes are rounded."""
    names = [
        name
        for name in base
        if "_proj" in name and not torch.equal(base[name], merged[name].float())
    ]
    u, r = (
        torch.cat([(of[name].float() - base[name]).flatten() for name in names])
        for of in (merged, written)
    )
    share = float(r @ u / (u @ u))
    said = re.findall(
        r": ([\d.]+)% of the adapter's update is left, and rounding adds ([\d.]+) times",
        line,
    )[0]
    assert float(said[0]) / 100 == pytest.approx(share, abs=0.01) and 0.3 < share < 1.1
    assert float(said[1]) == pytest.approx(float((r - share * u).norm() / u.norm()), abs=0.02)


@pytest.mark.parametrize("form", all_slow_but("nvfp4", [*FORMS, "gpt_oss"]))
def test_an_adapter_is_merged_into_the_published_format(form, models, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(merging, "_PIECE", 300)  # several pieces of every weight
    is_mixture = form == "gpt_oss"
    source = models(form, **FAMILIES[form]) if is_mixture else models("llama")
    folder = tmp_path / "model"
    (save_mxfp4 if is_mixture else FORMS[form])(source, folder)
    if is_mixture:
        kind = Mxfp4Config(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=kind
        )
        base = {
            name: model.state_dict()[name].float()
            for name in load_file(source / "model.safetensors")
        }
    else:
        base = decode(folder)
    adapter = make_adapter(source, tmp_path / "adapter", **(EXPERTS if is_mixture else {}))
    out = tmp_path / "out"
    assert (
        merge("--adapter", adapter, "--out", out, "--model_name", folder, "--format", "same") == 0
    )
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    forms = [
        {name: (value.shape, value.dtype) for name, value in of.items()} for of in (before, after)
    ]
    assert forms[0] == forms[1]
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, out)]
    assert configs[0] == configs[1] and "quantization_config" in configs[0]
    plain = AutoModelForCausalLM.from_pretrained(
        save_plain(source, tmp_path / "plain", base), dtype=torch.float32
    )
    merged = PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()
    if not is_mixture:
        check_effect(
            next(line for line in lines if "Rounded to" in line), base, merged, decode(out)
        )
    # Without an update everything stays as it is, but for the signs of zeros.
    nothing = scaled(adapter, tmp_path / "nothing", 0)
    same = tmp_path / "same"
    assert (
        merge("--adapter", nothing, "--out", same, "--model_name", folder, "--format", "same") == 0
    )
    for name, value in load_file(same / "model.safetensors").items():
        assert torch.equal(numbers(name, value), numbers(name, before[name])), name


@pytest.mark.parametrize("form", ["int4 zeros", "int3 rows", "int8 whole"])
def test_an_adapter_is_merged_into_integers_of_compressed_tensors(form, models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    base = save_by_compressed_tensors(source, folder, form)
    plain = save_plain(source, tmp_path / "plain", base)
    adapter = make_adapter(source, tmp_path / "adapter")
    before = load_file(folder / "model.safetensors")
    outs = {factor: tmp_path / f"out{factor}" for factor in (0, 1)}
    for factor, out in outs.items():
        changed = scaled(adapter, tmp_path / f"adapter{factor}", factor)
        argv = ["--adapter", changed, "--out", out, "--model_name", folder, "--format", "same"]
        assert merge(*argv) == 0
        after = load_file(out / "model.safetensors")
        assert {name: (value.shape, value.dtype) for name, value in after.items()} == {
            name: (value.shape, value.dtype) for name, value in before.items()
        }
        assert all(torch.equal(after[name], before[name]) for name in before) == (factor == 0)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    kind = CompressedTensorsConfig(run_compressed=False)
    written = AutoModelForCausalLM.from_pretrained(
        outs[1], dtype=torch.float32, quantization_config=kind
    ).state_dict()
    changed = [name for name in base if not torch.equal(base[name].float(), merged[name])]
    assert len(changed) > 2
    for name in changed:
        error = (written[name] - merged[name]).abs()
        assert error.norm() < (base[name] - merged[name]).norm()
        scale = load_file(outs[1] / "model.safetensors").get(f"{name}_scale", torch.ones(1))
        if scale.numel() == 1:
            continue
        # No weight is further away than half a step, which grows with the values.
        step = scale.repeat_interleave(error.shape[1] // scale.shape[1], 1)
        assert (error <= 0.501 * step).all()


def test_what_cannot_stay_in_its_format_is_refused_by_name(models, tmp_path, capsys):
    source = models("llama")
    adapter = make_adapter(models("llama"), tmp_path / "adapter")
    save_awq(source, tmp_path / "awq")
    for base, name in ((source, "16 or 32 bits"), (tmp_path / "awq", "AWQ")):
        argv = [
            "--adapter",
            adapter,
            "--out",
            tmp_path / "out",
            "--model_name",
            base,
            "--format",
            "same",
        ]
        assert merge(*argv) == 2
        assert (
            f"is stored in {name}, not in MXFP4, NVFP4, FP8 or integers of"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("form", "factor", "warning"),
    [
        ("nvfp4", 1e-3, "% of the adapter's update is left after rounding to NVFP4"),
        ("bf16", 1e-3, "% of the adapter's update is left after rounding to bfloat16"),
        ("bf16", 0, "the adapter's update is zero"),
        ("bf16", 1, None),
        ("fp32", 1e-3, None),
    ],
)
def test_an_update_that_rounding_takes_is_said_before_the_model_is_saved(
    form, factor, warning, models, tmp_path, lines
):
    source = models("llama")
    folder = tmp_path / "model"
    options = []
    if form == "nvfp4":
        FORMS[form](source, folder)
        options = ["--format", "same"]
    else:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[form]
        AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    adapter = scaled(make_adapter(source, tmp_path / "adapter"), tmp_path / "scaled", factor)
    assert (
        merge("--adapter", adapter, "--out", tmp_path / "out", "--model_name", folder, *options)
        == 0
    )
    [saved] = [index for index, line in enumerate(lines) if "Saved:" in line]
    found = [index for index, line in enumerate(lines) if line.startswith("Warning:")]
    assert len(found) == bool(warning)
    if warning:
        assert warning in lines[found[0]] and found[0] < saved
