"""What train.py chooses by the memory of the GPUs that it sees."""

import pytest

from tests.phantom.environment import run
from tests.tiny import flags, make_rows, write_rows


@pytest.fixture
def train(models, tmp_path):
    """train(ranks, **settings) -> the ranks as they ended, and whether there is an adapter."""

    def start(ranks: int, *, settings=None, settings_of_rank=None):
        options = {"train_type": "qlora", "max_steps": 2, "batch_size": 2, "context_length": 256, "quant_cache": "off"}
        options |= {"model_name": models(), "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(16))}
        words = flags(**options, output_dir=tmp_path / "output", log_to="stdout")
        ended = run(["train.py", *words], tmp_path, ranks=ranks, settings=settings, settings_of_rank=settings_of_rank)
        return ended, (tmp_path / "output" / "adapter_model.safetensors").exists()

    return start


@pytest.mark.slow
def test_auto_replicates_what_fits_and_keeps_the_activations(train):
    ended, is_saved = train(2)
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert "Placement: ddp. With a margin ddp needs 1.0 GiB" in ended[0].output
    assert "each rank holds a whole copy" in ended[0].output
    assert "Recompute: 0 of 2 blocks, found by probing." in ended[0].output


@pytest.mark.slow
def test_all_ranks_do_what_the_smallest_card_needs(train):
    ended, is_saved = train(2, settings_of_rank={1: {"PHANTOM_GIB": 1}})
    assert [rank.status for rank in ended] == [0, 0] and is_saved, ended[0].output[-4000:]
    assert "Placement: full_shard with the base in host memory. With a margin ddp needs 1.0" in ended[0].output
    assert "Recompute: 2 of 2 blocks, found by probing." in ended[0].output


def test_a_card_that_is_too_small_ends_the_run_as_out_of_memory(train):
    [rank], is_saved = train(1, settings={"PHANTOM_GIB": 0.01})
    assert rank.status not in (0, 2) and not is_saved, rank.output[-4000:]
    assert "out of memory" in rank.output.lower() and "Traceback" not in rank.output
