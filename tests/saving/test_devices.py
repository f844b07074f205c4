"""What should be a file and leads to a device is never read: /dev/zero has no end."""

import os
from pathlib import Path

import pytest

from fsdp_qlora.checkpointing.checkpoint import MANIFEST, DamagedCheckpoint, verify
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
