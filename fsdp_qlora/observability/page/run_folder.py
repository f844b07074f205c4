"""Reads what a run has left in its folder, as its report shows it."""

import contextlib
import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_qlora.observability.facts import FACTS_FILE
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, read_json
from fsdp_qlora.utils.records import is_evaluation, numbers_in, read_records
from fsdp_qlora.utils.redact import redact, redact_values
from fsdp_qlora.utils.run_files import METRICS_FILE, ROLLOUTS_FILE, RUN, SAMPLES_FILE, STATUS

_MOST_POINTS = 1200  # of a curve: more than a screen has
_MOST_SAMPLES = 400
_MOST_CHARACTERS = 4000  # of a sample
_TAIL = 2**20  # bytes of a file, in which its last line is
_REWARDS = ("reward", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
_OF_ANSWERS = ("completions/mean_length", "completions/clipped_ratio", "entropy", "kl")
_SUMS = {"tokens": "num_tokens", "seconds": "step_seconds", "skipped": "skipped"}
_CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", *_REWARDS, *_OF_ANSWERS)


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run's folder.

    Returns:
        steps: column -> its values, of all steps or of those that make the curves' shape.
        evaluations: the same, of all evaluations. totals: of all steps. settings: the options.
        status, facts, samples: the files' contents. All values are JSON types.
    Raises:
        UserError: no run has left its metrics there.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it has no {METRICS_FILE}. Give a run's "
            "--output_dir."
        )
    records = read_records(path)
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if is_evaluation(record)]
    columns = dict.fromkeys(chain(*evaluations))
    # Samples and facts may quote anything, and a report is made to be shown to others.
    samples = _samples(folder / SAMPLES_FILE) + _answers(folder / ROLLOUTS_FILE)
    return {
        "name": redact(folder.name or str(folder)),
        "status": read_json(folder / STATUS),
        "steps": _step_columns(steps),
        "evaluations": {name: [record.get(name) for record in evaluations] for name in columns},
        "totals": _totals(steps),
        "settings": read_json(folder / RUN).get("options", {}),
        "facts": redact_values(read_json(folder / FACTS_FILE)),
        "samples": redact_values(samples),
    }


def _step_columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The curves by column, with tokens and hours since the run began.

    Memory is the fullest rank's.
    """
    tokens = seconds = 0.0
    rows: list[dict[str, Any]] = []
    for record in records:
        # Records of damaged or older files may lack columns or have other types in them.
        tokens += _number(record.get("num_tokens"))
        seconds += _number(record.get("step_seconds"))
        row = {name: record[name] for name in ("step", "epoch", *_CURVES) if name in record}
        memory = record.get("memory_gib")
        if isinstance(memory, dict):
            for kind, values in memory.items():
                row[f"memory/{kind}"] = max(numbers_in(values).values(), default=None)
        row |= {"tokens": tokens, "hours": seconds / 3600}
        rows.append(row)
    drawn = [rows[index] for index in _rows_to_draw(rows)]
    columns = dict.fromkeys(chain(*drawn))
    return {column: [_finite(row.get(column)) for row in drawn] for column in columns}


def _rows_to_draw(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The rows to draw: the first, lowest and highest of each part of a long run."""
    if len(rows) <= _MOST_POINTS:
        return list(range(len(rows)))
    # Evenly spaced rows alone would miss the outliers, for which people look at a curve. Each part
    # gives up to five rows, often the same ones.
    size = math.ceil(4 * len(rows) / _MOST_POINTS)
    chosen = {len(rows) - 1}
    for start in range(0, len(rows), size):
        part = range(start, min(start + size, len(rows)))
        chosen.add(start)
        for name in ("loss", "grad_norm"):
            ordered = sorted(part, key=lambda index: _number(rows[index].get(name)))
            chosen |= {ordered[0], ordered[-1]}
    return sorted(chosen)


def _totals(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all steps, and the mean speed."""
    totals: dict[str, Any] = {}
    for name, column in _SUMS.items():
        totals[name] = sum(_number(record.get(column)) for record in steps)
    seconds = totals["seconds"]
    totals["tokens_per_second"] = totals["tokens"] / seconds if seconds else None
    return totals


def _samples(path: Path) -> list[dict[str, Any]]:
    """The first and the last samples; those between are left out where there are very many."""
    samples = []
    for record in read_records(path):
        prompt, text = (str(record.get(key, "")) for key in ("prompt", "text"))
        samples.append(
            {
                "step": record["step"],
                "prompt": prompt[:_MOST_CHARACTERS],
                "text": text[:_MOST_CHARACTERS],
            }
        )
    if len(samples) <= _MOST_SAMPLES:
        return samples
    half = _MOST_SAMPLES // 2
    return samples[:half] + samples[-half:]


def _answers(path: Path) -> list[dict[str, Any]]:
    """Three answers of rollouts.jsonl as samples: from its beginning, middle and end."""
    lines = []
    damaged = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)
    with contextlib.suppress(*damaged), open_named(path) as file:
        # The file may be large, so three places of it are read.
        lines.append(file.readline())
        file.seek(path.stat().st_size // 2)
        file.readline()  # the rest of a line
        lines.append(file.readline())
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines += file.readlines()[-1:]
        return [_answer(json.loads(line)) for line in dict.fromkeys(lines) if line]
    return []


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    """A row of rollouts.jsonl as a sample; the last message of a chat is the prompt."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"]
    text = row["completion"][:_MOST_CHARACTERS]
    if row["reward"] is not None:
        text += f"\n\nreward {row['reward']}"
    return {"step": row["step"], "prompt": prompt[:_MOST_CHARACTERS], "text": text}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _finite(value: object) -> object:
    """Rounded to what a curve shows; None for what is no finite number."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value if isinstance(value, int) else None
