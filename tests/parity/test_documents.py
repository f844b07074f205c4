"""Padding-free rows against the same rows padded: losses, gradients, and which tokens attend to
which.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdp_qlora.data.batches.micro_batch import MicroBatch, concatenate_rows, pad_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.model.architecture.attention import choose, packing_blocker
from fsdp_qlora.model.architecture.token_mixers import keep_documents_apart
from fsdp_qlora.training.cross_entropy import CrossEntropy
from fsdp_qlora.training.whole_logits import loss_of_logits
from tests.helpers.metrics import read_metrics
from tests.helpers.rounding import SGD, rounding
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.parity.test_hybrids import HYBRIDS, WITHOUT_PADDING

# Windows that are shorter than the longest rows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7},  # with a soft cap
    "gemma3_text": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # with sinks
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    **WITHOUT_PADDING,
}
LENGTHS = np.array([12, 30, 12, 3, 9])
TOKENS = int(LENGTHS.sum())


@pytest.fixture(scope="module")
def rows() -> TokenizedRows:
    generator = np.random.default_rng(0)
    return TokenizedRows(
        input_ids=generator.integers(2, 300, size=TOKENS, dtype=np.int32),
        learned=generator.random(TOKENS) < 0.6,
        offsets=np.array([0, *np.cumsum(LENGTHS)]),
        row_numbers=np.arange(1, len(LENGTHS) + 1),
    )


def load(folder: Path) -> tuple[PreTrainedModel, str]:
    """A model with its own attention, and the name of that for documents."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    name = choose(model.config, torch.float32, torch.device("cpu"), requested="auto")
    keep_documents_apart(model)
    assert packing_blocker(model) is None and name is not None
    return model, name


