"""Head and loss over chunks of tokens, and a vocabulary that ranks share: the same as whole logits,
never with them.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fsdp_qlora.data.batches.micro_batch import learned_rows
from fsdp_qlora.model.architecture.structure import has_tied_embeddings
from fsdp_qlora.model.model_parts import is_plain_lookup
from fsdp_qlora.sharding import vocabulary
from fsdp_qlora.training import head_loss
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.head_loss import chunked_loss
from fsdp_qlora.training.token_loss import LogitForm, whole_head
from tests.helpers.run import on_ranks
from tests.layers.shards import LargestTensor

TOKENS = 50
HIDDEN = 32
VOCABULARY = 700
SEVEN_TOKENS = 7 * VOCABULARY * 8  # bytes of a chunk
FORMS = [LogitForm(), LogitForm(scale=0.125), LogitForm(cap=5.0), LogitForm(scale=2.0, cap=3.0)]
WARM = [LogitForm(temperature=0.7), LogitForm(scale=2.0, cap=3.0, temperature=1.5)]


def parts_of_a_head(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, bias = (
        (0.5 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes
    )
    return hidden, weight, bias


def targets_of_tokens() -> torch.Tensor:
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    targets[[3, 49]] = -100
    return targets


def whole_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, form: LogitForm
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    return F.cross_entropy(logits, targets_of_tokens(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunked_loss_and_gradients_match_whole_logits(form, dtype):
    parts = parts_of_a_head(dtype)
    exact = [part.detach().double().requires_grad_() for part in parts]
    # Of fp16's small numbers: a loss scale of 2^16 and 2^10 tokens in the step.
    (64 * whole_loss(exact[0], exact[1], exact[2], form)).backward()
    head = whole_head(parts[1], parts[2], form)
    loss = chunked_loss(parts[0], head, targets_of_tokens(), CrossEntropy(), SEVEN_TOKENS)
    (64 * loss).backward()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        whole_loss(exact[0], exact[1], exact[2], form).item(), rel=tolerance
    )
    with torch.no_grad():
        again = chunked_loss(parts[0], head, targets_of_tokens(), CrossEntropy(), SEVEN_TOKENS)
    assert torch.equal(again, loss)
    for part, reference in zip(parts, exact, strict=True):
        assert part.grad is not None and reference.grad is not None and part.grad.dtype == dtype
        assert (part.grad - reference.grad).norm() / reference.grad.norm() < tolerance


@pytest.mark.parametrize("form", [*FORMS, *WARM])
def test_token_losses_entropies_and_weighted_gradients_are_right(form):
    parts = parts_of_a_head()
    factors = torch.linspace(-1, 2, TOKENS)
    targets = targets_of_tokens()
    hidden, weight, bias = (part.detach() for part in parts)
    exact = hidden.double().requires_grad_()
    logits = F.linear(exact, weight.double(), bias.double()) * form.scale
    logits = (
        logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    ) / form.temperature
    expected = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    (expected * factors).sum().backward()
    head = whole_head(weight, bias, form)
    found, entropies = chunked_loss(
        hidden.requires_grad_(), head, targets, CrossEntropy(with_entropy=True), SEVEN_TOKENS
    )
    (found * factors).sum().backward()
    again = chunked_loss(hidden.detach(), head, targets, CrossEntropy(by_token=True), SEVEN_TOKENS)
    assert torch.equal(again[0], found)
    own = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies.double(), own.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert hidden.grad is not None and exact.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", [*FORMS, *WARM])
def test_a_loss_by_probability_matches_whole_logits(form):
    weights = torch.linspace(0.5, 2, TOKENS)
    parts = parts_of_a_head()
    exact = [part.detach().double().requires_grad_() for part in parts]
    targets = targets_of_tokens()
    logits = F.linear(*exact) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    logits = logits / form.temperature
    logps = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    expected = -(logps.exp().detach() * logps * weights * (targets >= 0)).sum()
    expected.backward()
    loss = CrossEntropy(weights, by_probability=True)
    head = whole_head(parts[1], parts[2], form)
    found = chunked_loss(parts[0], head, targets, loss, SEVEN_TOKENS)
    found.backward()
    whole = loss.of_whole_logits(form.logits(head.outputs(parts[0]).detach()), targets, 1.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert whole.item() == pytest.approx(expected.item(), rel=1e-6)
    for part, reference in zip(parts, exact, strict=True):
        assert part.grad is not None and reference.grad is not None
        assert (part.grad - reference.grad).norm() / reference.grad.norm() < 1e-6


def test_chunked_loss_allocates_at_most_one_chunk_of_logits():
    tokens = 8
    size = tokens * VOCABULARY * 4
    hidden, weight, bias = parts_of_a_head()
    weight = weight.detach()
    bias = bias.detach()
    assert tokens < HIDDEN  # the weight's transpose is larger than a chunk
    kept: list[int] = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ),
    ):
        head = whole_head(weight, bias)
        loss = chunked_loss(hidden, head, targets_of_tokens(), CrossEntropy(), size)
        loss.backward()
    assert largest.elements <= max(tokens, HIDDEN) * VOCABULARY < TOKENS * VOCABULARY
    assert sum(kept) == 0  # besides the gradient of the hidden states
    assert head_loss.tokens_at_a_time(VOCABULARY, torch.float32, size) == tokens
    assert head_loss.logits_bytes(TOKENS, VOCABULARY, torch.float32, size) == size


class NewTensors(TorchDispatchMode):
    """Notes the elements of each tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            given = {
                each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)
            }
            self.elements += [result.numel()] * (result.untyped_storage().data_ptr() not in given)
        return result


