"""What should be a file and leads to a device is never read: /dev/zero has no end."""

import os
from pathlib import Path

import pytest

from fsdp_qlora.checkpointing.checkpoint import MANIFEST, DamagedCheckpoint, verify
from fsdp_qlora.checkpointing.stores import FolderStore
from fsdp_qlora.metrics.metric_log import cut_metrics
from fsdp_qlora.quant_cache.folders import CHECKSUMS, read_description
from fsdp_qlora.storage.files import read_json


def test_a_file_that_leads_to_a_device_is_not_read(tmp_path: Path) -> None:
    for name in (MANIFEST, CHECKSUMS):
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DamagedCheckpoint, match="it is no file"):
        verify(tmp_path)
    with pytest.raises(OSError, match="it is no file"):
        read_description(tmp_path)
    os.mkfifo(tmp_path / "run.json")
    assert read_json(tmp_path / "run.json") == {}


def test_metrics_and_a_mirror_that_lead_to_a_pipe_or_device_are_not_read(tmp_path: Path) -> None:
    for name, make in (("metrics.jsonl", os.mkfifo), ("run.json", lambda path: path.symlink_to("/dev/zero"))):
        make(tmp_path / name)
        with pytest.raises(OSError, match="it is no file"):
            FolderStore(tmp_path).read(name)
    with pytest.raises(OSError, match="it is no file"):
        cut_metrics(tmp_path, step=1, last_eval_step=-1)
    with pytest.raises(OSError, match="it is no file"):
        FolderStore(tmp_path / "mirror").put(tmp_path, "checkpoints/step_000001")
