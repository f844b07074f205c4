"""Ray itself, with two nodes on this machine: the shipped script trains, and a killed worker is
replaced.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray[train]")
pytest.importorskip("ray.train")
pytestmark = pytest.mark.nightly
SECONDS = 300.0  # a limit against hangs


@pytest.fixture
def address() -> Iterator[str]:
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bytes(address, tmp_path):
    options = {
        "model_name": make_model(tmp_path / "model"),
        "dataset": tmp_path / "rows.jsonl",
        "device": "cpu",
    }
    write_rows(tmp_path / "rows.jsonl", make_rows(64))
    options |= {
        "precision": "fp32",
        "batch_size": 2,
        "lr_scheduler": "constant",
        "num_epochs": 1000,
        "max_steps": 60,
    }
    options |= {
        "save_every": 1,
        "sharding_strategy": "full_shard",
        "quant_cache": "off",
        "log_to": "jsonl",
    }
    whole = tmp_path / "whole"
    pieces = tmp_path / "pieces"

    def start(out: Path) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            ROOT / "scripts/cluster/ray_train.py",
            "2",
            *flags(**options, output_dir=out),
        ]
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
        with open(f"{out}.log", "wb") as log:
            return subprocess.Popen(
                list(map(str, command)), env=environment, stdout=log, stderr=log
            )

    assert start(whole).wait(SECONDS) == 0, Path(f"{whole}.log").read_text()[-3000:]
    run = start(pieces)
    end = time.monotonic() + SECONDS
    while not (pieces / "metrics.jsonl").exists() or len(read_metrics(pieces)) < 5:
        assert run.poll() is None and time.monotonic() < end, Path(f"{pieces}.log").read_text()[
            -3000:
        ]
        time.sleep(0.05)
    *_, worker = (
        process
        for process in psutil.process_iter()
        if "RayTrainWorker" in " ".join(process.cmdline())
    )
    worker.kill()
    assert run.wait(SECONDS) == 0 and "Resuming at step" in Path(f"{pieces}.log").read_text()
    name = "adapter_model.safetensors"
    assert (whole / name).read_bytes() == (pieces / name).read_bytes()
