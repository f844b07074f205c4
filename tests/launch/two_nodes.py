"""Two nodes on one machine: network namespaces with addresses of their own, one link between them,
no shared folder.

Needs root and `ip`. Every address is inside a namespace made here, and the namespaces go with the
block.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from fsdp_qlora.distributed.supervision.launch import is_from_an_agent
from tests.helpers.run import ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29400
_MBIT = 100
_MILLISECONDS = 20


def why_not() -> str | None:
    """None where two nodes can be made, else the line that says what is missing."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need root, ip and tc"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None if made.returncode == 0 else "this machine lets nobody make network namespaces"


def _run(*words: object) -> str:
    return subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True).stdout


class Nodes:
    """Two nodes; `disks` are their own folders, each of which its processes see as `disk`.

    torchrun: its options, besides how the nodes find each other. rendezvous: more for --rdzv_conf.
    """

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "disk"
        self.disks = [folder / f"node{node}" for node in range(2)]
        for path in (self.disk, *self.disks):
            path.mkdir(parents=True)
        self.spaces = [f"fq{os.getpid()}n{node}" for node in range(2)]
        self.logs = [path / "log" for path in self.disks]
        self.agents: list[subprocess.Popen[bytes]] = []
        self.link: subprocess.Popen[bytes] | None = None
        self.torchrun = ["--nnodes", "2"]
        self.rendezvous = ""

    def up(self) -> None:
        for space in self.spaces:
            _run("ip", "netns", "add", space)
        words = [
            sys.executable,
            str(Path(__file__).with_name("delayed_link.py")),
            *self.spaces,
            str(_MILLISECONDS),
        ]
        self.link = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self.link.stdout is not None and self.link.stdout.readline()  # when it is there
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            shaped = ("tbf", "rate", f"{_MBIT}mbit", "burst", "256kb", "latency", "200ms")
            _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *shaped)
        self.join()

    def join(self) -> None:
        for space in self.spaces:
            _run("ip", "-n", space, "link", "set", "eth0", "up")

    def cut(self) -> None:
        """From now on no packet comes through, and neither end is told."""
        _run("ip", "-n", self.spaces[1], "link", "set", "eth0", "down")

    def bytes_sent(self) -> list[int]:
        """By each node over the link, so far."""
        shown = [
            json.loads(_run("ip", "-n", space, "-j", "-s", "link", "show", "eth0"))
            for space in self.spaces
        ]
        return [link[0]["stats64"]["tx"]["bytes"] for link in shown]

    def start(self, argv: Sequence[str], *, per_node: int = 1) -> None:
        """Start torchrun on both nodes."""
        self.agents = [self._start(node, argv, per_node) for node in range(2)]

    def start_again(self, node: int, argv: Sequence[str]) -> None:
        self.agents[node] = self._start(node, argv, 1)

    def _start(self, node: int, argv: Sequence[str], per_node: int) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *self.torchrun,
            "--nproc_per_node",
            per_node,
        ]
        command += [
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            f"{ADDRESSES[0]}:{_PORT}",
            "--rdzv_id",
            "run",
        ]
        # The host's name does not resolve to an address of the namespace.
        command += [
            "--rdzv_conf",
            f"is_host={node == 0}{self.rendezvous}",
            "--local_addr",
            ADDRESSES[node],
        ]
        command += [ROOT / "train.py", *argv]
        environment = {
            name: value for name, value in os.environ.items() if not is_from_an_agent(name)
        }
        environment |= {
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        environment |= {"FSDP_QLORA_CACHE": str(self.disk / "cache"), "OMP_NUM_THREADS": "1"}
        # in the mount namespace that ip makes
        own_disk = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
        words = [
            "ip",
            "netns",
            "exec",
            self.spaces[node],
            "sh",
            "-c",
            own_disk,
            "sh",
            self.disks[node],
            self.disk,
        ]
        with open(self.logs[node], "ab") as log:
            return subprocess.Popen(
                list(map(str, [*words, *command])),
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def wait(self, seconds: float) -> list[int]:
        """The agents' exit statuses."""
        end = time.monotonic() + seconds
        return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents]

    def output(self, node: int) -> str:
        return self.logs[node].read_text(errors="replace")

    def kill(self, node: int) -> None:
        agent = self.agents[node]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [
                *psutil.Process(agent.pid).children(recursive=True),
                psutil.Process(agent.pid),
            ]:
                process.kill()
        agent.wait()

    def down(self) -> None:
        for node in range(len(self.agents)):
            self.kill(node)
        if self.link:
            self.link.kill()
            self.link.wait()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(folder)
    try:
        nodes.up()
        yield nodes
    finally:
        nodes.down()
