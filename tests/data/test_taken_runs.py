"""Runs of few steps on a large dataset: several ranks, dry runs, and starts that continue one."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from fsdp_qlora.data import taken_rows
from tests.chaos.harness import KILLED, RANKS, adapter, at_step, numbers, run
from tests.helpers.models import Models
from tests.helpers.run import flags, run_ranks

LARGE = 140_000


def options_of(models: Models, folder: Path, count: int, **changes: Any) -> dict[str, Any]:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            f'{{"instruction": "Say {n}.", "input": "", "output": "{n} {"a" * (n % 5)}"}}\n'
            for n in range(count)
        )
    )
    options = {"model_name": models(), "dataset": path, "precision": "fp32", "lora_rank": 4}
    options |= {"gradient_accumulation_steps": 2, "max_steps": 6, "save_every": 2, "lr": 1e-3}
    options |= {"log_to": "stdout", "quant_cache": "off", "context_length": 128}
    return {**options, **changes}


def record_of(output_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output_dir / "run.json").read_text())
    return content


def make_small_large() -> None:
    """Let a part be taken of a dataset with 4,000 rows."""
    taken_rows._LEAST_ROWS = 4000


def test_ranks_take_one_part_and_a_start_that_continues_keeps_it(models, tmp_path):
    options = options_of(models, tmp_path, LARGE, eval_fraction=0.1, eval_steps=3)
    dry = flags(**options, output_dir=tmp_path / "dry", dry_run=True, nproc_per_node=RANKS)
    statuses, planned = run_ranks(1, [*dry, "--device", "cpu"], tmp_path / "logs_dry")
    assert statuses == [0], planned[-4000:]
    assert "Rows taken: 0.7" in planned and "Tokenizing" in planned
    shown = flags(**options, output_dir=tmp_path / "dry", dry_run="samples=2")
    statuses, samples = run_ranks(1, [*shown, "--nproc_per_node", "2"], tmp_path / "logs_shown")
    assert statuses == [0] and "Tokenizing" not in samples and "Rows taken: 0.7" in samples
    whole = run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "logs")
    assert "Tokenizing" not in whole  # the dry run has filled the cache
    for start in ("Rows taken:", "Rows:", "Steps: 6 of 4 rows"):
        [line] = {line for line in planned.splitlines() if line.startswith(start)}
        assert line in whole
    [taken] = record_of(tmp_path / "whole")["taken"]
    assert 0.007 < taken["share"] < 0.009
    [described] = record_of(tmp_path / "whole")["data"]
    assert 1000 < described["rows"] < 1300

    out = {**options, "output_dir": tmp_path / "out"}
    run(out, tmp_path / "logs0", ANY, fault=partial(at_step, 4, KILLED, 1))
    # A new run would take more rows now, but this one has its rows.
    said = run({**out, "max_bad_rows": 0.5}, tmp_path / "logs1")
    assert "Resuming at step 4" in said
    assert adapter(tmp_path / "out") == adapter(tmp_path / "whole")
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")


def test_a_run_that_took_all_rows_continues_with_all(models, tmp_path):
    options = options_of(models, tmp_path, 6000)
    run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "logs")
    out = {**options, "output_dir": tmp_path / "out"}
    run(out, tmp_path / "logs0", ANY, fault=partial(at_step, 4, KILLED, 1))
    assert "taken" not in record_of(tmp_path / "out")
    said = run(out, tmp_path / "logs1", fault=make_small_large)
    assert "Resuming at step 4" in said and "Rows taken" not in said
    assert adapter(tmp_path / "out") == adapter(tmp_path / "whole")
    assert numbers(tmp_path / "out") == numbers(tmp_path / "whole")
    anew = {**options, "output_dir": tmp_path / "anew"}
    said = run(anew, tmp_path / "logs2", fault=make_small_large)
    assert "Rows taken" in said and record_of(tmp_path / "anew")["taken"]


def test_a_run_that_replaces_another_never_ends_before_its_steps(models, tmp_path):
    out = {**options_of(models, tmp_path, 9000), "output_dir": tmp_path / "out"}
    run(out, tmp_path / "logs0", ANY, fault=_killed_with_a_part)
    assert record_of(tmp_path / "out")["taken"]
    out |= {"gradient_accumulation_steps": 400, "max_steps": 6, "resume": "auto:replace"}
    said = run(out, tmp_path / "logs1", ANY)
    assert "--max_steps 6: the rows that were taken for the unfinished run are enough" in said
    assert "with --resume off:replace." in said


def _killed_with_a_part() -> None:
    make_small_large()
    at_step(4, KILLED, 1)


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}], ids=["places", "first"])
def test_held_out_rows_of_a_part_are_read_again_as_its_prompts(changes, models, tmp_path):
    options = options_of(models, tmp_path, 6000, eval_fraction=0.01, eval_steps=3, **changes)
    (tmp_path / "own.py").write_text(
        "import pathlib\n"
        "def own(prompts, output, **_):\n"
        "    with pathlib.Path(__file__).with_suffix('.txt').open('a') as file:\n"
        "        print(*output, sep='\\n', file=file)\n"
        "    return [1.0] * len(prompts)\n"
    )
    options |= {"eval_rewards": f"{tmp_path / 'own.py'}:own", "max_completion_length": 4}
    out = tmp_path / "out"
    said = run({**options, "output_dir": out}, tmp_path / "logs", fault=make_small_large)
    [found] = {line for line in said.splitlines() if "held-out prompts" in line}
    assert "Rows taken" in said and "answers to 10 held-out prompts" in found
    asked = {int(line.split()[0]) for line in (tmp_path / "own.txt").read_text().splitlines()}
    assert len(asked) == 10
    assert (max(asked) > 2000) == (not changes)
