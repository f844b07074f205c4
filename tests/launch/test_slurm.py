"""SLURM itself, with two nodes on this machine: the shipped file trains, and a job that is queued
again resumes.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, flags
from tests.launch.two_nodes import ADDRESSES, Nodes, two_nodes, why_not

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")  # apt install slurm-wlm munge
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        bool(MISSING) or why_not() is not None, reason=f"needs {MISSING}; {why_not()}"
    ),
]
SECONDS = 400.0  # a limit against hangs

# Each daemon's own files are in its folder. cred_expire is also how long a requeued job waits.
CONF = """
ClusterName=test
SlurmctldHost=n0
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=2
StateSaveLocation={folder}/n0
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MessageTimeout=60
MpiDefault=none
NodeName=n[0-1] CPUs=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Slurm:
    """slurmctld on the first node, slurmd on both."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        for node in range(2):
            (folder / f"n{node}").mkdir(parents=True)
        hosts = [
            "127.0.0.1 localhost",
            *(f"{address} n{node}" for node, address in enumerate(ADDRESSES)),
        ]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def on(self, node: int, *words: object) -> list[str]:
        """A command line that runs on a node, under its name."""
        named = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        entered = [
            "nsenter",
            f"--net=/run/netns/{self.nodes.spaces[node]}",
            "unshare",
            "--mount",
            "--uts",
        ]
        words = ("sh", "-c", named, "sh", f"n{node}", self.folder / "hosts", *words)
        return [*entered, *map(str, words)]

    def up(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid"}
        files |= {"seed-file": "munge.seed", "log-file": "munge.log"}
        given = [f"--{option}={self.folder / name}" for option, name in files.items()]
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={self.folder / 'munge.key'}"], check=True
        )
        self._start(["munged", "--foreground", "--force", *given])
        self._start(self.on(0, "slurmctld", "-D"))
        for node in range(2):
            self._start(self.on(node, "slurmd", "-D", "-N", f"n{node}"))
        self._wait_until("sinfo", "-h", "-t", "idle", "-o", "%D", shows="2")

    def _start(self, words: list[str]) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self.daemons.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
            )

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "PROCESSES_PER_NODE": "1",
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **own, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}

    def ask(self, *words: object) -> str:
        result = subprocess.run(
            self.on(0, *words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return result.stdout.strip()

    def _wait_until(self, *words: object, shows: str) -> None:
        end = time.monotonic() + SECONDS
        while self.ask(*words) != shows:
            assert time.monotonic() < end, (self.folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.2)

    def submit(self, out: Path, *words: object, **options: Any) -> str:
        """Submit the shipped file; its job's number."""
        log = f"--output={out}.log"
        file = ROOT / "scripts/cluster/slurm.sbatch"
        return self.ask(
            "sbatch", "--parsable", "--nodes=2", log, *words, file, out, *flags(**options)
        )

    def finish(self, out: Path) -> str:
        """Wait until no job is left; what the job has printed."""
        self._wait_until("squeue", "-h", shows="")
        return Path(f"{out}.log").read_text()

    def down(self) -> None:
        self.ask("scancel", "--full", "--user=root")
        self.ask("scontrol", "shutdown")
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with two_nodes(tmp_path / "net") as nodes:
        slurm = Slurm(nodes, tmp_path / "slurm")
        try:
            slurm.up()
            yield slurm
        finally:
            slurm.down()


def run_options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    options = {
        "model_name": make_model(tmp_path / "model"),
        "precision": "fp32",
        "batch_size": 2,
        "num_epochs": 1000,
    }
    options |= {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(64)),
        "lr_scheduler": "constant",
    }
    return {
        **options,
        "sharding_strategy": "full_shard",
        "quant_cache": "off",
        "log_to": "jsonl",
        **more,
    }


def wait_for_step(out: Path, step: int) -> None:
    end = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < step:
        assert time.monotonic() < end, Path(f"{out}.log").read_text()
        time.sleep(0.05)


def test_a_preempted_job_is_queued_again_and_ends_with_the_same_bytes(slurm, tmp_path):
    whole = tmp_path / "whole"
    pieces = tmp_path / "pieces"
    options = run_options(tmp_path, max_steps=60)
    slurm.submit(whole, **options)
    assert "Between 2 nodes" in slurm.finish(whole)
    job = slurm.submit(pieces, **options)
    wait_for_step(pieces, 5)
    slurm.ask("scontrol", "requeue", job)
    output = slurm.finish(pieces)
    assert "(SIGTERM): the checkpoint of step" in output and "Resuming at step" in output
    name = "adapter_model.safetensors"
    assert (whole / name).read_bytes() == (pieces / name).read_bytes()


def test_bad_input_is_not_queued_again(slurm, tmp_path):
    out = tmp_path / "out"
    slurm.submit(out, **run_options(tmp_path, max_steps=2, lora_target_modules="nothing"))
    assert "Not queued again" in slurm.finish(out)


def test_a_job_is_queued_again_before_its_time_is_over(slurm, tmp_path):
    out = tmp_path / "out"
    began = time.monotonic()
    log = tmp_path / "out.log"
    job = slurm.submit(
        out, "--time=60", "--signal=TERM@150", **run_options(tmp_path, max_steps=100_000)
    )
    wait_for_step(out, 5)
    minutes = 2 + int(time.monotonic() - began) // 60  # between one and two minutes from now
    slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    while "queued again" not in log.read_text():
        assert time.monotonic() - began < SECONDS, log.read_text()
        time.sleep(0.5)
    assert "Ended with status 75; queued again." in log.read_text()
    assert "(SIGTERM): the checkpoint of step" in log.read_text()
    assert slurm.ask("squeue", "-h", "-o", "%A") == job
