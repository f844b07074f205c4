"""The largest micro-batch of a run is the one that a look at each step finds."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.data.batches import largest
from fsdp_qlora.data.batches import rows as rows_of_tables
from fsdp_qlora.data.batches.largest import longest_micro_batch, most_values_packed
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Mixture, Schedule
from fsdp_qlora.data.batches.shared_tokens import RowTokens
from fsdp_qlora.data.content import num_common

pytestmark = pytest.mark.quick


def step_by_step(
    schedule: Schedule, train_rows: np.ndarray, lengths: np.ndarray, computed: RowTokens
) -> tuple[list[int], int]:
    """The same by splitting every step."""
    longest = train_rows[:0]
    most_rounds = 0
    for _, rows in schedule.rows_of_steps(train_rows):
        rounds = schedule.rounds(rows, lengths, computed.prompts)
        most_rounds = max(most_rounds, len(rounds))
        longest = max(
            [longest, *itertools.chain(*rounds)],
            key=lambda piece: schedule.tokens_computed(piece, computed),
        )
    return longest.tolist(), most_rounds


def lengths_of(generator: np.random.Generator, number: int) -> np.ndarray:
    """Lengths of a dataset: even ones, a few long ones, many that are cut, or hardly any others."""
    kind = generator.integers(4)
    if kind == 0:
        return generator.integers(1, 60, number)
    if kind == 1:
        return np.minimum(generator.geometric(0.05, number), 60)
    if kind == 2:
        return np.minimum(generator.integers(1, 400, number), 60)
    return generator.choice([1, 2, 59, 60], number)


def random_schedule(generator: np.random.Generator, **changes: Any) -> Schedule:
    data_size = int(generator.integers(1, 5))
    batch_size = int(generator.integers(1, 5))
    step = data_size * batch_size * int(generator.integers(1, 4))
    steps = int(generator.integers(1, 90))
    return Schedule(
        num_rows=max(1, steps * step - int(generator.integers(0, step))),
        batch_size=batch_size,
        global_batch_size=step,
        data_size=data_size,
        num_epochs=int(generator.integers(1, 4)),
        max_steps=int(generator.choice([-1, -1, 1 + steps // 2, steps + 1])),
        seed=int(generator.integers(9)),
        context_length=60,
        **changes,
    )


def check(schedule: Schedule, rows: np.ndarray, lengths: np.ndarray, computed: RowTokens) -> None:
    found, num_rounds = longest_micro_batch(schedule, rows, lengths, computed)
    assert (found.tolist(), num_rounds) == step_by_step(schedule, rows, lengths, computed)


@pytest.fixture(params=["at once", "in parts"])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr(largest, "_ROWS_AT_ONCE", 300)
        monkeypatch.setattr(largest, "_FEWEST_STEPS", 2)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("batching", ["padded", "padding_free", "packed"])
def test_largest_micro_batch_is_the_first_of_all_steps(batching):
    for seed in range(60):
        generator = np.random.default_rng(seed)
        schedule = random_schedule(generator, batching=batching)
        lengths = lengths_of(generator, schedule.num_rows + 5)
        rows = np.arange(5, schedule.num_rows + 5)
        own = lengths
        if seed % 3 == 0:  # of pairs that share a prompt, or learned documents
            own = generator.integers(1, lengths + 1)
        check(schedule, rows, lengths, RowTokens(own, np.arange(len(lengths))))


@pytest.mark.usefixtures("_parts")
def test_largest_micro_batch_with_mixtures_and_iterations():
    for seed in range(30):
        generator = np.random.default_rng(seed)
        schedule = random_schedule(generator, batching="padding_free")
        sizes = schedule.num_rows + generator.integers(0, 50, 2)
        parts = (schedule.num_rows - schedule.num_rows // 3, schedule.num_rows // 3)
        mixture = Mixture((int(sizes[0]), int(sizes.sum())), parts)
        lengths = lengths_of(generator, int(sizes.sum()))
        computed = RowTokens(lengths, np.arange(len(lengths)))
        mixed = dataclasses.replace(schedule, mixture=mixture)
        check(mixed, np.arange(len(lengths)), lengths, computed)
        iterations = int(generator.integers(2, 4))
        whole = schedule.num_rows // schedule.global_batch_size * schedule.global_batch_size
        repeated = dataclasses.replace(
            schedule, num_rows=max(1, whole) * iterations, num_iterations=iterations
        )
        check(repeated, np.arange(schedule.num_rows), lengths, computed)


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("shares", [True, False])
def test_largest_micro_batch_of_answers_to_prompts(shares):
    for seed in range(60):
        generator = np.random.default_rng(seed)
        schedule = random_schedule(generator)
        smaller, larger = sorted([int(generator.integers(2, 5)), schedule.batch_size * 2])
        answers = int(generator.choice([smaller, larger]))
        size = int(generator.choice([answers * 2, answers, max(2, answers // 2)]))
        if answers % min(size, answers) or max(size, answers) % min(size, answers):
            size = answers
        step = np.lcm(size * schedule.data_size, answers)
        prompts_of_step = int(step) // answers
        number = prompts_of_step * int(generator.integers(1, 70)) + int(generator.integers(3))
        schedule = dataclasses.replace(
            schedule,
            batch_size=size,
            global_batch_size=int(step),
            num_generations=answers,
            num_rows=max(1, number // prompts_of_step) * int(step),
        )
        prompts = lengths_of(generator, number)
        lengths = prompts + 20
        # Prompts of several datasets may have the same number.
        numbers = np.arange(number) if seed % 2 else generator.integers(0, number, number)
        computed = RowTokens(lengths, numbers, prompts if shares else None)
        check(schedule, np.arange(number), lengths, computed)


@pytest.mark.parametrize("batching", ["padded", "padding_free", "packed"])
def test_few_of_many_steps_are_split_to_find_the_largest(batching, monkeypatch):
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.geometric(0.01, 64_000), 400)
    schedule = Schedule(64_000, 4, 32, 2, 1, -1, 0, batching=batching, context_length=400)
    split = []
    rounds = Schedule.rounds

    def count(self: Schedule, *args: Any) -> Any:
        split.append(len(args[0]))
        return rounds(self, *args)

    monkeypatch.setattr(Schedule, "rounds", count)
    computed = RowTokens(lengths, np.arange(len(lengths)))
    found, _ = longest_micro_batch(schedule, np.arange(64_000), lengths, computed)
    assert 0 < len(split) < 10 and len(found)


def test_common_beginnings_of_pairs_are_counted_exactly(monkeypatch):
    for seed in range(40):
        generator = np.random.default_rng(seed)
        monkeypatch.setattr(
            rows_of_tables, "_TOKENS_COMPARED", int(generator.choice([1, 200, 10_000]))
        )
        texts = []
        splits = []
        for _ in range(int(generator.integers(1, 60))):
            prompt = generator.integers(0, 3, generator.integers(0, 90))
            first, second = (
                np.concatenate([prompt, generator.integers(0, 3, generator.integers(0, 90))])
                for _ in range(2)
            )
            if generator.integers(4) == 0:
                second = first[: generator.integers(0, len(first) + 1)]
            texts.append((first, second))
            splits.append(len(first))
        ids = [np.concatenate(pair) for pair in texts]
        table = TokenizedRows(
            np.concatenate(ids).astype(np.int32),
            np.ones(sum(map(len, ids)), np.bool_),
            np.cumsum([0, *map(len, ids)]),
            np.arange(len(ids)),
            np.array(splits),
        )
        expected = [num_common(first.tolist(), second.tolist()) for first, second in texts]
        assert table.num_shared.tolist() == expected


@pytest.mark.parametrize(
    ("rows", "num_micro_batches"),
    [
        # (rows, tokens, values): long rows with the most values would hide how many others fit
        ([(20, 8_000, 10_000), (1_000, 300, 9_900)], 64),
        ([(20, 8_000, 900_000), (1_000, 300, 9_900)], 64),
        ([(50, 100, 7), (500, 3_000, 500), (500, 20, 0)], 16),
        ([(400, 50, 3_000)], 2),  # fewer rows in a step than fit
    ],
)
def test_no_packed_micro_batch_has_more_values_than_the_bound(rows, num_micro_batches):
    counts, lengths, values = (np.array(column) for column in zip(*rows, strict=True))
    lengths, values = lengths.repeat(counts), values.repeat(counts)
    schedule = Schedule(
        num_rows=len(lengths),
        batch_size=1,
        global_batch_size=num_micro_batches,
        data_size=2,
        num_epochs=3,
        max_steps=-1,
        seed=1,
        batching="packed",
        context_length=8_192,
    )
    bound = most_values_packed(
        values, lengths, most_tokens=8_192, most_rows=schedule.global_batch_size
    )
    most = max(
        values[piece].sum()
        for _, of_step in schedule.rows_of_steps(np.arange(len(lengths)))
        for piece in itertools.chain(*schedule.rounds(of_step, lengths))
    )
    # A rank's rows fill their micro-batches only in part.
    assert most <= bound <= 2 * max(most, values.max())
