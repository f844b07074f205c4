"""What a day with a card would run, on the stand-in: none of it may grow old until one is lent.

README.md has the commands.
"""

import json
import subprocess

import pytest

from benchmarks.gpu import SETS
from stand_in.environment import PYTHON, run, variables
from tests.helpers.run import ROOT

pytestmark = pytest.mark.slow
TESTS = [
    "test_memory.py::test_reserved_memory_is_what_the_stand_in_has_counted[8b on two ranks, 2 x "
    "2048]",
    "test_two_ranks.py::test_out_of_memory_is_named_with_what_helps_and_ends_all_ranks[2]",
]
# tests/test_benchmarks.py has all measured parts, on the CPU and with values.
PARTS = ["box", "ways", "attention", "graphs", "offload", "host_activations", "context"]


@pytest.mark.nightly
def test_memory_and_its_lack_are_as_the_tests_for_a_gpu_want_them(tmp_path):
    command = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        *(ROOT / "tests/gpu" / test for test in TESTS),
        "-p",
        "no:cacheprovider",
    ]
    [rank] = run(command, tmp_path, settings={"FSDP_QLORA_GPU_TESTS": "stand-in"}, is_fresh=True)
    assert rank.status == 0 and "2 passed" in rank.output, rank.output[-6000:]


@pytest.mark.nightly
def test_values_are_as_the_tests_for_a_gpu_want_them(tmp_path):
    command = ["-m", "pytest", "-m", "gpu", ROOT / "tests/gpu", "-p", "no:cacheprovider"]
    settings = {"FSDP_QLORA_GPU_TESTS": "stand-in", "PHANTOM_VALUES": 1}
    [rank] = run(command, tmp_path, settings=settings, is_fresh=True, timeout_seconds=3600)
    assert rank.status == 0 and " passed" in rank.output, rank.output[-6000:]
    assert "comparisons of values skipped" not in rank.output


def test_the_benchmark_runs_to_its_end_where_kernels_compute_nothing(tmp_path):
    output = tmp_path / "gpu.json"
    report = tmp_path / "report.md"
    command = [
        ROOT / "benchmarks/gpu.py",
        "--tiny",
        "--output",
        output,
        "--report",
        report,
        "--parts",
        *PARTS,
    ]
    [rank] = run(command, tmp_path)
    assert rank.status == 0, rank.output[-4000:]
    assert "kernels compute nothing" in rank.output
    parts = json.loads(output.read_text())["parts"]
    assert [name for name, part in parts.items() if "error" in part] == []
    # Triton is not there, and cuDNN has no version.
    assert not parts["ways"]["triton"] and parts["ways"]["rows"]
    assert "cuDNN" in parts["attention"]["missing"]
    assert {*parts["attention"]["errors"]} == {"flash, any lengths", "SDPA, flash"}
    graphs = parts["graphs"]
    assert graphs["same_bits"] and not graphs["not_captured"] and graphs["pool_bytes"]
    assert len(parts["offload"]["rows"][0]["figures"]) == 3
    assert parts["host_activations"]["link_gb_s"] > 0
    assert [len(row["figures"]) for row in parts["host_activations"]["rows"]] == [4, 4]
    text = report.read_text()
    planned = parts["offload"]["planned"]
    assert "On the stand-in for CUDA" in text and "| offload | resident | " in text
    assert list(planned) == list(parts["offload"]["rows"][0]["figures"])
    for each in [*planned.values(), *parts["context"]["planned"].values()]:
        assert each["measured_gib"]["reserved"] == pytest.approx(
            each["planned_gib"]["reserved"], abs=0.25
        )
        assert each["planned_tokens_per_second"] > 0


@pytest.mark.nightly
def test_all_parts_of_the_check_run_to_their_end_and_report(tmp_path):
    out = tmp_path / "out"
    # With values and as on a GPU: gloo connects two ranks.
    settings = {"PHANTOM_VALUES": 1, "PHANTOM_CC": 90, "PHANTOM_GIB": 79, "PYTHON": PYTHON}
    for number in (1, 2, 3):
        command = [
            "bash",
            ROOT / "scripts/gpu_check.sh",
            "",
            out,
            "--part",
            number,
            "--tiny",
            "--patience",
            20,
        ]
        done = subprocess.run(
            [str(word) for word in command],
            env=variables(tmp_path, settings),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        assert sorted(path.name for path in out.iterdir()) == ["gpu.json", "log.txt", "report.md"]
        parts = json.loads((out / "gpu.json").read_text())["parts"]
        assert list(parts) == SETS[("first", "second", "third")[number - 1]]
        assert not [name for name, part in parts.items() if "error" in part or "left_out" in part]
        # The stand-in's NCCL joins the ranks of all tests, so that those of a card's are skipped.
        assert all(
            "passed" in part["tests"]
            for name, part in parts.items()
            if "tests" in part and name != "nccl"
        )
        text = (out / "report.md").read_text()
        assert str(tmp_path) not in text and "## What went wrong\n\nNothing." in text


@pytest.mark.nightly
def test_the_tests_of_the_cpu_run_on_a_machine_with_a_gpu(tmp_path):
    # Their ranks are forked from a process that has imported bitsandbytes.
    test = "tests/layers/test_sharding.py::test_whole_frozen_weights_are_not_kept_twice"
    [rank] = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "1-", test], tmp_path, is_fresh=True
    )
    assert rank.status == 0, rank.output[-3000:]


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({}, 0, "ok    two ranks       NCCL on 2 GPUs: sums and all patterns of 16 bits arrive"),
        ({"PHANTOM_NCCL_FAIL": 0}, 1, "FIX   two ranks       NCCL on 2 GPUs: [rank"),
    ],
)
def test_doctor_looks_at_gpus_and_at_what_nccl_sends(settings, status, said, tmp_path):
    settings = {"PHANTOM_DEVICES": 2, "PHANTOM_CC": 100, "PHANTOM_GIB": 180, **settings}
    [rank] = run(["-m", "fsdp_qlora", "doctor"], tmp_path, settings=settings, is_fresh=True)
    assert rank.status == status and said in rank.output, rank.output
    assert ("ok    GPUs            NVIDIA B200") in rank.output and (
        "256.00 MiB can be pinned"
    ) in rank.output
