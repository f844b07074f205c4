"""The example of docs/stand_in.md runs on two GPUs of the stand-in as it does on the CPU."""

import re
import textwrap

import pytest

from stand_in.environment import run
from tests.helpers.run import ROOT


@pytest.mark.parametrize(
    "kind",
    [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("ddp", marks=pytest.mark.nightly)],
)
def test_the_example_of_the_page_prints_the_losses_of_the_cpu(kind, tmp_path):
    page = (ROOT / "docs/stand_in.md").read_text()
    [code] = re.findall(r"^    import os\n(?:    .*\n|\n)+", page, re.MULTILINE)
    script = tmp_path / "example.py"
    # gloo's threads hang the end of one in ten such processes of torch 2.11, where the losses are
    # long there.
    script.write_text(
        textwrap.dedent(code) + 'if device.type == "cpu":\n    sys.stdout.flush()\n  '
        "  os._exit(0)\n"
    )
    losses = []
    for device, settings in (
        ("cuda", {"PHANTOM_VALUES": 1}),
        ("cpu", {"CUDA_VISIBLE_DEVICES": ""}),
    ):
        ended = run([script, device, kind], tmp_path / device, ranks=2, settings=settings)
        assert [rank.status for rank in ended] == [0, 0], ended[0].output[-4000:]
        losses.append(re.findall(r"loss (\d\.\d{6})\n", ended[0].output))
    assert losses[0] == losses[1] and len(losses[0]) == 5
