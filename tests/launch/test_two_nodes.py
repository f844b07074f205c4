"""Two nodes that torchrun joins over a link of 100 Mbit/s, without a shared folder: losses, bytes,
and a cut link.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.metrics import read_metrics
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, train_ok
from tests.launch.two_nodes import Nodes, two_nodes, why_not

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
# Four ranks have the batch of two: as many rows in a step.
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "lora_rank": 256,
    "num_epochs": 1000,
    "lr_scheduler": "constant",
}
OPTIONS |= {"recompute": "all"}
ON_NODES = {"quant_cache": "off", "log_to": "jsonl", "save_every": "none"}  # as train_ok has it
SECONDS = 240.0  # a limit against hangs


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with two_nodes(tmp_path / "net") as nodes:
        yield nodes


def options(disk: Path, steps: int, strategy: str, ranks: int = 2) -> dict[str, Any]:
    places = {"model_name": disk / "model", "dataset": disk / "rows.jsonl", "max_steps": steps}
    return {**OPTIONS, **places, "sharding_strategy": strategy, "batch_size": 4 // ranks}


def fill(nodes: Nodes) -> None:
    for disk in nodes.disks:
        make_model(disk / "model")
        write_rows(disk / "rows.jsonl", make_rows(64))


def on_one_node(nodes: Nodes, folder: Path, steps: int) -> list[float]:
    train_ok(2, folder, **options(nodes.disks[0], steps, "full_shard"))
    return read_metrics(folder)


def wait_for_step(nodes: Nodes, step: int) -> None:
    metrics = nodes.disks[0] / "out/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < step:
        assert nodes.agents[0].poll() is None, nodes.output(0) + nodes.output(1)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("strategy", "per_node"), [("full_shard", 1), ("ddp", 1), ("hybrid_full_shard", 2)]
)
def test_two_nodes_have_the_losses_of_one_and_send_what_the_plan_says(
    strategy, per_node, nodes, tmp_path
):
    fill(nodes)
    sent = {}
    for steps in (4, 12):
        before = nodes.bytes_sent()
        out = nodes.disk / f"out{steps}"
        nodes.start(
            flags(**options(nodes.disk, steps, strategy, 2 * per_node), output_dir=out, **ON_NODES),
            per_node=per_node,
        )
        assert nodes.wait(SECONDS) == [0, 0], nodes.output(0) + nodes.output(1)
        sent[steps] = [
            after - already for already, after in zip(before, nodes.bytes_sent(), strict=True)
        ]
    losses = read_metrics(nodes.disks[0] / "out12")
    expected = on_one_node(nodes, tmp_path / "one", 12)
    assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 12
    assert (nodes.disks[0] / "out12/adapter_model.safetensors").exists() and not (
        nodes.disks[1] / "out12"
    ).exists()
    planned = re.search(
        r"Between 2 nodes: each sends about ([\d.]+) (KiB|MiB) per step",
        nodes.output(0),
    )
    assert planned is not None
    if strategy == "hybrid_full_shard":  # adapters' gradients, and little else
        size = float(planned[1]) * {"KiB": 2**10, "MiB": 2**20}[planned[2]]
        for less, more in zip(sent[4], sent[12], strict=True):
            assert size <= (more - less) / 8 <= 1.2 * size, (sent, planned[0])


def test_a_cut_link_ends_both_nodes_in_a_minute_and_the_run_resumes(nodes, tmp_path):
    fill(nodes)
    steps = 12
    argv = flags(
        **options(nodes.disk, steps, "full_shard"),
        output_dir=nodes.disk / "out",
        **{**ON_NODES, "save_every": 1},
    )
    nodes.start(argv)
    wait_for_step(nodes, 3)
    nodes.cut()
    began = time.monotonic()
    statuses = nodes.wait(SECONDS)
    assert time.monotonic() - began < 60 and 0 not in statuses
    for node in range(2):
        said = [
            line
            for line in nodes.output(node).splitlines()
            if re.match(r"\[rank \d\] error: ", line)
        ]
        assert len(said) == 1 and "cannot be reached" in said[0], nodes.output(node)
    nodes.join()
    nodes.start(argv)
    assert nodes.wait(SECONDS) == [0, 0], nodes.output(0) + nodes.output(1)
    assert "Resuming at step" in nodes.output(0)
    assert read_metrics(nodes.disks[0] / "out") == pytest.approx(
        on_one_node(nodes, tmp_path / "one", steps), rel=1e-6
    )


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_run_resumes_on_another_node_or_on_fewer(is_replaced, nodes, tmp_path, monkeypatch):
    fill(nodes)
    steps = 12
    argv = flags(
        **options(nodes.disk, steps, "full_shard"),
        output_dir=nodes.disk / "out",
        **{**ON_NODES, "save_every": 1},
    )
    # torch 2.13: a node that stays does not tell a new one the address of the store that it shares.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    nodes.torchrun = ["--nnodes", "1:2", "--max-restarts", "3"]
    nodes.rendezvous = ",last_call_timeout=5,keep_alive_interval=1"
    nodes.start(argv)
    wait_for_step(nodes, 3)
    nodes.kill(1)
    if is_replaced:
        nodes.start_again(1, argv)
    assert nodes.wait(SECONDS) == [0, 0 if is_replaced else -9], nodes.output(0) + nodes.output(1)
    starts = re.findall(r"; (\d) ranks? on the CPU|(Resuming) at step", nodes.output(0))
    assert starts == [("2", ""), (str(1 + is_replaced), ""), ("", "Resuming")], nodes.output(0)
    assert read_metrics(nodes.disks[0] / "out") == pytest.approx(
        on_one_node(nodes, tmp_path / "one", steps), rel=1e-6
    )


def test_nodes_without_a_shared_folder_are_refused(nodes):
    fill(nodes)
    given = {
        name: value
        for name, value in options(nodes.disk, 4, "full_shard").items()
        if name != "lora_rank"
    }
    nodes.start(flags(**given, output_dir=nodes.disk / "out", train_type="full", **ON_NODES))
    assert 0 not in nodes.wait(SECONDS)
    for node in range(2):
        assert "Rank 1's machine does not see" in nodes.output(node), nodes.output(node)
    assert "Checkpoint of step" not in nodes.output(0)
