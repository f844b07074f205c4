"""Order, batches and held-out rows: an epoch loses no row."""

import dataclasses
import itertools

import numpy as np
import pytest

from fsdp_qlora.data.batches.micro_batch import pad_rows
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import (
    Schedule,
    epoch_order,
    split_by_length,
    split_by_tokens,
    split_eval,
)
from fsdp_qlora.data.batches.shared_tokens import RowTokens
from fsdp_qlora.utils.errors import UserError

pytestmark = pytest.mark.quick


def test_order_is_a_pure_function_of_seed_and_epoch():
    order = epoch_order(np.arange(100), seed=1, epoch=2)
    assert sorted(order.tolist()) == list(range(100))
    assert (epoch_order(np.arange(100), seed=1, epoch=2) == order).all()
    assert (epoch_order(np.arange(100), seed=1, epoch=3) != order).any()
    assert (epoch_order(np.arange(100), seed=2, epoch=2) != order).any()
    # Fixed for good: a run that resumes after an upgrade continues in the same order.
    assert epoch_order(np.arange(8), seed=42, epoch=0).tolist() == [0, 1, 4, 2, 6, 5, 7, 3]
    subset = np.array([3, 30, 5])
    assert sorted(epoch_order(subset, seed=0, epoch=0).tolist()) == [3, 5, 30]


