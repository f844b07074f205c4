"""Published models whose tensors are not what their quantization_config says: refused by name, or
right.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.formats.integers import IntegerFormat
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.run.load_model import open_weights
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.sharding.loading.load_weights import check_finite, quantized_layers
from fsdp_qlora.sharding.loading.weight_files import WeightFiles, Weights
from fsdp_qlora.utils.errors import UserError
from tests.helpers.models import Models, edit_weights
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks
from tests.loading.test_integers import save_gptq
from tests.loading.test_prequantized import format_of, save_fp8, save_mxfp4, set_config
from tests.loading.test_published import decode, save_compressed, save_modelopt
from tests.parity.test_experts import FAMILIES

Tensors = dict[str, torch.Tensor]
ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
GPTQ = "model.layers.0.mlp.up_proj"
FORMS: Mapping[str, Callable[[Path, Path], Any]] = {
    "fp8 blocks": partial(save_fp8, form="blocks"),
    "fp8 rows": partial(save_fp8, form="rows"),
    "nvfp4": save_modelopt,
    "mxfp4": save_mxfp4,
    "gptq": save_gptq,
    "int4 zeros": partial(save_compressed, form="int4 zeros"),
}


def save_changed(form: str, changes: Mapping[str, Any], models: Models, folder: Path) -> Path:
    """Save a model in a format, with some tensors replaced by functions of them,
    or (None) removed.
    """
    family = "gpt_oss" if form == "mxfp4" else "llama"
    FORMS[form](models(family, **FAMILIES.get(family, {})), folder)
    if form == "fp8 rows":
        set_config(folder, quantization_config={"quant_method": "fbgemm_fp8"})
    file = folder / "model.safetensors"
    stored = load_file(file)
    for name, change in changes.items():
        value = stored.pop(name, None)
        if change is not None:
            stored[name] = change(value).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    return folder


def open_model(folder: Path, data: Path, train_type: str) -> Weights:
    """What a run does before it reads a weight."""
    return open_weights(plan_model(folder, data, train_type))


def plan_model(folder: Path, data: Path, train_type: str) -> ModelPlan:
    share = {"allow_unquantized": True} if train_type == "qlora" else {}
    argv = flags(model_name=folder, dataset=data, train_type=train_type, dry_run=True, **share)
    return prepare_run(parse_train_config(argv), ALONE, None).plan.model


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.float().to(dtype)


def turned(value: torch.Tensor) -> torch.Tensor:
    return value.mT


def flat(value: torch.Tensor) -> torch.Tensor:
    return value.flatten()


SCALE = f"{UP}_scale"
OF_ALL = f"{UP}_scale_2"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("fp8 blocks", {f"{UP}_scale_inv": to(torch.int64)}, "_scale_inv is int64 and must be float32"),
    ("fp8 blocks", {f"{UP}_scale_inv": turned}, "has scales [2, 4], which do not fit its shape"),
    (
        "fp8 blocks",
        {f"{UP}_scale_inv": lambda value: value[:0]},
        "has scales [0, 2], which do not fit its shape",
    ),
    ("fp8 blocks", {UP: flat}, "[8192] in FP8 has scales [4, 2], which do not fit its shape"),
    ("fp8 blocks", {SCALE: lambda _: torch.ones(4, 2)}, f"cannot both be {UP}.scale"),
    (
        "fp8 blocks",
        {"line\nbreak": lambda _: torch.ones(1)},
        "has a tensor named 'line\\nbreak', which no model has",
    ),
    ("fp8 rows", {SCALE: to(torch.bool)}, "_scale is bool and must be float32"),
    ("nvfp4", {UP: flat}, "in NVFP4 has scales"),
    ("nvfp4", {UP: turned}, "in NVFP4 has scales"),
    ("nvfp4", {UP: to(torch.int64)}, "is int64 and must be uint8"),
    ("nvfp4", {SCALE: to(torch.float32)}, "_scale is float32 and must be float8_e4m3fn"),
    ("nvfp4", {SCALE: lambda value: value[:0]}, "in NVFP4 has scales"),
    ("nvfp4", {OF_ALL: None}, "has no global scale"),
    (
        "nvfp4",
        {f"{DOWN}.pre_quant_scale": lambda _: torch.ones(128)},
        f"{DOWN}.pre_quant_scale multiplies what comes into a quantized layer",
    ),
    ("nvfp4", {OF_ALL: to(torch.int64)}, "_scale_2 is int64 and must be float32"),
    (
        "nvfp4",
        {OF_ALL: lambda value: value.repeat(2)},
        "_scale_2 has shape [2] and must be one number",
    ),
    ("mxfp4", {f"{EXPERTS}_scales": turned}, "in MXFP4 has scales"),
    ("mxfp4", {f"{EXPERTS}_scales": to(torch.float32)}, "_scales is float32 and must be uint8"),
    ("mxfp4", {f"{EXPERTS}_blocks": lambda value: value.flatten(2)}, "in MXFP4 has scales"),
    ("gptq", {f"{GPTQ}.scales": lambda value: value[:0]}, "scales has shape [0, 128]"),
    ("gptq", {f"{GPTQ}.scales": to(torch.int64)}, "scales is int64 and must be float32"),
    ("gptq", {f"{GPTQ}.qzeros": to(torch.float32)}, "qzeros is float32 and must be int32"),
    ("gptq", {f"{GPTQ}.qzeros": None}, "qweight has no zero points"),
    ("int4 zeros", {f"{GPTQ}.weight_zero_point": None}, "weight_packed has no zero points"),
    ("gptq", {f"{GPTQ}.qweight": flat}, "qweight has shape"),
]


@pytest.mark.parametrize(("form", "changes", "words"), WRONG)
def test_tensors_that_do_not_fit_their_format_are_refused_by_name(
    form, changes, words, models, tmp_path
):
    folder = save_changed(form, changes, models, tmp_path / "model")
    stored = format_of(folder)
    for options in ({"stored": stored}, {"packed": stored})[
        : 1 if isinstance(stored, IntegerFormat) else 2
    ]:
        with pytest.raises(UserError) as error:
            WeightFiles(folder, **options)
        assert words in str(error.value)


@pytest.mark.parametrize("train_type", ["qlora", "lora"])
def test_turned_matrices_are_refused_by_name(train_type, models, tmp_path):
    folder = save_changed(
        "fp8 blocks", {UP: turned, f"{UP}_scale_inv": turned}, models, tmp_path / "model"
    )
    with pytest.raises(UserError, match=f"wrong shape: {UP}"):
        open_model(folder, write_rows(tmp_path / "rows.jsonl", make_rows(2)), train_type)


@pytest.mark.parametrize("value", [2, -2, 2**31 - 1])
def test_a_group_that_has_no_scales_is_refused_by_name(value, models, tmp_path):
    folder = save_changed(
        "gptq",
        {f"{GPTQ}.g_idx": lambda old: old + (old == 1) * (value - 1)},
        models,
        tmp_path / "m",
    )
    with pytest.raises(UserError, match=f"{GPTQ}.g_idx has groups from "):
        WeightFiles(folder, format_of(folder)).read_rows(UP, 0, 128)


@pytest.mark.parametrize("form", ["fp8 rows", "nvfp4"])
def test_negative_and_zero_scales_are_numbers_like_others(form, models, tmp_path):
    def changed(scale: torch.Tensor) -> torch.Tensor:
        return (scale.float() * torch.tensor([-1.0, 0.0, 2.0, 1.0]).repeat(32)[:, None]).to(
            scale.dtype
        )

    folder = save_changed(form, {SCALE: changed}, models, tmp_path / "model")
    found = WeightFiles(folder, format_of(folder)).read_rows(UP, 0, 128)
    assert (found[1] == 0).all()
    assert torch.equal(found, decode(folder)[UP].bfloat16())


def test_fp8_of_the_other_kind_is_decoded_and_not_trained_as_it_is(models, tmp_path):
    folder = save_changed("fp8 blocks", {UP: to(torch.float8_e5m2)}, models, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", make_rows(2))
    with pytest.raises(UserError, match=f"{UP} is in E5M2"):
        open_model(folder, data, "qlora")
    files = open_model(folder, data, "lora").files
    stored = load_file(folder / "model.safetensors")
    scales = stored[f"{UP}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(files.read_rows(UP, 0, 128), (stored[UP].float() * scales).bfloat16())


UNUSABLE = [
    (
        "nvfp4",
        {SCALE: lambda value: torch.full_like(value, torch.nan)},
        f"{UP}.scale has values that are not finite",
    ),
    (
        "nvfp4",
        {OF_ALL: lambda value: value * torch.inf},
        f"{UP}.global_scale has values that are not finite",
    ),
    (
        "nvfp4",
        {OF_ALL: lambda value: torch.full_like(value, 3e38)},
        f"{UP}.global_scale has scales with which weights are not finite",
    ),
    (
        "fp8 rows",
        {UP: lambda value: torch.full_like(value, torch.nan)},
        f"{UP} has values that are not finite",
    ),
    ("fp8 rows", {SCALE: lambda value: value * 1e39}, f"{UP}.scale has "),
    (
        "mxfp4",
        {f"{EXPERTS}_scales": lambda value: value | 255},
        f"{EXPERTS}.scale has values that are not finite",
    ),
    ("mxfp4", {f"{EXPERTS}_scales": lambda value: value | 254}, f"{EXPERTS}.scale has "),
]


@pytest.mark.parametrize(("form", "changes", "words"), UNUSABLE)
def test_scales_that_are_no_numbers_are_refused_as_they_are_loaded(
    form, changes, words, models, tmp_path
):
    folder = save_changed(form, changes, models, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", make_rows(2))
    plan = plan_model(folder, data, "qlora")
    weights = open_weights(plan)
    layers = quantized_layers(plan.meta.model)
    reasons = []
    for name, layer in layers.items():
        for suffix in layer.stored_forms():
            values = weights.read_whole(name + suffix).flatten()
            reasons += (
                [f"{name + suffix} has {reason}"]
                if (reason := layer.unusable(suffix, values))
                else []
            )
    assert len(reasons) == 1 and words in reasons[0]
    with pytest.raises(UserError, match="has values that are not finite"):
        lora = open_model(folder, data, "lora")
        for name in lora.sources:
            check_finite(lora.read_whole(name), name)


def refused(number: int, models: Models, tmp_path: Path) -> tuple[Path, str]:
    """A model that a run of two ranks refuses, and the words of the message."""
    folder = tmp_path / "model"
    if number == 0:
        save_fp8(models("llama"), folder, "blocks")
        set_config(
            folder, quantization_config={"quant_method": "fp8", "weight_block_size": "line\nbreak"}
        )
        return folder, "config.json has quantization_config.weight_block_size 'line\\nbreak'"
    if number == 1:
        save_modelopt(models("llama"), folder)
        set_config(folder, quantization_config=[{"line\nbreak": 4.0}])
        return folder, "config.json has quantization_config [{'line\\nbreak': 4.0}], not an object"
    if number == 2:
        save_modelopt(models("llama"), folder)
        change(folder, f"{DOWN}.weight_scale", lambda value: torch.full_like(value, torch.nan))
        return folder, f"Weight {DOWN}.weight.scale has values that are not finite"
    save_gptq(models("llama"), folder)
    change(folder, f"{DOWN}.g_idx", lambda value: value + 9)
    return folder, f"{DOWN}.g_idx has groups from 9 to 12"


def change(folder: Path, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    edit_weights(folder, lambda stored: stored.update({name: changed(stored[name])}))


@pytest.mark.parametrize(
    "number", [0, 2, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 3))]
)
def test_a_run_of_two_ranks_refuses_a_hostile_model(number, models, tmp_path):
    folder, words = refused(number, models, tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    argv = flags(
        model_name=folder, dataset=data, output_dir=tmp_path / "out", allow_unquantized=True
    )
    statuses, output = run_ranks(2, argv, tmp_path / "logs")
    assert statuses == [2, 2] and "Traceback" not in output
    said = [line for line in output.splitlines() if "error: " in line]
    assert words in said[0] and len({line.partition("error: ")[2] for line in said}) == 1
