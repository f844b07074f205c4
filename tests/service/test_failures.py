"""A failure while ranks compute: of all ranks, it fails the request alone; of one, the service ends
and goes on.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tinker

from tests.helpers.models import Models
from tests.service.failing import ON_ALL, ON_ONE, UNLUCKY
from tests.service.harness import STEP, Service, assert_equal, datums


@pytest.fixture
def failing(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    program = Path(__file__).with_name("failing.py")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv(
        "FSDP_QLORA_SERVE",
        f"{sys.executable} -m torch.distributed.run --nproc_per_node 2 {program}",
    )
    (tmp_path / "around").mkdir()
    running = Service(
        models(), tmp_path / "around" / "folder", 2, train_type="qlora", hang_minutes=0.2
    )
    yield running
    running.end()


def train(client: tinker.TrainingClient, seed: int) -> None:
    client.forward_backward(datums(3, seed), "cross_entropy")
    client.optim_step(STEP).result(timeout=60)


@pytest.mark.slow
def test_a_pass_that_fails_on_all_ranks_fails_alone(failing):
    client = failing.trainer(seed=2)
    twin = failing.trainer(seed=2)
    for each in (client, twin):
        train(each, 1)
        each.forward_backward(datums(2, 2), "cross_entropy")
    with pytest.raises(tinker.TinkerError, match="ArithmeticError"):
        client.forward_backward(datums(2, of_policy=True), "dro", {"beta": ON_ALL}).result(
            timeout=60
        )
    train(client, 4)  # and is in the shards, when another one's request fails before it is
    train(twin, 4)
    client.forward_backward(datums(2, 5), "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.TinkerError, match="ArithmeticError"):
        failing.trainer(seed=UNLUCKY)
    twin.forward_backward(datums(2, 5), "cross_entropy").result(timeout=60)
    for each in (client, twin):  # the gradients of before are still there
        each.optim_step(STEP).result(timeout=60)
        train(each, 3)
    assert_equal(failing.adapter(client, "end"), failing.adapter(twin, "end"), 0)
    assert "Traceback" not in failing.log.read_text()


@pytest.mark.nightly
def test_a_pass_that_fails_on_one_rank_is_tried_three_times(failing):
    client = failing.trainer(seed=2)
    twin = failing.trainer(seed=2)
    for each in (client, twin):
        train(each, 1)
    failed = client.forward_backward(datums(2, of_policy=True), "dro", {"beta": ON_ONE})
    failing.process.wait(timeout=120)
    assert failing.process.returncode
    for _ in range(2):  # it is tried three times in all
        failing.start()
        with contextlib.suppress(Exception):
            failing.process.wait(timeout=60)
    failing.start()
    with pytest.raises(tinker.TinkerError, match="ended each time"):
        failed.result(timeout=60)
    for each in (client, twin):
        train(each, 2)
    assert_equal(failing.adapter(client, "end"), failing.adapter(twin, "end"), 0)


@pytest.mark.nightly
def test_a_rank_that_is_stopped_ends_the_service_which_goes_on(failing):
    client = failing.trainer(seed=2)
    twin = failing.trainer(seed=2)
    for each in (client, twin):
        train(each, 1)
    ranks = psutil.Process(failing.process.pid).children(recursive=True)
    stopped = max(ranks, key=lambda each: each.pid)
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(2)
    stopped.send_signal(signal.SIGCONT)  # a pause is no end
    train(client, 2)
    assert failing.process.poll() is None
    stopped.send_signal(signal.SIGSTOP)
    waiting = client.forward_backward(datums(3, 3), "cross_entropy")
    try:
        failing.process.wait(timeout=180)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped.send_signal(signal.SIGCONT)
            stopped.kill()
    failing.start()
    assert waiting.result(timeout=120).metrics["loss:sum"] > 0
    client.optim_step(STEP).result(timeout=60)
    for seed in (2, 3):
        train(twin, seed)
    assert_equal(failing.adapter(client, "end"), failing.adapter(twin, "end"), 0)
