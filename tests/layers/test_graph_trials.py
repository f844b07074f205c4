"""Whether a model's blocks may be graphs is tried with one of each kind and random weights."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.decoder import kind_of
from fsdp_qlora.model.kernels.in_use import GRAPHS
from fsdp_qlora.model.kernels.trial import why_wrong
from fsdp_qlora.run.answer_trials import answer_trials
from fsdp_qlora.run.graph_trials import BlockForm, graph_trials
from fsdp_qlora.run.kernel_trials import KernelForm
from fsdp_qlora.sharding import block_graphs, graphed
from tests.helpers.kernel_trials import FORM
from tests.helpers.models import SIZES

CPU = torch.device("cpu")
NF4 = {"quant_type": "nf4", "double_quant": True}


def form_of(family: str = "llama", **changes: Any) -> BlockForm:
    config = AutoConfig.for_model(family, **SIZES).to_dict()
    lora = asdict(LoraOptions(rank=4, **changes.pop("lora", {})))
    usual = BlockForm(
        config=json.loads(json.dumps(config, default=str)),
        adapter="lora",
        quantizer="bnb_4bit",
        precision="bf16",
        lora=json.loads(json.dumps(lora)),
        options=NF4,
        attention="auto",
        documents="documents_sdpa",
    )
    return usual._replace(**changes)


def reasons(form: BlockForm) -> list[str]:
    part = graph_trials(form, [96, 96], CPU)
    return [why_wrong(make, [GRAPHS])[GRAPHS] for make in (*part.proofs, part.timed)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"family": "qwen3", "precision": "fp32", "documents": None},
        {"family": "gemma2", "precision": "bf16_autocast"},
        {"quantizer": "hqq", "options": {"n_bits": 4, "group_size": 64}},
        {"quantizer": None, "options": {}},
    ],
    ids=["nf4", "padded rows", "autocast", "hqq", "16 bits"],
)
def test_a_block_of_random_weights_gives_the_same_bits_as_graphs(changes):
    assert reasons(form_of(**changes)) == ["", ""]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"family": "gemma2", "precision": "bf16_autocast"},
        {"quantizer": "hqq", "options": {"n_bits": 4, "group_size": 64}, "lora": {"dropout": 0.1}},
    ],
    ids=["nf4", "autocast", "hqq, dropout"],
)
def test_tokens_of_answers_have_the_same_bits_by_graphs(changes):
    [make] = answer_trials(form_of(**changes), CPU).proofs
    assert why_wrong(make, [GRAPHS]) == {GRAPHS: ""}
    [make] = answer_trials(form_of("qwen3_moe"), CPU).proofs
    assert "experts" in why_wrong(make, [GRAPHS])[GRAPHS]


def test_a_trial_says_why_a_block_has_no_graphs_or_other_numbers(monkeypatch):
    [reason, _] = reasons(form_of(lora={"dropout": 0.1}))
    assert reason == "blocks LlamaDecoderLayer: dropout"
    [reason, _] = reasons(form_of("qwen3_moe"))
    assert "experts, whose tokens the host" in reason
    copies = block_graphs.StaticGradients.copies
    monkeypatch.setattr(
        block_graphs.StaticGradients, "copies", lambda self: [2 * each for each in copies(self)]
    )
    assert reasons(form_of()) == ["other numbers"] * 2


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, 1),
        # blocks with a sliding window, and without
        ("gemma2", {}, 2),
        # dense blocks behind those with experts, which have no graphs
        ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1, 2]}, 1),
    ],
)
def test_a_block_of_each_kind_that_may_have_graphs_is_proved(
    family, changes, expected, monkeypatch
):
    kinds = set()
    captured = graphed.BlockGraphs

    def capture(memory: Any, staged: Any, *args: Any) -> Any:
        kinds.add(kind_of(staged.block))
        return captured(memory, staged, *args)

    monkeypatch.setattr(graphed, "BlockGraphs", capture)
    form = form_of(family)
    form = form._replace(config=form.config | changes)
    [make] = graph_trials(form, [96, 96], CPU).proofs
    assert why_wrong(make, [GRAPHS]) == {GRAPHS: ""}
    assert len(kinds) == expected


@pytest.mark.quick
def test_a_form_with_a_block_comes_back_from_json():
    form = replace(FORM, block=form_of())
    assert KernelForm.from_dict(json.loads(json.dumps(form.to_dict()))) == form
