"""Hybrids of attention and of layers that mix tokens by a convolution and a state: how their rows
become batches.
"""

import contextlib
import itertools
import re
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.__main__ import main
from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.model.architecture.token_mixers import (
    ByDocument,
    groups,
    keep_documents_apart,
    pass_documents,
)
from fsdp_qlora.model.experts import expert_parameters
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE
from tests.helpers.reference import decode, load_adapter, load_base
from tests.helpers.rounding import SGD, rounding
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, all_slow_but, flags, run_ranks, train_ok

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WITH_EXPERTS = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 64}
# Layers of latent attention beside linear ones of another kind.
LATENT = {
    **EXPERTS,
    "layer_types": LINEAR["layer_types"],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


class Hybrid(NamedTuple):
    """A family's sizes, its layers that compute rows apart, else why rows are padded, and a layer
    without adapter.
    """

    shape: dict[str, Any]
    apart: str = ""
    padded: str = ""
    left_out: str = ""


TABLE = {
    "qwen3_5_text": Hybrid(LINEAR, "linear_attn"),
    "qwen3_5_moe_text": Hybrid(WITH_EXPERTS, "linear_attn"),
    "qwen3_next": Hybrid(WITH_EXPERTS, "linear_attn"),
    "olmo_hybrid": Hybrid(LINEAR, "linear_attn"),
    "lara_mini": Hybrid(WITH_EXPERTS, "linear_attn"),
    "kimi_linear": Hybrid(
        {**LATENT, "num_local_experts": 4, "mlp_layer_types": ["dense", "sparse"]}, "self_attn"
    ),
    "bailing_hybrid": Hybrid(
        {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, "self_attn"
    ),
    "lfm2": Hybrid(CONVOLUTION, "conv"),
    "lfm2_moe": Hybrid({**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}, "conv"),
    "lfm3": Hybrid(CONVOLUTION, "conv"),
    "granitemoehybrid": Hybrid(
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        "mamba",
        left_out="mamba.out_proj",
    ),
    "nemotron_h": Hybrid(
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
        "mixer",
        left_out="mixer.out_proj",
    ),
    "bamba": Hybrid({**MAMBA, "attn_layer_indices": [1]}, "mamba", left_out="mamba.out_proj"),
    "falcon_h1": Hybrid({**MAMBA, "mamba_d_ssm": 128}, "mamba", left_out="mamba.out_proj"),
    "jamba": Hybrid(
        {
            "mamba_d_state": 16,
            "mamba_dt_rank": 16,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "mamba",
        left_out="mamba.dt_proj",
    ),
    # Lightning attention, without a convolution.
    "minimax": Hybrid(
        {"num_local_experts": 4, "layer_types": LINEAR["layer_types"]},
        padded="a second document in a row differs by ",
    ),
    "falcon_mamba": Hybrid(
        {"state_size": 16, "time_step_rank": 16, "num_hidden_layers": 1},
        padded="it takes no positions",
        left_out="mixer.x_proj",
    ),
}
# older versions know fewer
HYBRIDS = {family: hybrid for family, hybrid in TABLE.items() if family in CONFIG_MAPPING}
# Of each structure one family is trained in continuous integration.
ALIKE = {
    "lara_mini",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "bailing_hybrid",
    "lfm2_moe",
    "lfm3",
    "bamba",
}
# the last three are slow, too
ALIKE |= {"falcon_h1", "granitemoehybrid", "kimi_linear", "jamba", "falcon_mamba"}
WITHOUT_PADDING = {family: hybrid.shape for family, hybrid in HYBRIDS.items() if hybrid.apart}
SHARED = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_hidden_layers": 4,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "mamba_ngroups": 1,
    "num_mem_blocks": 1,
    "chunk_size": 16,
    "attention_head_dim": 32,
    "num_key_value_heads": 4,
    "adapter_rank": 8,
}


@pytest.mark.parametrize("family", all_slow_but("qwen3_5_text", HYBRIDS, nightly=ALIKE))
def test_a_hybrid_trains_and_peft_loads_its_adapter(family, models, tmp_path, capsys):
    hybrid = HYBRIDS[family]
    folder = models(family, **HYBRIDS[family].shape)
    options: dict[str, Any] = {
        "model_name": folder,
        "allow_unquantized": True,
        "precision": "fp32",
        "batch_size": 3,
    }
    rows = {"dataset": write_rows(tmp_path / "rows.jsonl", make_rows(12)), "max_steps": 2}
    said = train_ok(2, tmp_path / "out", logits_file=tmp_path / "logits", **rows, **options, **SGD)
    if hybrid.apart:
        assert said.count(f"without attention: {hybrid.apart}.") == 1
    else:
        assert said.count(f"Rows are padded with this model: {hybrid.padded}") == 1
    main(["plan", "--gpu", "RTX 3090", *flags(**options)])
    printed = capsys.readouterr()
    for output in (said, printed.out + printed.err):
        assert ("Neither quantized nor adapted" in output) == bool(
            hybrid.left_out
        ) and hybrid.left_out in output
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    adapted = {re.sub(r"\.lora_[AB].*|base_model\.model\.", "", name) for name in saved}
    assert adapted and not any(
        hybrid.left_out and path.endswith(hybrid.left_out) for path in adapted
    )
    base = load_base(folder, four_bit=False)
    with torch.no_grad():
        for path in [*(f"{path}.weight" for path in adapted), *expert_parameters(base)]:
            weight = base.get_parameter(path)
            weight.copy_(decode(weight))
        unadapted = base.eval()(input_ids=PROBE).logits
        logits = load_file(tmp_path / "logits")["logits"]
        assert (
            load_adapter(base, tmp_path / "out")(input_ids=PROBE).logits - logits
        ).abs().max() < 1e-4
    assert (unadapted - logits).abs().max() > 1e-3


def test_a_run_without_padding_has_the_numbers_of_padded_rows(models, tmp_path):
    options = {
        "model_name": models("qwen3_5_text", **LINEAR),
        "precision": "fp32",
        "batch_size": 3,
        "max_steps": 2,
    }
    options |= {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(12)),
        "eval_fraction": 0.2,
        **SGD,
    }
    train_ok(2, tmp_path / "padded", batching="padded", recompute="none", **options)
    train_ok(2, tmp_path / "free", recompute="all", **options)
    for key in ("loss", "grad_norm", "eval_loss"):
        padded, free = (read_metrics(tmp_path / name, key) for name in ("padded", "free"))
        # A row has at most 100 tokens, and the sum of the step's six rows is one.
        assert free == pytest.approx(padded, rel=rounding(6 * 100)) and len(free) == 2, key
    padded, free = (
        read_metrics(tmp_path / name, "useful_of_lock_step") for name in ("padded", "free")
    )
    assert all(a < b for a, b in zip(padded, free, strict=True))


def test_blocks_that_share_weights_are_refused_in_one_sentence(models, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    argv = flags(
        model_name=models("zamba2", **SHARED),
        dataset=data,
        output_dir=tmp_path / "out",
        log_to="stdout",
    )
    statuses, output = run_ranks(2, argv, tmp_path / "logs")
    assert statuses == [2, 2] and "Traceback" not in output
    assert "The zamba2 model cannot be trained here: its blocks 1 and 3 share weights" in output


class Mixer(nn.Module):
    """A sum over the tokens so far; its own code knows documents if `knows`, as with kernels."""

    def __init__(self, *, knows: bool) -> None:
        super().__init__()
        self.knows = knows
        self.calls = list[torch.Size]()
        self.conv = nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, hidden_states: torch.Tensor, **told: Any) -> torch.Tensor:
        self.calls.append(hidden_states.shape[:2])
        if self.knows and "seq_idx" in told:
            seen = (told["seq_idx"].mT == told["seq_idx"]).tril().to(hidden_states.dtype)
            return seen @ hidden_states
        return hidden_states.cumsum(dim=1)


@pytest.mark.parametrize("knows", [False, True])
def test_only_layers_that_do_not_know_documents_compute_them_apart(knows):
    mixer = Mixer(knows=knows)
    lengths = [30, 28, 3, 1, 1]
    x = torch.randn(
        1, sum(lengths), 4, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    by_document = ByDocument(mixer)
    expected = torch.cat([part.cumsum(dim=1) for part in x.split(lengths, dim=1)], dim=1)
    by_document.documents = describe_documents([sum(lengths)])
    by_document(x, **by_document.documents)
    assert by_document.is_needed is None  # one document tells nothing
    for _ in range(2):
        mixer.calls.clear()
        # as its block does
        _, kwargs = pass_documents([by_document], mixer, (), describe_documents(lengths))
        found = by_document(x, **kwargs)
        torch.testing.assert_close(found, expected)
    assert mixer.calls == ([(1, 63)] if knows else [(2, 30), (1, 3), (2, 1)])
    [own], [gradient] = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(own, gradient)
    by_document.documents = {}
    assert by_document(x[:, :2]).tolist() == x[:, :2].cumsum(dim=1).tolist()


def test_a_lack_of_memory_is_not_taken_for_documents_that_cross(monkeypatch):
    mixer = Mixer(knows=True)
    kwargs = describe_documents([30, 28])
    by_document = ByDocument(mixer)
    _, kwargs = pass_documents([by_document], mixer, (), kwargs)
    for error in (
        torch.OutOfMemoryError("2 GiB"),
        torch.AcceleratorError("illegal address"),
        RuntimeError("seq_idx"),
    ):
        monkeypatch.setattr(
            by_document, "layer_forward", Mock(side_effect=[error, mixer(torch.randn(2, 30, 4))])
        )
        with (
            contextlib.nullcontext() if type(error) is RuntimeError else pytest.raises(type(error))
        ):
            assert by_document._mixes_documents(torch.randn(1, 58, 4), **kwargs)


def test_groups_of_documents_have_little_padding():
    lengths = [150, 124, 104, 89, 78, 78, 75, 68, 65, 54, 52, 50, 49, 37, 36, 20]
    found = list(groups(lengths))
    assert [*itertools.chain(*found)] == lengths and len(found) == 6
    assert all(sum(group) >= 0.9 * max(group) * len(group) for group in found)


def test_the_table_of_the_documentation_is_the_tested_one():
    table = re.findall(
        r"^\| (.+) \| `(\w+)` \| (padding-free|padded)",
        (ROOT / "docs/models.md").read_text(),
        re.M,
    )
    stated = {
        family: (layer, rows) for families, layer, rows in table for family in families.split(", ")
    }
    tested = {family.removesuffix("_text"): hybrid for family, hybrid in TABLE.items()}
    assert stated.keys() == tested.keys()
    for family, (layer, rows) in stated.items():
        assert rows == ("padding-free" if layer == tested[family].apart else "padded"), family


def test_the_layers_found_are_those_of_the_table(models):
    for family, shape in WITHOUT_PADDING.items():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(models(family, **shape))
        keep_documents_apart(model)
        found = {
            path.split(".")[-1] for path, each in model.named_modules() if "forward" in vars(each)
        }
        assert found == {HYBRIDS[family].apart}, family
