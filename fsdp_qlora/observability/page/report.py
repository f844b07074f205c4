"""A report: one HTML file that contains everything it shows and loads nothing."""

import base64
import hashlib
import html
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora import __version__
from fsdp_qlora.config.options import DEFAULTS
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.observability.page.run_folder import read_run
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import open_named, refusal_named, staged_file
from fsdp_qlora.utils.records import plain
from fsdp_qlora.utils.redact import redact

log = logging.getLogger("fsdp_qlora")

REPORT_FILE = "report.html"
_MARK = "<!-- a report by fsdp_qlora -->"  # marks files that may be replaced
_PARTS = Path(__file__).resolve().parent


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
