"""Embeddings and heads that ranks share: what is exchanged gives the values of the whole matrices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdp_qlora.sharding import vocabulary
from tests.tiny import on_ranks

Models = Callable[..., Path]
VOCABULARY = 320  # three ranks have 107, 107 and 106 rows
LENGTHS = (24, 7, 1)  # tokens of each rank
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "pad_token_id": 300},
    "gemma3_text": {"final_logit_softcapping": 3.0},  # tied, and its embedding scales
}


def ids_of(rank: int) -> torch.Tensor:
    return (torch.arange(LENGTHS[rank]) * 37 + 100 * rank).remainder(VOCABULARY)[None]


def test_every_rank_gets_each_row_of_its_tokens_once() -> None:
    tokens = [torch.tensor([5, 0, 5, 319, 107]), torch.tensor([106, 106]), torch.tensor([214, 320 - 106])]
    weight = torch.randn(VOCABULARY, 4)
    starts = [0, 107, 214]
    wanted = [vocabulary.find_wanted(tokens, VOCABULARY, rank) for rank in range(3)]
    for rank, own in enumerate(wanted):
        taken = []
        for other, start in zip(wanted, starts, strict=True):
            parts = (weight[start : start + 107][other.rows]).split(other.given)
            taken.append(parts[rank])
        assert own.taken == [len(part) for part in taken]
        assert torch.equal(torch.cat(taken)[own.places], weight[tokens[rank]])
    assert [sum(own.taken) for own in wanted] == [4, 1, 1]


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


class Masked(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids != 0)[..., None]


def test_an_embedding_is_shared_if_a_token_gives_what_follows_from_its_row() -> None:
    with torch.device("meta"):
        modules = [nn.Embedding(50, 8, padding_idx=40), Scaled(50, 8, dtype=torch.bfloat16), Masked(50, 8)]
    modules.append(nn.Embedding(50, 8, max_norm=1.0))
    assert [vocabulary._only_looks_up(module) for module in modules] == [True, True, False, False]
    assert all(module.weight.is_meta for module in modules[:3])


def _compare(folders: dict[str, str]) -> int:
    from fsdp_qlora.model.precision import PRECISIONS
    from fsdp_qlora.ranks.distributed import build_mesh, read_ranks, start_process_group, stop_process_group
    from fsdp_qlora.sharding.model_parts import ModelParts
    from fsdp_qlora.sharding.parallelize import reshard_all, shard_model
    from fsdp_qlora.training import head_loss
    from fsdp_qlora.training.probes import few_tokens, probe_head_loss

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    head_loss.MAX_CHUNK_BYTES = 5 * VOCABULARY * 4
    ids = ids_of(ranks.rank)
    labels = ids.clone()
    labels[:, :1] = -100
    rows, targets = head_loss.learned_rows(labels, at_least=max(LENGTHS) - 1)
    for family, folder in folders.items():
        own, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
        for each in (own, model):
            each.get_input_embeddings().requires_grad_(False)
            each.get_output_embeddings().requires_grad_(False)
        fp32 = PRECISIONS["fp32"]
        shard_model(ModelParts.of(model), mesh, sharding_strategy="full_shard", precision=fp32)
        loss_of = probe_head_loss(model, {"input_ids": few_tokens(model)})
        assert loss_of is not None, family
        seen: list[torch.Tensor] = []
        model.get_input_embeddings().register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
        # The ranks ask each other for their tokens, or know them.
        logits = model(input_ids=ids, use_cache=False).logits
        reshard_all(model)
        with vocabulary.tokens_known(model, [ids_of(rank)[0] for rank in range(3)]):
            loss = loss_of({"input_ids": ids}, rows, targets)
        assert all(torch.equal(each, own.get_input_embeddings()(ids)) for each in seen) and len(seen) == 2
        expected = own(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        whole = F.cross_entropy(expected[0, :-1], ids[0, 1:], reduction="sum")
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6, abs=1e-6), family
        loss.backward()
        whole.backward()
        for (name, parameter), own_parameter in zip(model.named_parameters(), own.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            if not parameter.requires_grad:
                assert len(parameter.to_local()) < VOCABULARY
                continue
            gradient = torch.zeros_like(own_parameter) if own_parameter.grad is None else own_parameter.grad
            torch.distributed.all_reduce(gradient)
            found = parameter.grad.full_tensor() * 3
            assert (found - gradient).norm() <= 2e-6 * gradient.norm(), (family, name)
    stop_process_group()
    return 0


def test_three_ranks_with_other_tokens_have_the_values_of_the_whole_vocabulary(models: Models, tmp_path: Path) -> None:
    folders = {name: str(models(name.split()[0], **options)) for name, options in FAMILIES.items()}
    statuses, output = on_ranks(3, _compare, (folders,), tmp_path / "logs")
    assert statuses == [0, 0, 0], output[-4000:]
