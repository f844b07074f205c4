"""The passes over prompts and tokens, against transformers' own generation."""

import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import PRECISIONS
from fsdp_qlora.sharding.recompute import wrap_blocks
from fsdp_qlora.sharding.replayed import Replayed
from fsdp_qlora.training.generation import generator, token_graphs
from fsdp_qlora.training.generation.model_cache import (
    LENGTH_MULTIPLE,
    RoomyLayer,
    can_be_static,
    make_roomy,
    shares_prompts,
)
from fsdp_qlora.training.generation.passes import Batch, Passes
from fsdp_qlora.training.generation.sampling import SamplingOptions
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import on_ranks

NEW_TOKENS = 10
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
# Full attention, sliding windows shorter than the prompts, states instead of keys, both, and
# positions of three kinds.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "minimax": {"num_local_experts": 2, "block_size": 8},
}
PROMPTS = [[5, 9, 3, 7, 11, 13, 17], [8, 2], [5, 9, 3, 7, 11, 13, 17], [8, 2], [8, 2], [40] * 5]


def _model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # The initial weights of a tiny model repeat one token.
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def _greedy(model: PreTrainedModel, batch: Batch, most: int | None = None) -> list[list[int]]:
    passes = Passes(model, batch, torch.device("cpu"), [], most)
    with torch.no_grad():
        columns = [passes.prompts().argmax(dim=-1)]
        while len(columns) < NEW_TOKENS:
            columns.append(passes.next(columns[-1]).argmax(dim=-1))
    answers: list[list[int]] = torch.stack(columns, dim=1).tolist()
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_that_transformers_generates(family):
    model = _model(family)
    batch = Batch.of(PROMPTS, shares_prompts=shares_prompts(model))
    assert len(batch.prompts) == (len(PROMPTS) if family == "minimax" else 3)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(made[0, len(prompt) :].tolist())
    assert _greedy(model, batch) == expected
    assert len({token for answer in expected for token in answer}) > 2


def test_a_prompt_of_several_answers_is_computed_once():
    model = _model("llama")
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    _greedy(model, Batch.of([PROMPTS[0]] * 8, shares_prompts=True))
    assert seen == [(1, 7)] + [(8, 1)] * (NEW_TOKENS - 1)


def test_a_cache_with_room_keeps_what_the_librarys_own_keeps():
    caches = [DynamicCache(), DynamicCache()]
    moved = []
    for step in range(2 * LENGTH_MULTIPLE):
        states = torch.randn(3, 2, 5 if step == 0 else 1, 4)
        (keys, values), expected = (cache.update(states, -states, 0) for cache in caches)
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        moved.append(keys.data_ptr())
        if step in (0, 9):
            for cache in caches:
                cache.reorder_cache(torch.tensor([2, 0, 0]))
        if step == 20:
            for cache in caches:
                cache.crop(-3)
        make_roomy(caches[0])
    # Memory is taken where rows were chosen, tokens taken away, and the room was used up.
    assert len(dict.fromkeys(moved)) <= 1 + 3 + 2
    layer = type(caches[0].layers[0])
    assert layer is RoomyLayer and caches[0].get_seq_length() == caches[1].get_seq_length() == 129


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_blocks_on_static_tensors_give_the_same_answers(family, monkeypatch):
    model = _model(family)
    assert can_be_static(model.config, 3)
    batch = Batch.of(PROMPTS, shares_prompts=True)
    expected = _greedy(model, batch)
    wrap_blocks(model, offload=False)
    stage = token_graphs._StaticArguments.stage
    staged = []

    def poisoned(self: Any, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        if tensor is not twin and self._copied.get(id(twin)) is not tensor:
            twin.fill_(1 if twin.dtype == torch.bool else 7)
            staged.append(twin)
        stage(self, tensor, twin)

    monkeypatch.setattr(token_graphs._StaticArguments, "stage", poisoned)
    assert _greedy(model, batch, NEW_TOKENS) == expected
    # A pass copies the first block's input, and once for all blocks of a kind: mask, rotary tables,
    # positions. The first token has no graph.
    kinds = {"llama": 1, "gemma3_text": 2}[family]
    assert len(staged) <= (NEW_TOKENS - 2) * (2 + 3 * kinds)
    assert not can_be_static(_model("mamba").config, 2)


@pytest.mark.parametrize(
    ("family", "longest", "attention", "reason"),
    [
        ("llama", 100, "sdpa", ""),
        ("gemma3_text", 4, "sdpa", ""),
        ("gemma3_text", 5, "sdpa", "a sliding window is shorter"),
        ("llama", 100, "flash_attention_2", "attention by flash_attention_2"),
        ("mamba", 100, "sdpa", "its cache"),
        ("minimax", 100, "sdpa", "its cache"),
    ],
)
def test_tokens_have_graphs_only_where_their_cache_is_masked(family, longest, attention, reason):
    model = _model(family)
    wrap_blocks(model, offload=False)
    model.config._attn_implementation = attention
    assert token_graphs.why_not_graphed(model, longest).startswith(reason)
    assert bool(token_graphs.why_not_graphed(model, longest)) == bool(reason)


def test_a_block_that_cannot_be_captured_runs_without_a_graph(monkeypatch, caplog):
    model = _model("llama")
    batch = Batch.of(PROMPTS, shares_prompts=True)
    expected = _greedy(model, batch)
    wrap_blocks(model, offload=False)
    graphs: list[Any] = []

    def refuse(work: Any, *, device: torch.device, pool: Any) -> Any:
        graphs.append(work)
        if len(graphs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Replayed(work, device, pool)

    monkeypatch.setattr(token_graphs, "Replayed", refuse)
    with caplog.at_level("INFO"):
        assert _greedy(model, batch, NEW_TOKENS) == expected
    assert len(graphs) == 2
    assert "Answers: no graphs (operation not permitted" in caplog.text
    assert "not permitted" in token_graphs.why_not_graphed(model, 20)


def _answer_to_an_image_on_rank_0() -> int:
    rank = int(os.environ["RANK"])
    ranks = Ranks(rank, rank, 2, 2, torch.device("cpu"))
    start_process_group(ranks)
    precision = PRECISIONS["fp32"]
    stops: Any = None
    answers = generator.TextGenerator(_model("llama"), ranks, precision, stops, SamplingOptions())
    shown = RowImages(np.zeros((1, 16), np.uint8), np.array([[1, 9]]))
    with (
        mock.patch.object(generator, "cache_argument", lambda model: None),
        pytest.raises(UserError, match="LlamaForCausalLM has no cache, so it cannot answer to im"),
    ):
        answers.generate({rank: [5, 9]}, images=None if rank else {0: shown})
    stop_process_group()
    return 0


def test_all_ranks_refuse_an_image_of_one_of_them_without_a_cache(tmp_path):
    statuses, output = on_ranks(2, _answer_to_an_image_on_rank_0, (), tmp_path)
    assert statuses == [0, 0], output
