"""Files and folders that are staged: whole or not there, whatever was there before."""

import os

import pytest

from fsdp_qlora.utils.files import staged_file, staged_folder


def test_staged_file_replaces_the_old_file_only_when_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), staged_file(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "old"
        raise OSError("full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with staged_file(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_remove_only_stale_partial_files(tmp_path):
    path = tmp_path / "run.json"
    left = tmp_path / ".run.json.0123456789abcdef.partial"
    left.touch()
    os.utime(left, (0, 0))
    (tmp_path / ".other.json.partial").write_text("another's")
    with staged_file(path) as slow:
        slow.write_text("slow")
        with staged_file(path) as fast:
            fast.write_text("fast")
        assert path.read_text() == "fast"
    assert path.read_text() == "slow"
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.json.partial", "run.json"]


def test_staged_folder_appears_only_when_complete(tmp_path):
    target = tmp_path / "target"
    staging = tmp_path / f"target.{os.getpid()}.partial"
    staging.mkdir()
    (staging / "of_a_killed_writer").touch()
    with pytest.raises(KeyboardInterrupt), staged_folder(target) as folder:
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with staged_folder(target) as folder:
        (folder / "file").touch()
        assert not target.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "file"]
