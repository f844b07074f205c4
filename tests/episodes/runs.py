"""Options of short runs of a tiny agent in an environment."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.rows import write_rows
from tests.helpers.run import ROOT
from tests.rollouts.runs import OPTIONS as ROLLOUT_OPTIONS

COUNTER = ROOT / "examples" / "agent" / "counter.py"
OPTIONS: dict[str, Any] = {
    **ROLLOUT_OPTIONS,
    "max_completion_length": 96,
    "context_length": 160,
}


def make_counting_agent(folder: Path) -> Path:
    """The random model of examples/agent, which calls a tool now and then."""
    program = ROOT / "examples" / "agent" / "make.py"
    subprocess.run([sys.executable, program, "--output_dir", folder], check=True)
    return folder


def inputs(folder: Path, agent: Path, *, prompts: int = 4, **changes: Any) -> dict[str, Any]:
    """Options of a run on counts of 1 to 4."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": f"count {1 + number % 4}"}],
            "count": 1 + number % 4,
        }
        for number in range(prompts)
    ]
    dataset = write_rows(folder / "rows.jsonl", rows)
    named = {"model_name": agent, "dataset": dataset, "environment": f"{COUNTER}:Counter"}
    return {**OPTIONS, **named, **changes}
