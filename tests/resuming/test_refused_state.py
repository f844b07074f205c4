"""What cannot be resumed here is refused before anything of an earlier run is removed."""

from collections.abc import Callable
from pathlib import Path

from tests.tiny import flags, make_rows, run_ranks, train_ok, write_rows


def test_a_state_of_another_number_of_ranks_is_refused_while_the_earlier_results_are_there(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    options = {
        "model_name": models(),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        "train_type": "lora",
        "lora_rank": 256,
        "batch_size": 1,
        "max_steps": 1,
    }
    train_ok(2, tmp_path / "two", **options, optimizer="adamw_8bit", gradient_accumulation_steps=1)
    train_ok(1, tmp_path / "one", **options, gradient_accumulation_steps=2)
    before = sorted(tmp_path.glob("one/**/*"))
    again = {**options, "optimizer": "adamw_8bit", "gradient_accumulation_steps": 2}
    argv = flags(**again, output_dir=tmp_path / "one", overwrite_output_dir=True, resume=tmp_path / "two")
    statuses, output = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [2] and "can be resumed on 2 ranks only" in output, output
    # The log of the refusal may be new.
    assert (tmp_path / "one" / "adapter_model.safetensors") in before
    assert {path for path in before if not path.exists()} == set()
