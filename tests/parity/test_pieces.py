"""Two ranks train on rows in pieces as on rows in one file, to the bit."""

import os
from pathlib import Path

import pytest

from fsdp_qlora.data import row_reader
from fsdp_qlora.data.batches import pieces
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.short_runs import options_of, trained


def train_rank(argv: list[str], in_pieces: bool) -> int:
    """A run on two datasets whose rows are in one file each, or in pieces of five."""
    import train

    place = argv.index("--dataset") + 2
    argv.insert(place, str(Path(argv[place - 1]).with_name("more.jsonl")))
    os.environ["FSDP_QLORA_CACHE"] = f"{argv[argv.index('--output_dir') + 1]}_cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "ROWS_PER_BATCH", 5)
        if in_pieces:
            patch.setattr(pieces, "MOST_ENTRIES", 5)
        return train.main(argv)


def test_two_ranks_train_the_same_adapter_on_pieces(models, tmp_path):
    options = options_of({"precision": "bf16"}, models, tmp_path, num_blocks=2)
    write_rows(tmp_path / "more.jsonl", make_rows(9, seed=1))
    results = {}
    for in_pieces in (True, False):
        losses, weights = trained(2, tmp_path / f"{in_pieces}", options, train_rank, in_pieces)
        results[in_pieces] = (losses, {name: each.tolist() for name, each in weights.items()})
        # Both datasets, and what is joined.
        cache = tmp_path / f"{in_pieces}_cache" / "tokenized"
        folders = [path for path in cache.iterdir() if path.is_dir()]
        assert len(folders) == (3 if in_pieces else 1)
    assert results[True] == results[False] and len(results[True][0]) == 4
