"""A run that continues with padded rows where they were not, or the other way round, says so."""

from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok
from tests.resuming.test_kernels import as_left

SAYS = "The run continues with other batches: rows"


def test_other_padding_than_before_is_one_line_where_it_is_known(models, tmp_path):
    options = {
        "model_name": models(),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(20)),
    }
    options |= {"max_steps": 4, "save_every": 2, "eval_fraction": 0, "device": "cpu"}
    whole = tmp_path / "whole"
    assert SAYS not in train_ok(1, whole, **options)
    same = as_left(whole, tmp_path / "same", lambda record: None)
    assert SAYS not in train_ok(1, same, **options)
    told = as_left(whole, tmp_path / "told", lambda record: None)
    said = train_ok(1, told, **options, batching="padded")
    assert said.count(f"{SAYS} not padded then, padded now.") == 1
    # The record is of the last steps, and not of the first ones.
    again = as_left(told, tmp_path / "again", lambda record: record.update(padded=True))
    said = train_ok(1, again, **options)
    assert said.count(f"{SAYS} padded then, not padded now.") == 1
    old = as_left(whole, tmp_path / "old", lambda record: record.pop("padded"))
    said = train_ok(1, old, **options, batching="padded")
    assert "Resuming at step 2" in said and SAYS not in said
