"""Models published as integers, by AutoAWQ, GPTQ's programs and compressed-tensors: decoded as they
are read.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PretrainedConfig

from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.loading.test_prequantized import format_of, set_config
from tests.loading.test_published import save_compressed, save_plain

RUN = {"lr": 1e-2, "precision": "fp32", "lora_rank": 4, "num_epochs": 3}
SIZE = 32  # of a group
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word, from its lowest bits
DYNAMIC = {"-:.*k_proj.*": {}, r"+:.*\.down_proj": {"bits": 8}}
UP = "model.layers.0.mlp.up_proj"


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers as rows of int32 words, the first in the lowest bits."""
    shifts = torch.arange(bits)
    stream = (numbers[..., None].long() >> shifts & 1).flatten(1).view(len(numbers), -1, 32)
    return (stream << torch.arange(32)).sum(-1).to(torch.int32)


def without_ones(words: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ's zero points of version 1 from those of version 2, by GPTQModel's own arithmetic, in
    numpy.

    It subtracts one constant from int32 words, in which a zero borrows from its neighbour; of 3
    bits, 1 from each.
    """
    if bits == 3:
        numbers = (words.numpy().view("uint8").reshape(len(words), -1, 1) >> np.arange(8)) & 1
        numbers = (numbers.reshape(len(words), -1, 3) << np.arange(3)).sum(-1)
        return pack(torch.from_numpy((numbers - 1) % 8), 3)
    ones = {2: 0b01010101010101010101010101010101, 4: 0x11111111, 8: 0x01010101}[bits]
    return torch.from_numpy((words.numpy().view("uint32") - np.uint32(ones)).view("int32"))


def save_gptq(
    source: Path,
    folder: Path,
    *,
    bits: int = 4,
    v2: bool = False,
    desc_act: bool = False,
    dynamic: dict | None = None,
) -> dict:
    """Write a model's linear layers as GPTQ's programs do; returns all its weights as they are
    meant.
    """
    return save_integers(
        source,
        folder,
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": SIZE,
            "desc_act": desc_act,
            "sym": False,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
            "dynamic": dynamic,
        },
    )


def save_awq(source: Path, folder: Path) -> dict:
    return save_integers(
        source, folder, {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}
    )


def save_integers(source: Path, folder: Path, about: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    dynamic = about.get("dynamic") or {}
    meant = {}
    stored = {}
    for name, value in load_file(source / "model.safetensors").items():
        bits = 8 if dynamic and "down_proj" in name else about["bits"]
        if "_proj" not in name or (dynamic and "k_proj" in name):
            stored[name] = meant[name] = value.half()
            continue
        rows, columns = value.shape
        g_idx = torch.arange(columns) // SIZE
        if about.get("desc_act"):
            g_idx = g_idx[torch.randperm(columns)]
        codes = torch.randint(2**bits, (columns, rows))  # [in, out], as in the files
        zeros = torch.randint(2**bits, (columns // SIZE, rows))
        scales = (torch.rand(columns // SIZE, rows) * 0.4 / 2**bits).half()
        meant[name] = ((codes - zeros[g_idx]) * scales.float()[g_idx]).T.contiguous().half()
        base = name.removesuffix(".weight")
        if about["quant_method"] == "awq":
            words = [
                pack(of.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)
                for of in (codes, zeros)
            ]
        else:
            words = [pack(codes.T, bits).T, pack(zeros, bits)]
            if about["checkpoint_format"] == "gptq":
                words[1] = without_ones(words[1], bits)
            stored[f"{base}.g_idx"] = g_idx.to(torch.int32)
        stored |= {
            f"{base}.{end}": of.contiguous()
            for end, of in zip(("qweight", "qzeros"), words, strict=True)
        }
        stored[f"{base}.scales"] = scales
    save_plain(source, folder, stored)
    set_config(folder, quantization_config=about)
    return meant


def save_by_compressed_tensors(source: Path, folder: Path, form: str) -> dict[str, torch.Tensor]:
    save_compressed(source, folder, form)
    kind = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=kind
    )
    return {name: model.state_dict()[name] for name in load_file(source / "model.safetensors")}


FORMS = {
    "awq": save_awq,
    "gptq": save_gptq,
    "gptq of 2 bits": partial(save_gptq, bits=2),
    "gptq of 3 bits": partial(save_gptq, bits=3),
    "gptq version 2": partial(save_gptq, bits=3, v2=True),
    "gptq of 8 bits": partial(save_gptq, bits=8),
    "gptq by activation": partial(save_gptq, desc_act=True),
    "gptq of several bits": partial(save_gptq, dynamic=DYNAMIC),
    **{
        form: partial(save_by_compressed_tensors, form=form)
        for form in ("int4 groups", "int4 zeros", "int3 rows", "int8 rows", "int8 whole")
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_integers_are_decoded_as_their_format_defines(form, models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    meant = FORMS[form](source, folder)
    weight_files = WeightFiles(folder, format_of(folder))
    assert weight_files.files.keys() == meant.keys()
    for name, value in meant.items():
        count = value.numel()
        for start, stop in ((0, count), (count // 3, count // 2 + 5), (count - 1, count)):
            found = weight_files.read_flat(name, start, stop)
            assert torch.equal(found, value.flatten()[start:stop]), (name, start)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "int4 zeros"])
def test_a_model_in_integers_trains_as_its_decoded_weights(form, models, tmp_path):
    source = models("llama")
    folder = tmp_path / "model"
    plain = save_plain(source, tmp_path / "plain", FORMS[form](source, folder))
    common = {**RUN, "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8))}
    for train_type, world_size in (("lora", 1), ("qlora", 2)):
        options = {
            "train_type": train_type,
            "gradient_accumulation_steps": 2,
            "batch_size": 2,
            **common,
        }
        train_ok(world_size, tmp_path / f"{train_type}_plain", model_name=plain, **options)
        output = train_ok(world_size, tmp_path / train_type, model_name=folder, **options)
        for key in ("loss", "grad_norm"):
            assert read_metrics(tmp_path / train_type, key) == read_metrics(
                tmp_path / f"{train_type}_plain", key
            )
        assert "its weights are decoded to the type of their scales as they are read" in output


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("scales", torch.ones(2, 100)),
        ("qzeros", torch.ones(2, 5).int()),
        ("g_idx", torch.ones(63).int()),
    ],
)
def test_integers_that_do_not_fit_are_refused_by_name(tensor, value, models, tmp_path):
    save_gptq(models("llama"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {f"{UP}.{tensor}": value}, file)
    shape = list(value.shape)
    with pytest.raises(UserError) as error:
        WeightFiles(tmp_path / "model", format_of(tmp_path / "model"))
    assert f"{UP}.weight is not in GPTQ: {UP}.{tensor} has shape {shape}." in str(error.value)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ (gemv)"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ (marlin)"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up.*": {"format": "marlin"}}},
            "GPTQ",
        ),
        ({"quant_method": "gptq", "bits": 5}, "GPTQ"),
        (
            {"quant_method": "compressed-tensors", "format": "mixed-precision"},
            "compressed-tensors (mixed-precision)",
        ),
    ],
)
def test_integers_in_other_layouts_are_refused_by_name(settings, label):
    with pytest.raises(UserError) as error:
        take_format(PretrainedConfig(quantization_config=settings), "m")
    assert f"model_name m is quantized as {label}, which is not supported: " in str(error.value)
    assert "Give the model with 16- or 32-bit" in str(error.value)