def loss_and_gradients(
    model: PreTrainedModel, batch: MicroBatch
) -> tuple[float, list[torch.Tensor]]:
    loss = loss_of_logits(
        model, batch.model_inputs, batch.target_rows, batch.targets, CrossEntropy()
    )
    model.zero_grad()
    loss.backward()
    return loss.item(), [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_padded_rows(family, models, rows):
    model, documents = load(models(family, **FAMILIES[family]))
    order = np.array([1, 0, 2, 4, 3])  # two of equal length are neighbours
    loss, gradients = loss_and_gradients(model, pad_rows(rows, order, pad_token_id=0))
    model.config._attn_implementation = documents
    assert_same(
        loss_and_gradients(model, concatenate_rows(rows, order, pad_token_id=0)), (loss, gradients)
    )
    pairs = with_shared_prompts(rows)
    order = np.array([1, 0])
    repeated, shared = (
        concatenate_rows(pairs, order, pad_token_id=0, shares_prompts=shares)
        for shares in (False, True)
    )
    assert (repeated.input_ids.shape[1], shared.input_ids.shape[1]) == (66, 66 - 9 - 5)
    assert_same(loss_and_gradients(model, shared), loss_and_gradients(model, repeated))
    answers = answers_to_prompts(rows)
    order = np.array([2, 0, 3, 1])  # two prompts in turn
    repeated, shared = (
        concatenate_rows(answers, order, pad_token_id=0, shares_prompts=shares)
        for shares in (False, True)
    )
    assert repeated.input_ids.shape[1] - shared.input_ids.shape[1] == 7 + 4
    assert_same(loss_and_gradients(model, shared), loss_and_gradients(model, repeated))


def assert_same(
    found: tuple[float, list[torch.Tensor]], expected: tuple[float, list[torch.Tensor]]
) -> None:
    """The loss and all gradients, which are sums over the tokens."""
    assert found[0] == pytest.approx(expected[0], rel=rounding(TOKENS))
    assert len(found[1]) == len(expected[1]) > 10
    off = torch.stack(
        [(own - each).norm() for own, each in zip(found[1], expected[1], strict=True)]
    ).norm()
    assert off / torch.stack([each.norm() for each in expected[1]]).norm() < rounding(TOKENS)


def with_shared_prompts(rows: TokenizedRows) -> TokenizedRows:
    """Two rows of two documents: of 12 and 30 tokens, which begin with the same 5, and twice 12,
    with the same 9.
    """
    ids = rows.input_ids.copy()
    ids[12:17] = ids[:5]
    ids[54:63] = ids[42:51]
    ids[[17, 63]] = (ids[[5, 51]] + 1) % 300
    return TokenizedRows(
        ids, rows.learned, np.array([0, 42, 66]), np.array([1, 2]), splits=np.array([12, 12])
    )


def answers_to_prompts(rows: TokenizedRows) -> TokenizedRows:
    """Two answers to a prompt of 7 tokens, and two to one of 4."""
    lengths = [12, 30, 9, 11]
    ids = rows.input_ids[: sum(lengths)].copy()
    offsets = np.cumsum([0, *lengths])
    ids[12:19] = ids[:7]
    ids[51:55] = ids[42:46]
    prompts = np.array([7, 7, 4, 4])
    learned = np.arange(len(ids)) - offsets[:-1].repeat(lengths) >= prompts.repeat(lengths)
    table = TokenizedRows(ids, learned, offsets, np.array([1, 1, 2, 2]))
    return table.with_columns("row", prompt_tokens=prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_another_document(family, models, rows):
    model, documents = load(models(family, **FAMILIES[family]))
    model.config._attn_implementation = documents
    batch = concatenate_rows(rows, np.array([1, 0, 2]), pad_token_id=0)
    changed = batch.input_ids.clone()
    changed[0, 30:42] = changed[0, 30:42].flip(0) + 1  # the one in the middle
    with torch.no_grad():
        before, after = (
            model(input_ids=ids, use_cache=False, **batch.documents).logits[0]
            for ids in (batch.input_ids, changed)
        )
    same = torch.equal
    if "num_local_experts" in FAMILIES[family]:
        # Other tokens beside a token in its expert's product change the order of a sum.
        same = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    assert same(before[:30], after[:30]) and same(before[42:], after[42:])
    assert (before[30:42] - after[30:42]).abs().amax(dim=-1).min() > 0.01


def test_documents_say_where_they_begin_and_a_rank_without_rows_has_one(rows):
    documents = concatenate_rows(rows, np.array([3, 4]), pad_token_id=0).documents
    assert documents["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert (
        documents["cu_seq_lens_q"].tolist() == [0, 3, 12]
        and documents["cu_seq_lens_q"].dtype == torch.int32
    )
    assert (documents["max_length_q"], documents["document_lengths"]) == (9, [3, 9])
    nothing = concatenate_rows(rows, [], pad_token_id=3)
    assert nothing.input_ids.tolist() == [[3, 3]] and nothing.targets.tolist() == [-100]
    assert nothing.documents["document_lengths"] == [2]


RUN = {
    **SGD,
    "precision": "fp32",
    "batch_size": 2,
    "gradient_accumulation_steps": 3,
    "eval_fraction": 0.2,
}


def numbers(folder: Path) -> list[float]:
    return [
        number for key in ("loss", "grad_norm", "eval_loss") for number in read_metrics(folder, key)
    ]


def test_padded_padding_free_and_packed_runs_continue_each_other(models, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    options = {
        "model_name": models("llama"),
        "dataset": data,
        "train_type": "lora",
        "context_length": 512,
        **RUN,
    }
    train_ok(2, tmp_path / "padded", batching="padded", save_every=1, save_total_limit=9, **options)
    train_ok(2, tmp_path / "free", **options)
    train_ok(2, tmp_path / "packed", batching="packed", **options)
    train_ok(
        2, tmp_path / "continued", resume=tmp_path / "padded/checkpoints/step_000001", **options
    )
    expected = numbers(tmp_path / "padded")
    assert len(expected) == 8
    for name in ("free", "packed", "continued"):
        # A row has at most 100 tokens, and the sum of the step's twelve rows is one.
        assert numbers(tmp_path / name) == pytest.approx(expected, rel=rounding(12 * 100)), name
    for name in ("free", "packed"):
        assert set(read_metrics(tmp_path / name, "useful_of_computed")) == {1.0}
    padded, free = (
        read_metrics(tmp_path / name, "useful_of_lock_step") for name in ("padded", "free")
    )
    assert all(a < b for a, b in zip(padded, free, strict=True))


@pytest.mark.parametrize(
    ("family", "reason"),
    [("minimax", "a second document in a row differs by "), ("bloom", "it takes no positions")],
)
def test_models_that_other_documents_would_change_are_padded(family, reason, models, tmp_path):
    shape = HYBRIDS[family].shape if family in HYBRIDS else {}
    data = write_rows(tmp_path / "rows.jsonl", make_rows(10))
    options = {"model_name": models(family, **shape), "dataset": data, "train_type": "lora", **RUN}
    train_ok(1, tmp_path / "padded", batching="padded", **options)
    said = train_ok(1, tmp_path / "packed", batching="packed", **options)
    assert f"Rows are padded with this model, and --batching packed has no effect: {reason}" in said
    assert numbers(tmp_path / "packed") == numbers(tmp_path / "padded")
