"""kill -9 of the service and of its client: what comes out in the end has the bytes of a run that
nobody disturbed.
"""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.run import ROOT
from tests.service.harness import Service, on_two_ranks
from tests.service.loop import main

pytestmark = on_two_ranks
STEPS = 6


def adapter(service: Service, log: Path) -> bytes:
    """The adapter that a loop has ended with."""
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["step"] == STEPS
    return (service.saved(last["path"]) / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, float]:
    """The adapter of a loop that nobody disturbed, and its seconds."""
    log = tmp_path_factory.mktemp("whole") / "log.jsonl"
    before = time.monotonic()
    main(service.url, service.model, log, STEPS)
    return adapter(service, log), time.monotonic() - before


@pytest.mark.slow
def test_a_loop_goes_on_when_the_service_is_back(service, undisturbed, tmp_path):
    whole, seconds = undisturbed
    loop = threading.Thread(
        target=main, args=(service.url, service.model, tmp_path / "log.jsonl", STEPS)
    )
    loop.start()
    time.sleep(0.5 * seconds)
    service.kill()
    service.start()
    loop.join(timeout=600)
    assert adapter(service, tmp_path / "log.jsonl") == whole


@pytest.mark.nightly
@pytest.mark.parametrize("moment", range(10))
def test_killed_services_and_clients_end_with_equal_bytes(service, undisturbed, tmp_path, moment):
    whole, seconds = undisturbed
    choose = random.Random(moment)
    log = tmp_path / "log.jsonl"
    out = tmp_path / "out.txt"
    command = [
        sys.executable,
        "-m",
        "tests.service.loop",
        service.url,
        service.model,
        str(log),
        str(STEPS),
    ]

    def start() -> subprocess.Popen[bytes]:
        with out.open("a") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)

    loop = start()
    for victim in choose.choice(
        [["service"], ["client"], ["service", "client"], ["client", "service", "service"]]
    ):
        while not out.read_text() and loop.poll() is None:  # its first lines come after its imports
            time.sleep(0.01)
        time.sleep(choose.uniform(0.0, 0.8) * seconds)
        if victim == "service":
            service.kill()
            service.start()
        elif loop.poll() is None:
            loop.kill()
            loop.wait()
            loop = start()
    assert loop.wait(timeout=600) == 0, out.read_text()[-4000:] + service.log.read_text()[-4000:]
    assert adapter(service, log) == whole