def test_entropies_need_no_second_chunk_of_logits():
    chunk = 32 * VOCABULARY
    hidden, weight, bias = (part.detach() for part in parts_of_a_head(torch.bfloat16))
    hidden.requires_grad_()
    found = []
    for loss in (CrossEntropy(by_token=True), CrossEntropy(with_entropy=True)):
        with NewTensors() as made:
            chunked_loss(hidden, whole_head(weight, bias), targets_of_tokens(), loss, chunk * 6)
        found.append([elements for elements in made.elements if elements > chunk // 8])
    assert found[0] == found[1] and chunk in found[0]


def test_chunks_are_bounded_and_multiples_of_a_tile():
    for words in (32_000, 151_936, 262_144):
        for dtype in (torch.bfloat16, torch.float32):
            tokens = head_loss.tokens_at_a_time(words, dtype)
            assert tokens % 128 == 0
            assert head_loss.logits_bytes(10**6, words, dtype) <= head_loss.MAX_CHUNK_BYTES


def test_targets_are_predicted_from_the_previous_token_of_their_row():
    labels = torch.tensor([[-100, 5, -100, 7], [-100, -100, 8, -100]])
    rows, targets = learned_rows(labels)
    assert rows.tolist() == [0, 2, 5] and targets.tolist() == [5, 7, 8]
    rows, targets = learned_rows(torch.full((2, 3), -100))
    assert rows.tolist() == [0] and targets.tolist() == [-100]


# ---- embeddings and heads that ranks share

WORDS = 320  # of a model's vocabulary; three ranks have 107, 107 and 106 rows
LENGTHS = (24, 7, 1)  # tokens of each rank
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, trained head": {"trained": True},
    "llama, tied": {"tie_word_embeddings": True, "pad_token_id": 300},
    "llama, tied and trained": {"tie_word_embeddings": True, "trained": True},
    "gemma2": {"final_logit_softcapping": 2.0, "trained": True},
    "gemma3_text": {"final_logit_softcapping": 3.0},  # tied, and its embedding scales
    "granite": {"logits_scaling": 3.0},  # a divisor
    "hyperclovax": {"logits_scaling": 3.0},  # a factor
    "cohere": {"logit_scale": 0.25},
    "phi": {"trained": True},  # its head has a bias
}


def test_each_rank_fetches_each_embedding_row_once():
    tokens = [
        torch.tensor([5, 0, 5, 319, 107]),
        torch.tensor([106, 106]),
        torch.tensor([214, 320 - 106]),
    ]
    weight = torch.randn(WORDS, 4)
    starts = [0, 107, 214]
    wanted = [vocabulary.plan_row_exchange(tokens, WORDS, rank) for rank in range(3)]
    for rank, own in enumerate(wanted):
        taken = []
        for other, start in zip(wanted, starts, strict=True):
            parts = (weight[start : start + 107][other.rows]).split(other.sent)
            taken.append(parts[rank])
        assert own.received == [len(part) for part in taken]
        assert torch.equal(torch.cat(taken)[own.places], weight[tokens[rank]])
    assert [sum(own.received) for own in wanted] == [4, 1, 1]


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


class Masked(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids != 0)[..., None]


def test_only_plain_lookup_embeddings_are_shared():
    with torch.device("meta"):
        modules = [
            nn.Embedding(50, 8, padding_idx=40),
            Scaled(50, 8, dtype=torch.bfloat16),
            Masked(50, 8),
        ]
    modules.append(nn.Embedding(50, 8, max_norm=1.0))
    assert [is_plain_lookup(module) for module in modules] == [True, True, False, False]
    assert all(module.weight.is_meta for module in modules[:3])


def ids_of(rank: int) -> torch.Tensor:
    return (torch.arange(LENGTHS[rank]) * 37 + 100 * rank).remainder(WORDS)[None]


class _OwnLogits(LlamaForCausalLM):
    """Its logits are no function of the head's outputs alone."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * (1 + input_ids[..., None] % 2)
        return output


def _compare(folders: dict[str, str]) -> int:
    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging
    from fsdp_qlora.distributed.shards import build_mesh
    from fsdp_qlora.model.architecture.precision import PRECISIONS
    from fsdp_qlora.model.model_parts import ModelParts
    from fsdp_qlora.sharding.groups import reshard_all
    from fsdp_qlora.sharding.parallelize import shard_model
    from fsdp_qlora.training.probes import few_tokens, probe_head_loss

    ranks = read_ranks()
    set_up_logging(ranks, verbose=False)
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    ids = ids_of(ranks.rank)
    labels = torch.cat([torch.full((1, 3), -100), ids[:, 3:]], dim=1)[:, : ids.shape[1]]
    rows, targets = learned_rows(labels)
    missing = max(LENGTHS) - 1 - len(rows)
    learned = F.pad(rows, (0, missing)), F.pad(targets, (0, missing), value=-100)
    # Chunks of five tokens, so that each rank has several.
    chunk_bytes = 5 * WORDS * 4
    assert head_loss.tokens_at_a_time(WORDS, torch.float32, chunk_bytes) < len(learned[0]) / 2

    def sharded(model: Any) -> tuple[Any, Any]:
        fp32 = PRECISIONS["fp32"]
        shard_model(ModelParts(model), mesh, sharding_strategy="full_shard", precision=fp32)
        inputs = {"input_ids": few_tokens(model)}
        return model, probe_head_loss(model, inputs, chunk_bytes=chunk_bytes)

    for case, folder in folders.items():
        own = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if not CASES[case].get("trained"):
            own.get_input_embeddings().requires_grad_(False)
            own.get_output_embeddings().requires_grad_(False)
        model, loss_of = sharded(copy.deepcopy(own))
        assert loss_of is not None, case
        seen: list[torch.Tensor] = []
        model.get_input_embeddings().register_forward_hook(
            lambda *call, seen=seen: seen.append(call[-1])
        )
        # The ranks ask each other for their tokens, or know them.
        logits = model(input_ids=ids, use_cache=False).logits
        reshard_all(model)
        with vocabulary.tokens_known(model, [ids_of(rank)[0] for rank in range(3)]):
            loss = loss_of({"input_ids": ids}, *learned, CrossEntropy())
        # The backward pass does not need the head: it is freed before it, and not gathered again.
        is_of_root = has_tied_embeddings(model) and "trained" in CASES[case]
        assert isinstance(model.get_output_embeddings().weight, DTensor) != is_of_root
        assert (
            all(torch.equal(each, own.get_input_embeddings()(ids)) for each in seen)
            and len(seen) == 2
        )
        expected = own(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        whole = F.cross_entropy(expected[0, :-1], labels[0, 1:], reduction="sum")
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6, abs=1e-6), case
        if not CASES[case].get("trained"):
            with (
                vocabulary.tokens_known(model, [ids_of(rank)[0] for rank in range(3)]),
                torch.no_grad(),
            ):
                by_token = loss_of({"input_ids": ids}, *learned, CrossEntropy(with_entropy=True))
                found = by_token[1, : len(rows)]
            entropies = torch.distributions.Categorical(logits=expected[0, rows]).entropy()
            torch.testing.assert_close(found, entropies, rtol=1e-5, atol=1e-5)
        loss.backward()
        whole.backward()
        for (name, parameter), own_parameter in zip(
            model.named_parameters(), own.parameters(), strict=True
        ):
            assert (
                isinstance(parameter, DTensor)
                and (parameter.grad is None) != parameter.requires_grad
            ), (case, name)
            if not parameter.requires_grad:
                assert len(parameter.to_local()) < WORDS
                continue
            gradient = (
                torch.zeros_like(own_parameter)
                if own_parameter.grad is None
                else own_parameter.grad
            )
            torch.distributed.all_reduce(gradient)
            found = parameter.grad.full_tensor() * 3
            assert (found - gradient).norm() <= 2e-6 * gradient.norm(), (case, name)
    model, loss_of = sharded(_OwnLogits.from_pretrained(folders["llama"], dtype=torch.float32))
    assert loss_of is None
    # with the head, in forward and backward
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    for change in ("lm_head", "logit_temperature"):
        model = LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
        if change == "lm_head":
            model.lm_head = nn.Sequential(model.lm_head)
        else:
            model.config.logit_temperature = 2.0
        assert probe_head_loss(model, {"input_ids": ids}) is None
    stop_process_group()
    return 0


def test_vocabulary_parallel_loss_matches_whole_logits(models, tmp_path):
    folders = {}
    for case, options in CASES.items():
        overrides = {name: value for name, value in options.items() if name != "trained"}
        folders[case] = str(models(case.split(",")[0], **overrides))
    statuses, output = on_ranks(3, _compare, (folders,), tmp_path / "logs")
    assert statuses == [0, 0, 0], output[-4000:]
    reasons = [
        line
        for line in output.splitlines()
        if line.startswith("The loss is computed from whole logits")
    ]
    said = (
        "its logits are not its head's outputs",
        "the head of LlamaForCausalLM is a Sequential",
        "logit_temperature",
    )
    assert all(words in reason for words, reason in zip(said, reasons, strict=True))
