"""benchmarks/gpu.py on the stand-in: every part's calls are made, without values."""

import json

from tests.phantom.environment import run
from tests.tiny import ROOT

# tests/test_benchmarks.py has the others, on the CPU and with values.
PARTS = ["box", "row: optimizer", "row: activation offload", "row: placement", "row: attention", "row: block functions"]


def test_the_benchmark_runs_to_its_end_where_kernels_compute_nothing(tmp_path):
    output, report = tmp_path / "gpu.json", tmp_path / "report.md"
    command = [ROOT / "benchmarks/gpu.py", "--tiny", "--output", output, "--report", report, "--parts", *PARTS]
    [rank] = run(command, tmp_path)
    assert rank.status == 0, rank.output[-4000:]
    assert "kernels compute nothing" in rank.output
    parts = json.loads(output.read_text())["parts"]
    assert [name for name, part in parts.items() if "error" in part] == []
    assert len(parts["row: optimizer"]["rows"][0]["figures"]) == 4
    assert "On the stand-in for CUDA" in report.read_text()
