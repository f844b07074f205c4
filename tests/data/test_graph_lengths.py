"""Lengths to which micro-batches are filled up, so that graphs of blocks serve many of them."""

import numpy as np
import pytest
import torch

from fsdp_qlora.data.batches.collator import Collator
from fsdp_qlora.data.batches.graph_lengths import MOST_TOKENS, filled_length, with_bounds_alone
from fsdp_qlora.data.batches.micro_batch import concatenate_rows, describe_documents
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.batches.shared_tokens import SharedTokens

pytestmark = pytest.mark.quick


def test_lengths_are_few_and_little_is_padding():
    lengths = {filled_length(number) for number in range(1, MOST_TOKENS + 1)}
    # eight up to 512, and eight between two powers of two
    assert len(lengths) == 8 + 4 * 8
    for number in range(512, MOST_TOKENS + 1):
        assert number <= filled_length(number) < number * 9 / 8
    for full in (512, 1024, 2048, 4096, MOST_TOKENS):
        assert filled_length(full) == full
    assert filled_length(MOST_TOKENS + 1) == MOST_TOKENS + 1


def test_bounds_of_documents_say_the_same_to_all_micro_batches_of_a_length():
    forms = set()
    for lengths in ([100, 28], [1, 2, 3, 122], [128]):
        described = with_bounds_alone(describe_documents(lengths), 128)
        bounds = described["cu_seq_lens_q"]
        # documents as they are, and empty ones behind them
        assert bounds.diff()[: len(lengths)].tolist() == lengths
        assert not bounds.diff()[len(lengths) :].any() and bounds.dtype == torch.int32
        assert torch.equal(bounds, described["cu_seq_lens_k"])
        facts = [described[name] for name in ("max_length_q", "max_length_k")]
        forms.add((len(bounds), *facts, tuple(described["document_lengths"])))
    assert len(forms) == 1
    assert with_bounds_alone({"mask": None}, 128) == {"mask": None}


def test_documents_that_share_tokens_have_few_forms():
    forms = set()
    for count in range(1, 40):
        # A prompt of `count` tokens, three answers to it, and a document of padding.
        own = [(128 - count) // 4] * 3
        lengths = [count + each for each in own] + [128 - count - sum(own)]
        shared = SharedTokens([0, count, count, 0], [0, 0, 0, 3])
        described = describe_documents(lengths, shared)
        filled = with_bounds_alone(described, 128)
        assert filled["own_ends"].diff()[:4].tolist() == [lengths[0], *own[1:], lengths[3]]
        assert filled["own_ends"][-1] == 128
        assert filled["document_ends"].diff()[:4].tolist() == lengths
        assert filled["document_ends"][-1] == len(filled["places"]) == filled["document_lengths"][0]
        assert sorted(filled["copies"].flatten().tolist() + described["own_tokens"].tolist()) == [
            *range(len(filled["places"]))
        ]
        sizes = {name: value.shape for name, value in filled.items() if hasattr(value, "shape")}
        forms.add((*sizes.items(), *filled["document_lengths"]))
    assert len(forms) == 2


def test_a_micro_batch_that_is_filled_up_learns_the_same_tokens():
    ids = np.arange(100, dtype=np.int32)
    learned = np.arange(100) % 3 > 0
    offsets = np.array([0, 41, 100])
    table = TokenizedRows(ids, learned, offsets, np.array([1, 2]))
    rows = np.array([0, 1])
    plain = concatenate_rows(table, rows, pad_token_id=7)
    filled = concatenate_rows(table, rows, pad_token_id=7, num_parts=filled_length(100))
    assert filled.input_ids.shape == (1, 128) and plain.input_ids.shape == (1, 100)
    assert torch.equal(filled.input_ids[:, :100], plain.input_ids)
    for name in ("targets", "target_rows", "target_counts"):
        assert torch.equal(getattr(filled, name), getattr(plain, name))
    assert filled.num_targets == plain.num_targets


@pytest.mark.parametrize("fills_up", [False, True])
@pytest.mark.parametrize("batching", ["padding_free", "padded"])
def test_useful_tokens_are_a_share_of_those_that_micro_batches_have(fills_up, batching):
    lengths = np.array([10, 200, 41, 59, 300, 7])
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(offsets[-1], dtype=np.int32)
    table = TokenizedRows(ids, ids % 3 > 0, offsets, np.arange(1, 7))
    schedule = Schedule(6, 2, 6, 1, num_epochs=1, max_steps=-1, seed=0, batching=batching)
    collator = Collator(schedule, pad_token_id=7, fills_up=fills_up)
    batches = collator.lay_out_step(table, np.arange(6))
    computed = sum(batch.input_ids.numel() for batch in batches)
    assert (computed > len(ids)) == (fills_up or batching == "padded")
    assert batches.sizes()["useful_of_computed"] == round(len(ids) / computed, 4)
