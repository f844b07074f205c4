"""`--use_cpu_offload N` on the stand-in: what it copies in a step on one rank equals a formula, and a run may be
continued with another number."""

from collections import Counter

from tests.phantom.environment import run
from tests.phantom.test_steps import NUMBERS, sizes, step

__all__ = ["step"]  # the fixture
BLOCKS, OFFLOADED, MICRO_BATCHES = 4, 3, 2


def test_some_offloaded_blocks_are_copied_once_forward_and_once_backward_beside_the_computation(step, models):
    model = models(num_hidden_layers=BLOCKS)
    options = {"use_cpu_offload": OFFLOADED, "gradient_accumulation_steps": MICRO_BATCHES}
    counts = step(1, model_name=model, **options)
    moved = Counter()
    for copied in counts["copies"]:
        assert copied["pinned"] or not copied["stream"], copied
        moved[copied["kind"], "beside" if copied["stream"] else "at work"] += copied["bytes"] * copied["count"]
    _, blocks, _, _, _ = sizes(model, 1)
    # Two of them are on the device at a time: where backward begins the last and the one before it, where the next
    # forward pass begins the first alone.
    offloaded = blocks[:OFFLOADED]  # all blocks have the same size
    weights = MICRO_BATCHES * (sum(offloaded[1:]) + sum(offloaded[:-2]))
    assert 0 <= moved["host_to_device", "beside"] - weights < MICRO_BATCHES * BLOCKS * 64 * 30  # between parameters
    assert moved["host_to_device", "at work"] < MICRO_BATCHES * 16 * 1024  # the batch
    assert moved["device_to_host", "at work"] == 8 * NUMBERS and not moved["device_to_host", "beside"]


def test_state_goes_where_the_optimizer_of_another_offload_keeps_it(tmp_path):
    [rank] = run(["tests/phantom/programs/other_offload.py"], tmp_path)
    assert rank.status == 0, rank.output[-3000:]
