"""Head and loss over chunks of tokens: the same as whole logits, for every model, and never with whole logits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fsdp_qlora.model.models import has_tied_embeddings
from fsdp_qlora.training import head_loss
from fsdp_qlora.training.head_loss import LogitForm, chunked_loss, learned_rows
from tests.tiny import on_ranks

Models = Callable[..., Path]
TOKENS, HIDDEN, VOCABULARY = 50, 32, 700
FORMS = [LogitForm(), LogitForm(scale=0.125), LogitForm(cap=5.0), LogitForm(scale=2.0, cap=3.0)]


def parts_of_a_head(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, bias = ((0.5 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias


def targets_of_tokens() -> torch.Tensor:
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    targets[[3, 49]] = -100
    return targets


def whole_loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, form: LogitForm) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    return F.cross_entropy(logits, targets_of_tokens(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_those_of_whole_logits(
    form: LogitForm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "MAX_CHUNK_BYTES", 7 * VOCABULARY * 8)
    parts = parts_of_a_head(dtype)
    exact = [part.detach().double().requires_grad_() for part in parts]
    # Of fp16's small numbers: a loss scale of 2^16 and 2^10 tokens in the step.
    (64 * whole_loss(exact[0], exact[1], exact[2], form)).backward()
    loss = chunked_loss(*parts, targets_of_tokens(), form)
    (64 * loss).backward()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(whole_loss(exact[0], exact[1], exact[2], form).item(), rel=tolerance)
    with torch.no_grad():
        assert torch.equal(chunked_loss(*parts, targets_of_tokens(), form), loss)
    for part, reference in zip(parts, exact, strict=True):
        assert part.grad is not None and reference.grad is not None and part.grad.dtype == dtype
        assert (part.grad - reference.grad).norm() / reference.grad.norm() < tolerance


def test_autocast_multiplies_in_16_bits_and_gives_gradients_of_the_weights_own_dtype() -> None:
    hidden, weight, bias = parts_of_a_head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole_loss(hidden, weight, bias, LogitForm()).backward()
        expected = [part.grad for part in (hidden, weight, bias)]
        hidden.grad = weight.grad = bias.grad = None
        chunked_loss(hidden, weight, bias, targets_of_tokens(), LogitForm()).backward()
    for part, reference in zip((hidden, weight, bias), expected, strict=True):
        assert part.grad is not None and reference is not None and part.grad.dtype == torch.float32
        assert (part.grad - reference).norm() / reference.norm() < 8e-3


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_and_only_gradients_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 8
    monkeypatch.setattr(head_loss, "MAX_CHUNK_BYTES", tokens * VOCABULARY * 4)
    hidden, weight, bias = parts_of_a_head()
    weight, bias = weight.detach(), bias.detach()
    assert tokens < HIDDEN  # the weight's transpose is larger than a chunk
    kept: list[int] = []
    with (
        Largest() as most,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        loss = chunked_loss(hidden, weight, bias, targets_of_tokens(), LogitForm())
        loss.backward()
    assert most.elements <= max(tokens, HIDDEN) * VOCABULARY < TOKENS * VOCABULARY
    assert sum(kept) == 0  # besides the gradient of the hidden states
    assert head_loss.tokens_at_a_time(VOCABULARY, torch.float32) == tokens
    assert head_loss.logits_bytes(TOKENS, VOCABULARY, torch.float32) == tokens * VOCABULARY * 4


def test_a_chunk_of_a_large_vocabulary_is_bounded_and_of_whole_tiles() -> None:
    for vocabulary in (32_000, 151_936, 262_144):
        for dtype in (torch.bfloat16, torch.float32):
            tokens = head_loss.tokens_at_a_time(vocabulary, dtype)
            assert tokens % 128 == 0
            assert head_loss.logits_bytes(10**6, vocabulary, dtype) <= head_loss.MAX_CHUNK_BYTES


def test_rows_with_a_target_are_those_before_it_in_the_same_row() -> None:
    labels = torch.tensor([[-100, 5, -100, 7], [-100, -100, 8, -100]])
    rows, targets = learned_rows(labels)
    assert rows.tolist() == [0, 2, 5] and targets.tolist() == [5, 7, 8]
    rows, targets = learned_rows(torch.full((2, 3), -100))
    assert rows.tolist() == [0] and targets.tolist() == [-100]


# ---- whole models, sharded over two ranks

IDS = torch.arange(2, 50).view(2, 24)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, trained head": {"trained": True},
    "llama, tied and trained": {"tie_word_embeddings": True, "trained": True},
    "gemma2": {"final_logit_softcapping": 2.0, "trained": True},
    "granite": {"logits_scaling": 3.0},  # a divisor
    "hyperclovax": {"logits_scaling": 3.0},  # a factor
    "cohere": {"logit_scale": 0.25},
    "phi": {"trained": True},  # its head has a bias
}


class _OwnLogits(LlamaForCausalLM):
    """Its logits are no function of the head's outputs alone."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * (1 + input_ids[..., None] % 2)
        return output


