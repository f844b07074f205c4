"""A stranger's first day: the site, the workflows, the issue forms and the examples match the
program.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from fsdp_qlora import __version__
from fsdp_qlora.__main__ import COMMANDS
from fsdp_qlora.config.options import option_types
from tests.helpers.models import make_model
from tests.helpers.run import ROOT, flags

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/run.sh"))


def test_the_site_has_each_document_once():
    pages = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    hook = (ROOT / "scripts/docs_site.py").read_text()
    copied = dict(re.findall(r'"([\w/]+\.md)": "([\w/]+\.md)"', hook))
    assert len(copied) > 5 and [source for source in copied if not (ROOT / source).exists()] == []
    documents = [
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    ]
    assert sorted(pages) == sorted([*documents, *copied.values()])


def test_workflows_run_parts_that_there_are():
    parts = set(re.findall(r"^ +([\w| -]+)\) ", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    known = {part.strip() for names in parts for part in names.split("|")}
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {}).get("part", [""])
            lines = [step["run"] for step in job["steps"] if "run" in step]
            assert lines and all(line.startswith(".ci/run ") for line in lines)
            called |= {
                line.split()[1] if "{" not in line else part for line in lines for part in matrix
            }
    assert called == known == {"static", "quick", "ranks", "chaos", "stand-in", "docs", "nightly"}


def test_forms_for_problems_ask_for_env_and_doctor():
    forms = [
        yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
    ]
    forms = [form for form in forms if "body" in form]
    for form in forms:
        asked = set(re.findall(r"`fsdp-qlora (\w+)`", json.dumps(form)))
        assert {"env", "doctor"} <= asked <= COMMANDS.keys()


def test_one_version_is_named_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(
        r"^## \[(\d[\d.]+)\] - ([\w-]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest and newest[1] == citation["version"] == __version__
    assert newest[2] in (str(citation.get("date-released")), "unreleased")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [author["name"] for author in project["authors"]] == [
        author["name"] for author in citation["authors"]
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_log_of_an_example_is_that_of_its_command(name):
    folder = ROOT / "examples" / name
    command = re.sub(r"\\\n *", "", (folder / "run.sh").read_text())
    (line,) = [
        line.removesuffix(' "$@"')
        for line in command.splitlines()
        if line.startswith("fsdp-qlora train")
    ]
    given = [word.removeprefix("--") for word in shlex.split(line) if word.startswith("--")]
    assert set(given) - option_types().keys() <= {"config"}
    log = (folder / "run.log").read_text()
    assert log.startswith(f"$ {line}\n") and "Proof: " in log and "Finished in" in log
    assert (folder / "curve.svg").stat().st_size < 60_000


def a_clone(folder: Path) -> Path:
    """The files that the examples use, beside a tiny model where they look for the demo's."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("scripts", "fsdp_qlora"):
        (folder / name).symlink_to(ROOT / name)
    make_model(folder / "demo/model", max_position_embeddings=1024)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_in_a_clone(name, tmp_path):
    script = a_clone(tmp_path) / f"examples/{name}/run.sh"
    (tmp_path / f"examples/{name}/curve.svg").unlink()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(script), *flags(max_steps=2, max_bad_rows=1)]  # its tokens are bytes
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "<polyline" in (tmp_path / f"examples/{name}/curve.svg").read_text()


@pytest.mark.nightly
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(a_clone(tmp_path))
    names: dict[str, object] = {}
    cells = json.loads((ROOT / "examples/python_api.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in code:
            exec("".join(cell["source"]), names)
    shown = "".join(text for cell in code for output in cell["outputs"] for text in output["text"])
    # What a tiny model's losses and answers are is its own.
    same = r"^(?:planned|finished after \d+ steps|the loss fell: True|.*did you mean.*)$"
    assert re.findall(same, printed.getvalue(), re.M) == re.findall(same, shown, re.M) != []
