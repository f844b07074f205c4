"""What comes from outside reaches a terminal harmless."""

import json
import os
import re
from pathlib import Path

from tests.helpers.rows import write_rows
from tests.helpers.run import flags, on_ranks, run_ranks

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x00"


def test_escape_sequences_in_rows_are_shown_and_not_obeyed(models, tmp_path):
    rows = [{"instruction": f"name{EVIL}", "output": f"blue{EVIL}"}] * 8 + [
        {"instruction": "a", "output": [EVIL]}
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with data.open("a") as file:
        file.write(json.dumps({"x": 1})[:-1] + f', "{EVIL}": 2, "{EVIL}": 3}}\n')
    argv = flags(
        model_name=models(), dataset=data, output_dir=tmp_path / f"out{EVIL[:-1]}", dry_run=True
    )
    for more in ([], ["--max_bad_rows", "0.5"]):
        _, output = run_ranks(1, [*argv, *more], tmp_path / "logs")
        assert not re.search(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]", output.replace("\x1b[A", "")), output
    assert r"blue\x1b]0;title\x07" in output


def test_a_plan_shows_one_text_and_counts_rows_left_out_at_its_end(models, tmp_path):
    row = {"prompt": "which?", "chosen": "red", "rejected": "blue"}
    rows = [{**row, **{f"extra_{number}": 1 for number in range(7)}, "y" * 1000: 1}] * 8 + [
        {**row, "chosen": None}
    ] * 2
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = {
        "model_name": models(),
        "dataset": data,
        "objective": "dpo",
        "max_bad_rows": 0.5,
        "dry_run": True,
    }
    _, output = run_ranks(1, flags(**options), tmp_path / "logs")
    lines = output.splitlines()
    assert next(line for line in lines if "does not use: " in line).endswith(
        "extra_3, extra_4 and 3 more"
    )
    [sample] = [line for line in lines if line.startswith("Sample")]
    assert "red" in sample and "blue" not in sample
    assert lines[-1] == "Rows left out: 2 of 10"


def _read_damaged(path: str) -> int:
    from fsdp_qlora.data.batches.cache import read_cache
    from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging

    set_up_logging(read_ranks(), verbose=False)
    if os.environ["RANK"] == "1":
        assert read_cache(Path(path)) is None
    return 0


def test_damaged_rows_that_another_rank_than_0_finds_are_named(tmp_path):
    path = tmp_path / "rows.safetensors"
    path.write_bytes(b"damaged")
    _, output = on_ranks(2, _read_damaged, (str(path),), tmp_path / "logs")
    assert f"[rank 1] The tokenized rows in {path} are damaged" in output
