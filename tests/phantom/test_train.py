"""train.py on the GPU path, from its command line to the saved adapter."""

from collections import Counter

import pytest

from tests.phantom.environment import run, subtract
from tests.tiny import flags, make_rows, write_rows

STEPS = 2


@pytest.fixture(scope="module")
def train(models, tmp_path_factory):
    """Run train.py on a tiny model: train(ranks, **options) -> (ranks as they ended, output folder)."""
    model, folder = models(), tmp_path_factory.mktemp("phantom")
    dataset = write_rows(folder / "rows.jsonl", make_rows(16))

    def start(ranks: int, *, settings=None, settings_of_rank=None, **options: object):
        run_folder = tmp_path_factory.mktemp("run")
        output_dir = run_folder / "output"
        arguments = flags(
            model_name=model,
            dataset=dataset,
            output_dir=output_dir,
            **{"train_type": "qlora", "max_steps": STEPS, "batch_size": 2, "context_length": 256, "seed": 0}
            | {"quant_cache": "off", "log_to": "stdout"}
            | options,
        )
        ended = run(
            ["train.py", *arguments],
            run_folder,
            ranks=ranks,
            settings=settings,
            settings_of_rank=settings_of_rank,
            summary=True,
        )
        return ended, output_dir

    return start


def assert_finished(ended, output_dir):
    assert [rank.status for rank in ended] == [0] * len(ended), ended[0].output[-4000:] + ended[-1].output[-4000:]
    assert "(NCCL)" in ended[0].output
    assert (output_dir / "adapter_model.safetensors").stat().st_size > 0
    assert (output_dir / "adapter_config.json").exists()


def test_qlora_on_one_gpu_ends_with_a_saved_adapter_and_a_step_allocates_nothing_new(train):
    few, many = train(1), train(1, max_steps=STEPS + 1)
    assert_finished(*few)
    assert_finished(*many)
    step = subtract(many[0][0].summary, few[0][0].summary)
    assert step["kernels"] > step["matrix_products"] > 0
    assert step["mallocs"] == step["pinned_allocations"] == 0
    assert step["syncs"]  # the loss is printed
    assert all(sync["line"].startswith("fsdp_qlora/") for sync in step["syncs"])


def test_qlora_on_two_gpus_ends_with_a_saved_adapter_and_both_take_part_in_the_same_collectives(train):
    ended, output_dir = train(2, sharding_strategy="full_shard")
    assert_finished(ended, output_dir)
    parts, moved = [], Counter()
    for rank in ended:
        between_two = [each for each in rank.summary["collectives"] if each["kind"] in ("send", "recv")]
        for each in between_two:
            moved[each["kind"]] += each["bytes"] * each["count"]
        others = [each for each in rank.summary["collectives"] if each not in between_two]
        parts.append(sorted((each["kind"], each["bytes"], each["group_size"], each["count"]) for each in others))
    assert parts[0] == parts[1]
    assert moved["send"] == moved["recv"] > 0
    assert {"all_gather", "reduce_scatter"} <= {kind for kind, *_ in parts[0]}


def test_auto_replicates_what_fits_and_keeps_the_activations(train):
    ended, output_dir = train(2)
    assert_finished(ended, output_dir)
    assert "Placement: ddp. With a margin ddp needs 1.0 GiB" in ended[0].output
    assert "each rank holds a whole copy" in ended[0].output
    assert "Recompute: 0 of 2 blocks, found by trial." in ended[0].output


def test_all_ranks_do_what_the_smallest_card_needs(train):
    ended, output_dir = train(2, settings_of_rank={1: {"PHANTOM_GIB": 1}})
    assert_finished(ended, output_dir)
    assert "Placement: full_shard with the base in host memory. With a margin ddp needs 1.0" in ended[0].output
    assert "Recompute: 2 of 2 blocks, found by trial." in ended[0].output


def test_a_card_that_is_too_small_ends_the_run_as_out_of_memory(train):
    [rank], output_dir = train(1, settings={"PHANTOM_GIB": 0.01})
    assert rank.status not in (0, 2), rank.output[-4000:]
    assert "out of memory" in rank.output.lower() and "Traceback" not in rank.output
    assert not (output_dir / "adapter_model.safetensors").exists()
