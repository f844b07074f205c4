"""The wheel, used away from the clone that it was built from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(models, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "scripts/wheel_check.sh"), str(models()), str(rows)]
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("The wheel works.\n")
