"""A report: one HTML file that contains everything it shows and loads nothing.

`Facts` writes facts.json while a run trains, `read_run` reads all that a run has left,
`write_report` draws it.
"""

import base64
import contextlib
import hashlib
import html
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_qlora import __version__
from fsdp_qlora.config.options import DEFAULTS
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.distributed.supervision import clock
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, read_json, refusal_named, staged_file, write_json
from fsdp_qlora.utils.records import numbers_in, plain, read_records
from fsdp_qlora.utils.redact import redact, redact_values
from fsdp_qlora.utils.run_files import METRICS_FILE, ROLLOUTS_FILE, RUN, SAMPLES_FILE, STATUS

log = logging.getLogger("fsdp_qlora")

REPORT_FILE = "report.html"
FACTS_FILE = "facts.json"
_MARK = "<!-- a report by fsdp_qlora -->"  # marks files that may be replaced
_PARTS = Path(__file__).resolve().parent

_MOST_POINTS = 1200  # of a curve: more than a screen has
_MOST_SAMPLES = 400
_MOST_CHARACTERS = 4000  # of a sample
_TAIL = 2**20  # bytes of a file, in which its last line is
_REWARDS = ("reward", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
_OF_ANSWERS = ("completions/mean_length", "completions/clipped_ratio", "entropy", "kl")
_SUMS = {"tokens": "num_tokens", "seconds": "step_seconds", "skipped": "skipped"}
_CURVES = ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", *_REWARDS, *_OF_ANSWERS)


class Facts:
    """Collects facts of one start of a run, and writes them to facts.json; on rank 0 only.

    Time is counted without gaps: `mark` gives all of it since the mark before to one phase. A
    failure to write is no reason to stop a run.

    Args:
        started: when this start began, by control.clock.
        step: where it begins.
    """

    def __init__(self, folder: Path, *, is_rank_0: bool, started: float, step: int) -> None:
        self._path = folder / FACTS_FILE if is_rank_0 else None
        self._marked = started
        self._start: dict[str, Any] = {
            "step": step,
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": {},
        }
        self._starts: list[dict[str, Any]] | None = None
        self._about: dict[str, Any] = {}

    def describe(self, about: Callable[[], Mapping[str, Any]]) -> None:
        """Add facts about the run by heading: environment, data, memory.

        The file keeps those of the last start.
        """
        if self._path is None:
            return
        try:
            self._about |= about()
        except Exception as error:  # such as a driver's program that has gone wrong
            log.debug("Facts for the report could not be found out: %s", error)

    def mark(self, phase: str) -> None:
        """Count the time since the last mark for this phase."""
        now = clock.elapsed()
        seconds = self._start["seconds"]
        seconds[phase] = seconds.get(phase, 0.0) + now - self._marked
        self._marked = now

    def write(self) -> None:
        if self._path is None:
            return
        if self._starts is None:  # the folder may have been another run's until training began
            self._starts = read_json(self._path).get("starts", [])
        with contextlib.suppress(OSError):
            write_json(self._path, self._about | {"starts": [*self._starts, self._start]})


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
    evaluations = [record for record in records if "eval_loss" in record]
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

    Memory is that of the fullest rank.
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
    """A row of rollouts.jsonl as a sample; of a chat, its last message is the prompt."""
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


# --- the page ---


def make_page(runs: Sequence[dict[str, Any]]) -> str:
    """Make the HTML page."""
    page, style, script = (
        (_PARTS / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    # The page's policy allows the one script with this hash. Rows and answers may hold tags and
    # scripts: texts of the runs are data in it, never markup.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = html.escape(" · ".join(run["name"] for run in runs))
    return page.format(
        mark=_MARK, digest=digest, title=title, style=style, data=_as_data(runs), script=script
    )


def _as_data(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as JSON in which no text can close the script element or open another."""
    content = {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "defaults": resolved_options(DEFAULTS),
        "runs": runs,
    }
    text = json.dumps(plain(content), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write_report(folders: Sequence[Path], out: Path, *, state: str | None = None) -> None:
    """Write the report of some runs' folders.

    Args:
        state: instead of that in status.json, which a run writes last.
    Raises:
        UserError: a folder is not a run's, or `out` is somebody else's file or cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    # Runs of the same name, such as a/run and b/run, are told apart by their paths.
    if len({run["name"] for run in runs}) < len(runs):
        for run, folder in zip(runs, folders, strict=True):
            run["name"] = redact(str(folder))
    if state is not None:
        for run in runs:
            run["status"] = run["status"] | {"state": state}
    page = make_page(runs)
    with refusal_named("out", out):
        if out.exists() and not _is_ours(out):
            raise UserError(f"--out {out} exists and is not a report. Give another file.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(out) as partial:
            partial.write_text(page, encoding="utf-8")


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_named(path) as file:
        return _MARK.encode() in file.read(200)


def write_at_end(folder: Path, *, state: str | None) -> None:
    """Write a run's report into its folder; a failure is logged and stops nothing.

    Args:
        state: as for `write_report`.
    """
    try:
        write_report([folder], folder / REPORT_FILE, state=state)
    except Exception as error:
        log.warning("No report was written: %s", error)
