"""A report: one HTML file that contains everything it shows and loads nothing."""

import base64
import dataclasses
import hashlib
import html
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.config.options import DEFAULTS
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.errors import UserError
from fsdp_qlora.results.read_run import RunRecord, read_run
from fsdp_qlora.storage.files import staged_file
from fsdp_qlora.version import VERSION

log = logging.getLogger("fsdp_qlora")

REPORT_FILE = "report.html"
_MARK = "<!-- a report by fsdp_qlora -->"  # marks files that may be replaced
_PARTS = Path(__file__).resolve().parent

_PAGE = """\
<!doctype html>
{mark}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src '{script_hash}'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main id="page"><noscript>The curves are drawn by a script in this file. Allow it, or read metrics.jsonl.</noscript>\
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def make_page(runs: Sequence[RunRecord]) -> str:
    """The HTML page. Texts of the runs are data in it, never markup: rows and answers may hold tags and scripts."""
    script = "\n" + (_PARTS / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _PAGE.format(
        mark=_MARK,
        script_hash=f"sha256-{digest}",
        title=html.escape(" · ".join(run.name for run in runs)),
        style=(_PARTS / "page.css").read_text(encoding="utf-8"),
        data=_as_data(runs),
        script=script,
    )


def _as_data(runs: Sequence[RunRecord]) -> str:
    """JSON in which no text can close the script element or open another."""
    content = {
        "version": VERSION,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "defaults": resolved_options(DEFAULTS),
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    text = json.dumps(_plain(content), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _plain(value: Any) -> Any:
    """What JSON has: a YAML file may hold dates, and numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return str(value)


def write_report(folders: Sequence[Path], out: Path, *, state: str | None = None) -> None:
    """Write the report of some runs' folders.

    Args:
        state: instead of that in status.json, which a run writes last.
    Raises:
        UserError: a folder is not a run's, or `out` is somebody else's file or cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    if state is not None:
        runs = [dataclasses.replace(run, status=run.status | {"state": state}) for run in runs]
    page = make_page(runs)
    try:
        if out.exists() and not _is_ours(out):
            raise UserError(f"--out {out} exists and is not a report. Give another file.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(out) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}.") from error


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _MARK in file.read(200)


def write_at_end(folder: Path, *, state: str | None) -> None:
    """Write a run's report into its folder. A failure is logged and stops nothing. state: as for `write_report`."""
    try:
        write_report([folder], folder / REPORT_FILE, state=state)
    except Exception as error:
        log.warning("No report was written: %s", error)