def _compare(folders: dict[str, str]) -> int:
    from fsdp_qlora.model.precision import PRECISIONS
    from fsdp_qlora.ranks.distributed import (
        build_mesh,
        read_ranks,
        set_up_logging,
        start_process_group,
        stop_process_group,
    )
    from fsdp_qlora.sharding.model_parts import ModelParts
    from fsdp_qlora.sharding.parallelize import shard_model
    from fsdp_qlora.training.probes import few_tokens, probe_head_loss

    ranks = read_ranks()
    set_up_logging(ranks, verbose=False)
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    head_loss.MAX_CHUNK_BYTES = 5 * 320 * 4
    fp32 = PRECISIONS["fp32"]
    labels = IDS.clone()
    labels[:, :9] = -100

    def sharded(model: Any) -> tuple[Any, Any]:
        shard_model(ModelParts.of(model), mesh, sharding_strategy="full_shard", precision=fp32)
        return model, probe_head_loss(model, {"input_ids": few_tokens(model)})

    for case, folder in folders.items():
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        if not CASES[case].get("trained"):
            own.get_output_embeddings().requires_grad_(False)
        model, loss_of = sharded(copy.deepcopy(own))
        assert loss_of is not None, case
        logits = own.eval()(input_ids=IDS, use_cache=False).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        expected.backward()
        loss = loss_of({"input_ids": IDS}, *learned_rows(labels))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6), case
        # The backward pass does not need the head: it is freed before it, and not gathered again.
        is_of_root = has_tied_embeddings(model) and "trained" in CASES[case]
        assert isinstance(model.get_output_embeddings().weight, DTensor) != is_of_root
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None}
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in gradients), (case, name)
            if parameter.grad is not None:
                found = parameter.grad.full_tensor()
                assert (found - gradients[name]).norm() <= 2e-6 * gradients[name].norm(), (case, name)
        print(f"same: {case}")
    model = _OwnLogits.from_pretrained(folders["llama"], dtype=torch.float32)
    model, loss_of = sharded(model)
    assert loss_of is None
    model(input_ids=IDS, use_cache=False).logits.sum().backward()  # with the head, in forward and backward
    head = nn.Sequential(model.get_output_embeddings())
    model = LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    model.lm_head = head
    assert probe_head_loss(model, {"input_ids": IDS}) is None
    model = LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    model.config.logit_temperature = 2.0
    assert probe_head_loss(model, {"input_ids": IDS}) is None
    stop_process_group()
    return 0


def test_sharded_models_have_the_losses_and_gradients_of_their_own_logits(models: Models, tmp_path: Path) -> None:
    folders = {}
    for case, options in CASES.items():
        overrides = {name: value for name, value in options.items() if name != "trained"}
        folders[case] = str(models(case.split(",")[0], **overrides))
    statuses, output = on_ranks(2, _compare, (folders,), tmp_path / "logs")
    assert statuses == [0, 0], output[-4000:]
    assert [line for line in output.splitlines() if line.startswith("The loss is computed from whole logits")] == [
        "The loss is computed from whole logits, which takes more memory: its logits are not its head's outputs, "
        "scaled or capped as its config says.",
        "The loss is computed from whole logits, which takes more memory: the head of LlamaForCausalLM is a "
        "Sequential.",
        "The loss is computed from whole logits, which takes more memory: its config has logit_temperature, which may "
        "change logits.",
    ]
