"""Gemma 4 and 3n, whose blocks differ in size, share keys and values, and get embeddings of their
own.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.experts import router_linears
from fsdp_qlora.model.model_parts import ModelParts
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, SIZES, make_model
from tests.helpers.reference import LINEARS, encode, load_adapter, load_base, train_plainly
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok

KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "sliding_window": 7,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
PER_LAYER = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 2,
}
EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "31b": ("gemma4_text", {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "e4b": ("gemma4_text", {**GEMMA_4, **PER_LAYER, "use_double_wide_mlp": True}),
    "26b-a4b": ("gemma4_text", {**GEMMA_4, **EXPERTS, "enable_moe_block": True}),
    "3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": KINDS,
            "sliding_window": 7,
            "laurel_rank": 8,
            **PER_LAYER,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
}


@pytest.mark.parametrize("form", [*FORMS, "qwen3"])
def test_sizes_of_a_block_are_those_of_its_own_layers(form):
    family, sizes = FORMS.get(form, (form, {}))
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = block_shapes(config)
    window = sizes.get("sliding_window")
    for shape, block in zip(shapes, find_blocks(model), strict=True):
        attention = block.self_attn
        keys = getattr(attention, "k_proj", None)
        assert (shape.hidden, shape.attended) == (
            attention.q_proj.in_features,
            attention.q_proj.out_features,
        )
        assert keys is None or keys.out_features == shape.groups * shape.head_dim
        assert shape.has_keys == (not getattr(attention, "is_kv_shared_layer", False))
        assert shape.window == (window if getattr(attention, "is_sliding", False) else None)
    assert len(set(shapes)) == {"e4b": 4, "3n": 4, "qwen3": 1}.get(form, 2)


OPTIONS = {
    "train_type": "lora",
    "precision": "fp32",
    "lr": 0.1,
    "lr_scheduler": "constant",
    "warmup": 0,
    "wd": 0,
    "grad_norm": 1,
    "lora_rank": 4,
    "lora_alpha": 6,
    "lora_dropout": 0,
    "seed": 5,
    "num_epochs": 3,
    # Adam makes a whole step of the rounding error of a gradient that is nearly zero
    "optimizer": "sgd",
}
TARGETS = r".*layers.*(q|k|v|o|gate|up|down)_proj"
# Options of a run -> all of its losses, gradient norms and weights are those of the plain loop.
RUNS: dict[str, dict[str, Any]] = {
    "two ranks": {"ranks": 2},
    "one rank": {"ranks": 1},
    "recompute all": {"ranks": 2, "recompute": "all"},
    "recompute one": {"ranks": 1, "recompute": 1},
    "recompute none": {"ranks": 2, "recompute": "none"},
    "offload": {"ranks": 2, "use_cpu_offload": True, "recompute": "all"},
    "offload on one rank": {"ranks": 1, "use_cpu_offload": True, "recompute": 1},
}
EVERYDAY = {("e4b", "recompute all")}
OF_CI = {("31b", "offload"), ("26b-a4b", "two ranks"), ("3n", "recompute one")}
CASES = [
    pytest.param(
        *case,
        marks=[]
        if case in EVERYDAY
        else pytest.mark.slow
        if case in OF_CI
        else pytest.mark.nightly,
    )
    for case in itertools.product(FORMS, RUNS)
]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model of each form, whose buffers have values that training has given them,
    and its rows.
    """

    @functools.cache
    def make(form: str) -> Path:
        family, sizes = FORMS[form]
        folder = make_model(tmp_path_factory.mktemp(form), family, **sizes)
        tensors = load_file(folder / "model.safetensors")
        scalars = [name for name in tensors if name.endswith("layer_scalar")]
        tensors |= {
            name: torch.full_like(tensors[name], 0.5 + n / 10) for n, name in enumerate(scalars)
        }
        # Scores are not scaled: with heads of norm 1 the models would be chaotic.
        tensors |= {
            name: value * 0.2 for name, value in tensors.items() if name.endswith("q_norm.weight")
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_rows(folder / "rows.jsonl", make_rows(8, seed=1))
        return folder

    return make


@functools.cache
def plain(folder: Path) -> Any:
    """The plain loop, and the logits of what it has trained."""
    batches = [
        {"input_ids": ids, "labels": labels} for ids, labels in encode(folder, make_rows(8, seed=1))
    ]
    return train_plainly(load_base(folder, four_bit=False), batches, TARGETS, sgd_lr=0.1)


@pytest.mark.parametrize(("form", "run"), CASES)
def test_a_run_is_a_plain_loop_of_peft(form, run, folders, tmp_path):
    folder = folders(form)
    options = dict(RUNS[run])
    ranks = options.pop("ranks")
    output = train_ok(
        ranks,
        tmp_path / "out",
        model_name=folder,
        dataset=folder / "rows.jsonl",
        batch_size=4 // ranks,
        gradient_accumulation_steps=2,
        lora_target_modules=",".join(LINEARS),
        logits_file=tmp_path / "logits.safetensors",
        **OPTIONS,
        **options,
    )
    losses, norms, adapter = plain(folder)
    assert "Rows are padded" not in output
    assert read_metrics(tmp_path / "out") == pytest.approx(losses, rel=1e-5)
    assert read_metrics(tmp_path / "out", "grad_norm") == pytest.approx(norms, rel=1e-5)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == adapter.keys()
    off = torch.stack([(saved[name] - adapter[name]).norm() for name in saved]).norm()
    assert off < 1e-5 * torch.stack([value.norm() for value in adapter.values()]).norm()
    reloaded = load_adapter(load_base(folder, four_bit=False), tmp_path / "out")
    with torch.no_grad():
        logits = load_file(tmp_path / "logits.safetensors")["logits"]
        torch.testing.assert_close(reloaded(input_ids=PROBE).logits, logits, rtol=1e-4, atol=1e-4)


def test_per_layer_embeddings_are_looked_up_as_the_tokens_are(folders):
    model = AutoModelForCausalLM.from_pretrained(folders("e4b"))
    assert ModelParts(model).token_tables == [model.model.embed_tokens_per_layer]


def test_a_router_that_is_a_module_is_not_quantized():
    family, sizes = FORMS["26b-a4b"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **sizes}))
    assert router_linears(model) == [f"model.layers.{n}.router.proj" for n in range(4)]


def test_a_reference_beside_the_policy_has_keys_of_its_own(folders, tmp_path):
    rows = [
        {"prompt": r["instruction"], "chosen": r["output"], "rejected": r["output"] + " blue"}
        for r in make_rows(8)
    ]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    norms = []
    options: dict[str, Any] = {**OPTIONS, "objective": "dpo", "batch_size": 4, "recompute": 1}
    for before in (False, True):
        out = tmp_path / str(before)
        train_ok(
            1, out, model_name=folders("e4b"), dataset=data, precompute_reference=before, **options
        )
        norms.append(read_metrics(out, "grad_norm"))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