@pytest.mark.parametrize("split", [split_by_length, split_by_tokens])
@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_an_epoch_holds_every_row_once_and_ranks_keep_in_step(
    split, data_size, batch_size, accumulation
):
    global_batch_size = data_size * batch_size * accumulation
    for num_rows in range(1, 41):
        lengths = np.random.default_rng(num_rows).integers(2, 50, size=num_rows + 7)
        rows = np.arange(7, num_rows + 7)  # a subset: rows 0 to 6 are held out
        order = epoch_order(rows, seed=0, epoch=num_rows)
        seen: list[int] = []
        num_steps = -(-num_rows // global_batch_size)
        for step in range(num_steps):
            step_rows = order[step * global_batch_size : (step + 1) * global_batch_size]
            rounds = split(step_rows, lengths, data_size=data_size, batch_size=batch_size)
            assert all(len(each) == data_size for each in rounds)
            if step < num_steps - 1:
                assert len(rounds) == accumulation
            pieces = list(itertools.chain(*rounds))
            sizes = [len(piece) for piece in pieces]
            assert max(sizes) <= batch_size
            assert split is split_by_tokens or max(sizes) - min(sizes) <= 1
            seen += [int(row) for piece in pieces for row in piece]
        assert sorted(seen) == rows.tolist()


def test_ranks_get_equal_work_in_each_micro_batch():
    lengths = np.array([10, 80, 30, 70, 20, 60, 40, 50])
    rounds = split_by_length(np.arange(8), lengths, data_size=2, batch_size=2)
    assert [[lengths[rows].tolist() for rows in each] for each in rounds] == [
        [[80, 70], [60, 50]],
        [[40, 30], [20, 10]],
    ]
    rounds = split_by_tokens(np.arange(8), lengths, data_size=2, batch_size=2)
    assert [[lengths[rows].tolist() for rows in each] for each in rounds] == [
        [[80, 10], [70, 20]],
        [[60, 30], [50, 40]],
    ]
    schedule = Schedule(8, 2, 8, 2, num_epochs=1, max_steps=-1, seed=0)
    assert schedule.useful_shares(rounds, lengths) == (1.0, 1.0)
    # 90 tokens are filled up to 128 for graphs.
    assert schedule.useful_shares(rounds, lengths, fills_up=True) == (90 / 128, 90 / 128)
    padded = dataclasses.replace(schedule, batching="padded")
    # Of 2 x (80 + 60 + 40 + 20) tokens, and of twice 2 x (80 + 40) in the time of the first rank.
    assert padded.useful_shares(padded.rounds(np.arange(8), lengths), lengths) == (
        360 / 400,
        360 / 480,
    )


@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_packing_uses_the_fewest_micro_batches(data_size, batch_size):
    context_length = 64
    room = batch_size * 64
    for seed in range(30):
        lengths = np.random.default_rng(seed).integers(2, context_length + 1, size=48)
        sizes = {"data_size": data_size, "batch_size": batch_size}
        rounds = split_by_tokens(np.arange(48), lengths, **sizes, most_tokens=room)
        pieces = list(itertools.chain(*rounds))
        assert sorted(row for piece in pieces for row in piece.tolist()) == list(range(48))
        tokens = [int(lengths[piece].sum()) for piece in pieces]
        assert max(tokens) <= room and tokens == sorted(tokens, reverse=True)
        needed = -(-int(lengths.sum()) // (data_size * room))
        # What is left free in a micro-batch is less than the longest row (at most half of it for
        # batch_size 1).
        assert (
            needed
            <= len(rounds)
            <= max(needed + 1, -(-2 * needed * batch_size // (2 * batch_size - 1)) + 1)
        )
        assert len(rounds) <= -(-48 // (data_size * batch_size))


@pytest.mark.parametrize(
    ("data_size", "batch_size", "answers"), [(1, 4, 8), (2, 4, 8), (2, 8, 4), (1, 12, 4), (2, 8, 8)]
)
def test_answers_to_a_prompt_stay_in_its_micro_batches(data_size, batch_size, answers):
    generator = np.random.default_rng(batch_size)
    rows = np.arange(data_size * batch_size * answers)
    schedule = Schedule(
        len(rows), batch_size, len(rows), data_size, 1, -1, 0, num_generations=answers
    )
    assert not schedule.why_apart(in_rows=False)
    for changes, reason in [
        ({"batch_size": 5, "global_batch_size": 5 * data_size}, "do not go into"),
        ({"batch_size": 1}, "one answer"),
        ({"num_generations": 1}, "one answer"),
        ({"data_size": 7}, "no whole micro-batches"),
        ({"batching": "packed"}, "packed"),
    ]:
        other = dataclasses.replace(schedule, **changes)
        assert reason in other.why_apart(in_rows=False) and not other.why_apart(in_rows=True)
    prompts = generator.integers(1, 900, len(rows) // answers).repeat(answers)
    lengths = prompts + generator.integers(1, 100, len(rows))
    rounds = schedule.rounds(rows, lengths, prompts)
    pieces = [*itertools.chain(*rounds)]
    assert sorted(np.concatenate(pieces)) == rows.tolist()
    assert {len(piece) for piece in pieces} == {batch_size}
    # As few prompts in a micro-batch as it can have.
    assert {len({*(piece // answers)}) for piece in pieces} == {max(1, batch_size // answers)}
    tokens = RowTokens(lengths, rows // answers, prompts)
    sizes = [schedule.tokens_computed(piece, tokens) for piece in pieces]
    own = [sum(lengths[piece] - prompts[piece]) for piece in pieces]
    of_prompts = [sum(prompts[np.unique(piece // answers) * answers]) for piece in pieces]
    assert sizes == np.add(own, of_prompts).tolist() == sorted(sizes, reverse=True)


def test_schedule_resumed_mid_epoch_has_the_same_remaining_rows():
    for num_rows, batch_size in ((23, 1), (24, 2), (5, 3)):
        schedule = Schedule(
            num_rows, batch_size, 4 * batch_size, 2, num_epochs=3, max_steps=-1, seed=7
        )
        rows = np.arange(num_rows) * 10
        whole = [(step, part.tolist()) for step, part in schedule.rows_of_steps(rows)]
        for first in range(schedule.total_steps + 1):
            parts = schedule.rows_of_steps(rows, first=first)
            assert [(step, part.tolist()) for step, part in parts] == whole[first:]
        # On other ranks the steps keep their rows.
        other = dataclasses.replace(schedule, data_size=3)
        assert [(step, part.tolist()) for step, part in other.rows_of_steps(rows)] == whole


@pytest.mark.parametrize(("fraction", "num_eval"), [(0.0, 0), (0.001, 1), (0.1, 10), (0.5, 50)])
def test_held_out_rows_are_fixed_by_the_seed_and_never_trained_on(fraction, num_eval):
    train, held_out = split_eval(100, fraction=fraction, seed=1)
    assert len(held_out) == num_eval
    assert sorted([*train, *held_out]) == list(range(100))
    again = split_eval(100, fraction=fraction, seed=1)
    assert np.array_equal(again[0], train) and np.array_equal(again[1], held_out)
    if num_eval:
        assert not np.array_equal(split_eval(100, fraction=fraction, seed=2)[1], held_out)
        with pytest.raises(UserError, match="eval_fraction"):
            split_eval(1, fraction=fraction, seed=0)


def test_batch_is_padded_on_the_right_and_labels_only_what_is_learned():
    tokenized = TokenizedRows(
        input_ids=np.array([5, 6, 7, 8, 9, 5, 4], dtype=np.int32),
        learned=np.array([False, False, True, True, True, True, True]),
        offsets=np.array([0, 5, 7]),
        row_numbers=np.array([1, 2]),
    )
    batch = pad_rows(tokenized, np.array([1, 0]), pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 4, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.targets.tolist() == [4, 7, 8, 9]
    # each is predicted from the token before it
    assert batch.target_rows.tolist() == [0, 5 + 1, 5 + 2, 5 + 3]
    assert len(batch.targets) == tokenized.num_targets.sum() == 4
    nothing = pad_rows(tokenized, np.zeros(0, dtype=np.int64), pad_token_id=3)
    assert nothing.input_ids.tolist() == [[3, 3]]
    assert nothing.targets.tolist() == [-100]
